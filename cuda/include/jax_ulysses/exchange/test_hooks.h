// SPDX-License-Identifier: Apache-2.0
// What only tests and benchmarks do to a kernel: remove an edge, delay a rank, hold the link to a
// rate, act as an adversary. Kernels built for production contain none of it (template argument
// kTest).
//
// The adversary does on purpose what asynchronous hardware may do and hardly ever does while a test
// looks. It is harmless while every edge is there:
//   - a stage of a copy ring is overwritten as soon as its store has read it;
//   - old bytes of a slot are read, and cached, before the wait for new ones;
//   - a flag that nothing orders after the data (no release, or a wait for .read only) is raised
//     before the data is stored: to those who look, the same as data that takes long to arrive;
//   - "done" that nothing orders after the reads is published when the rank begins.
#ifndef JAX_ULYSSES_EXCHANGE_TEST_HOOKS_H_
#define JAX_ULYSSES_EXCHANGE_TEST_HOOKS_H_

#include "jax_ulysses/base.h"
#include "jax_ulysses/comm/edges.h"

namespace jax_ulysses {

struct TestHooks {
  uint32_t removed_edges = kEdgeNone;
  uint32_t absent = 0;             // the rank does not take part in the call
  uint32_t start_delay_ns = 0;     // of the whole rank
  uint32_t epilogue_delay_ns = 0;  // before a tile is stored
  uint32_t copy_delay_ns = 0;      // before a chunk is loaded
  uint32_t read_delay_ns = 0;      // after the wait for data in a slot, before it is read
  uint32_t adversary = 0;
  float ns_per_byte = 0;               // of what this rank sends or fetches over the link
  unsigned long long* link = nullptr;  // time until which the link is booked

  template <bool kTest>
  JU_HD static bool Removed(const TestHooks& hooks, uint32_t edge) {
    if constexpr (kTest) return (hooks.removed_edges & edge) != 0;
    return false;
  }
  template <bool kTest>
  JU_HD static bool Adversary(const TestHooks& hooks) {
    if constexpr (kTest) return hooks.adversary != 0;
    return false;
  }
  // Whether the adversary raises flags before the data is stored.
  template <bool kTest>
  JU_HD static bool FlagsFirst(const TestHooks& hooks) {
    return Adversary<kTest>(hooks) && Removed<kTest>(hooks, kEdgeTileRelease | kEdgeBulkComplete);
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

  // Whole warp, between the wait for data and its first read.
  template <bool kTest>
  __device__ static void DelayRead(const TestHooks& hooks) {
    if constexpr (kTest) {
      if (threadIdx.x % 32 == 0) Sleep(hooks.read_delay_ns);
      __syncwarp();
    }
  }

  // Whole warp: caches what lies at `p` now, a byte of every sector.
  template <bool kTest>
  __device__ static void Touch(const TestHooks& hooks, const char* p, int32_t bytes) {
    if (!Adversary<kTest>(hooks)) return;
    uint32_t sum = 0;
    for (int32_t i = static_cast<int32_t>(threadIdx.x % 32) * 32; i < bytes; i += 32 * 32) {
      uint32_t old;
      asm volatile("ld.global.ca.u8 %0, [%1];" : "=r"(old) : "l"(p + i));
      sum = sum * 31 + old;
    }
    // A use of what was loaded: ptxas drops loads without one.
    if (sum == 0x5eed1e55) Sleep(1);
    __syncwarp();
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
