// SPDX-License-Identifier: Apache-2.0
// What only tests and benchmarks do to a kernel: remove an edge, delay a rank, hold the link to a
// rate. Kernels built for production contain none of it (template argument kTest).
#ifndef JAX_ULYSSES_EXCHANGE_TEST_HOOKS_H_
#define JAX_ULYSSES_EXCHANGE_TEST_HOOKS_H_

#include "jax_ulysses/base.h"
#include "jax_ulysses/comm/edges.h"

namespace jax_ulysses {

struct TestHooks {
  uint32_t removed_edges = kEdgeNone;
  uint32_t absent = 0;                 // the rank does not take part in the call
  uint32_t start_delay_ns = 0;         // of the whole rank
  uint32_t epilogue_delay_ns = 0;      // before a tile is stored
  uint32_t copy_delay_ns = 0;          // before a chunk is loaded
  float ns_per_byte = 0;               // of what this rank sends or fetches over the link
  unsigned long long* link = nullptr;  // time until which the link is booked

  template <bool kTest>
  JU_HD static bool Removed(const TestHooks& hooks, uint32_t edge) {
    if constexpr (kTest) return (hooks.removed_edges & edge) != 0;
    return false;
  }

#if defined(__CUDACC__)
  __device__ static void Sleep(uint32_t ns) {
    if (ns == 0) return;
    unsigned long long now, start;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do {
      asm volatile("nanosleep.u32 64;");
      asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    } while (now - start < ns);
  }

  // A token bucket of 20 us, shared by all CTAs of the rank. Whole warp; `lead` pays.
  __device__ void Throttle(int bytes, bool lead) const {
    if (lead) Sleep(copy_delay_ns);
    if (ns_per_byte == 0) return;
    if (lead) {
      constexpr unsigned long long kBurstNs = 20000;
      unsigned long long now;
      asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
      atomicMax(link, now - kBurstNs);
      const auto cost = static_cast<unsigned long long>(static_cast<float>(bytes) * ns_per_byte);
      const unsigned long long until = atomicAdd(link, cost) + cost;
      while (now < until) {
        asm volatile("nanosleep.u32 64;");
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
      }
    }
    __syncwarp();
  }
#endif
};

}  // namespace jax_ulysses

#endif  // JAX_ULYSSES_EXCHANGE_TEST_HOOKS_H_
