// SPDX-License-Identifier: Apache-2.0
// How fast one communication warp copies, by shape of its ring, alone on its SM.
#include <cstring>

#include "device_util.cuh"
#include "jax_ulysses/comm/ptx_memory.h"
#include "jax_ulysses/exchange/copy_ring.h"

namespace jax_ulysses::testing {
namespace {

struct Job {
  const char* source;
  char* dest;
  uint32_t* flags;
  int32_t strips, strip_bytes;
  TestHooks hooks;
};

template <bool kWithSignals>
struct StripWork {
  static constexpr bool kSignals = kWithSignals;
  const Job& job;
  int32_t index;
  JU_D bool Next(Strip& strip) {
    index += static_cast<int32_t>(gridDim.x);
    if (index >= job.strips) return false;
    strip.source = job.source + int64_t{index} * job.strip_bytes;
    strip.dest = job.dest + int64_t{index} * job.strip_bytes;
    strip.rows = 1;
    strip.row_bytes = job.strip_bytes;
    strip.signal = index;
    return true;
  }
  JU_D void Signal(int32_t i) { PtxMemory::StoreRelease(job.flags + i, 1u); }
};

template <class Ring, bool kSignals>
__global__ void __launch_bounds__(128, 1) CopyKernel(const __grid_constant__ Job job) {
  extern __shared__ __align__(128) char bytes[];
  auto& storage = *reinterpret_cast<typename Ring::Storage*>(bytes);
  if (threadIdx.x == 0) {
    Ring::Init(storage);
    ptx::BarrierInitFence();
  }
  __syncthreads();
  if (threadIdx.x >= 32) return;
  Ring ring(storage, job.hooks);
  StripWork<kSignals> work{job, static_cast<int32_t>(blockIdx.x) - static_cast<int32_t>(gridDim.x)};
  ring.Run(work);
}

template <class Ring, bool kSignals>
void Measure(const char* name, Job job) {
  CK(cudaFuncSetAttribute(CopyKernel<Ring, kSignals>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                          200 * 1024));
  for (int strip : {4096, 16384, 32768}) {
    for (int ctas : {4, 33}) {
      job.strip_bytes = strip;
      job.strips = (16 << 20) / strip * ctas / 4;
      cudaEvent_t begin, end;
      CK(cudaEventCreate(&begin));
      CK(cudaEventCreate(&end));
      float best = 1e9;
      for (int i = 0; i < 5; ++i) {
        CK(cudaEventRecord(begin));
        CopyKernel<Ring, kSignals><<<ctas, 128, 200 * 1024>>>(job);
        CK(cudaEventRecord(end));
        CK(cudaEventSynchronize(end));
        float ms;
        CK(cudaEventElapsedTime(&ms, begin, end));
        best = std::min(best, ms);
      }
      std::printf("%-28s signals %d strip %5d ctas %2d: %5.2f GB/s a CTA\n", name, kSignals, strip,
                  ctas, double(job.strips) * strip / best * 1e-6 / ctas);
    }
  }
}

template <int kStages, int kBytes>
void Both(const char* name, const Job& job) {
  using Ring = CopyRing<kStages, kBytes, false>;
  Measure<Ring, false>(name, job);
  Measure<Ring, true>(name, job);
}

int Main() {
  Buffer source(256 << 20), dest(256 << 20), flags(1 << 20);
  Job job{};
  job.source = source.get();
  job.dest = dest.get();
  job.flags = reinterpret_cast<uint32_t*>(flags.get());
  Both<4, 8192>("4 stages of 8192", job);
  Both<3, 5632>("3 stages of 5632", job);
  Both<4, 4096>("4 stages of 4096", job);
  Both<2, 8192>("2 stages of 8192", job);
  return 0;
}

}  // namespace
}  // namespace jax_ulysses::testing

int main() { return jax_ulysses::testing::Main(); }
