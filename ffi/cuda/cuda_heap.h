// SPDX-License-Identifier: Apache-2.0
// Heaps in device memory. Ranks of one process reach each other by peer access, ranks of several
// processes by CUDA IPC. The memory is cudaMalloc's, not XLA's: XLA's allocator maps virtual memory
// that cannot be exported that way, and its addresses change from call to call.
#ifndef JAX_ULYSSES_FFI_CUDA_CUDA_HEAP_H_
#define JAX_ULYSSES_FFI_CUDA_CUDA_HEAP_H_

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "heap.h"

namespace jax_ulysses::cuda {

// Allocates and initialises the heaps of `members`, the ranks of one line in this process, and
// loads the kernels on their devices. Throws UnavailableError where the kernels cannot run, and
// std::runtime_error with the sizes when memory is refused.
std::unique_ptr<SymmetricHeap> MakeHeap(const HeapLayout& layout, int64_t deadline_ms,
                                        uint32_t start_epoch, const std::vector<Member>& members);

// Free and total bytes of a device.
std::pair<int64_t, int64_t> DeviceMemoryInfo(int device);

// What tells one physical device (or one slice of it) from all others, in any process.
std::string DeviceUuid(int device);

}  // namespace jax_ulysses::cuda

#endif  // JAX_ULYSSES_FFI_CUDA_CUDA_HEAP_H_
