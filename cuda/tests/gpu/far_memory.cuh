// SPDX-License-Identifier: Apache-2.0
// Heaps whose control words lie on the device and whose slots lie in the host's memory, across
// PCIe: data takes far longer than flags, so that a flag which nothing orders after its data
// arrives before it.
#ifndef JAX_ULYSSES_TESTS_GPU_FAR_MEMORY_CUH_
#define JAX_ULYSSES_TESTS_GPU_FAR_MEMORY_CUH_

#include <sys/mman.h>

#include "device_util.cuh"

namespace jax_ulysses::testing {

class FarMemory {
 public:
  FarMemory() = default;
  FarMemory(const FarMemory&) = delete;
  FarMemory& operator=(const FarMemory&) = delete;
  ~FarMemory() {
    if (host_ == nullptr) return;
    cudaHostUnregister(host_);
    munmap(host_, bytes_);
  }

  // Heaps of `layout`, which is changed: the counters of row blocks, which kernels do not use, take
  // up all addresses between the control words of a rank and its slots. Returns the base of rank 0;
  // rank r is r * stride() further on.
  char* Allocate(HeapLayout& layout) {
    const int64_t control = layout.control_bytes();
    stride_ = RoundUp(control + layout.num_slots * layout.slot_stride(), int64_t{2} << 20);
    bytes_ = static_cast<size_t>(stride_ * layout.num_ranks);
    device_ = Buffer(static_cast<int64_t>(bytes_));
    char* base = device_.get();
    // Slots come behind control words, so the host's addresses must be above the device's.
    for (int64_t gap = 1; host_ == nullptr && gap < 1024; gap *= 2) {
      void* hint = base + bytes_ + (gap << 30);
      void* got = mmap(hint, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (got == hint) {
        host_ = got;
      } else if (got != MAP_FAILED) {
        munmap(got, bytes_);
      }
    }
    if (host_ == nullptr) {
      std::printf("no free addresses above the device's\n");
      std::exit(1);
    }
    CK(cudaHostRegister(host_, bytes_, cudaHostRegisterMapped));
    void* seen;
    CK(cudaHostGetDevicePointer(&seen, host_, 0));
    const int64_t gap = static_cast<char*>(host_) - base;
    layout.blocks_per_source = (gap - layout.arrived(0, 0)) / (2 * layout.num_ranks * 128) * 32;
    if (seen != host_ || layout.control_bytes() != gap) {
      std::printf("the slots do not lie where they should\n");
      std::exit(1);
    }
    return base;
  }
  int64_t stride() const { return stride_; }

 private:
  Buffer device_;
  void* host_ = nullptr;
  size_t bytes_ = 0;
  int64_t stride_ = 0;
};

}  // namespace jax_ulysses::testing

#endif  // JAX_ULYSSES_TESTS_GPU_FAR_MEMORY_CUH_
