// SPDX-License-Identifier: Apache-2.0
// Memory operations of RankProtocol in a kernel. Everything that crosses ranks has system scope:
// peers may be other devices or other processes.
#ifndef JAX_ULYSSES_COMM_PTX_MEMORY_H_
#define JAX_ULYSSES_COMM_PTX_MEMORY_H_

#include "jax_ulysses/base.h"
#include "jax_ulysses/ptx/async.h"

namespace jax_ulysses {

// The functions are JU_HD because RankProtocol is; the host side is never called.
struct PtxMemory {
#if defined(__CUDA_ARCH__)
#define JU_PTX(code) code
#else
#define JU_PTX(code)
#endif
  JU_HD static uint32_t LoadRelaxed(const uint32_t* p) {
    uint32_t v = 0;
    JU_PTX(asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory"));
    return v;
  }
  JU_HD static uint64_t LoadRelaxed(const uint64_t* p) {
    uint64_t v = 0;
    JU_PTX(asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory"));
    return v;
  }
  JU_HD static void StoreRelaxed(uint32_t* p, uint32_t v) {
    JU_PTX(asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory"));
  }
  JU_HD static void StoreRelease(uint32_t* p, uint32_t v) {
    JU_PTX(asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory"));
  }
  JU_HD static void StoreRelease(uint64_t* p, uint64_t v) {
    JU_PTX(asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory"));
  }
  JU_HD static void AddRelease(uint32_t* p, uint32_t v) {
    JU_PTX(asm volatile("red.release.sys.global.add.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory"));
  }
  JU_HD static void AddRelaxed(uint32_t* p, uint32_t v) {
    JU_PTX(asm volatile("red.relaxed.sys.global.add.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory"));
  }
  JU_HD static uint32_t Exchange(uint32_t* p, uint32_t v) {
    uint32_t before = 0;
    JU_PTX(asm volatile("atom.relaxed.sys.global.exch.b32 %0, [%1], %2;" : "=r"(before) : "l"(p),
                        "r"(v) : "memory"));
    return before;
  }
  JU_HD static void AcquireFence() { JU_PTX(asm volatile("fence.acq_rel.sys;" :: : "memory")); }
  // The first polls come at once: most waits are already satisfied.
  JU_HD static void Pause(int polls) {
    if (polls < 16) return;
    JU_PTX(asm volatile("nanosleep.u32 %0;" ::"r"(polls < 1024 ? 32 : 500)));
  }
  JU_HD static uint64_t NowNs() {
    uint64_t now = 0;
    JU_PTX(now = ptx::GlobalTimer());
    return now;
  }
#undef JU_PTX
};

}  // namespace jax_ulysses

#endif  // JAX_ULYSSES_COMM_PTX_MEMORY_H_
