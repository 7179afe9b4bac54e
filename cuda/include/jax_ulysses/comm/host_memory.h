// SPDX-License-Identifier: Apache-2.0
// Memory operations of RankProtocol for ranks that are threads of one process.
#ifndef JAX_ULYSSES_COMM_HOST_MEMORY_H_
#define JAX_ULYSSES_COMM_HOST_MEMORY_H_

#include <sched.h>
#include <time.h>

#include "jax_ulysses/base.h"

// ThreadSanitizer does not model fences. There the polls acquire instead, which is the same edge;
// JAX_ULYSSES_RELAXED_POLLS leaves them relaxed, for the control that removes it.
#if defined(__SANITIZE_THREAD__) && !defined(JAX_ULYSSES_RELAXED_POLLS)
#define JU_POLL_ORDER __ATOMIC_ACQUIRE
#else
#define JU_POLL_ORDER __ATOMIC_RELAXED
#endif

namespace jax_ulysses {

struct HostMemory {
  static uint32_t LoadRelaxed(const uint32_t* p) { return __atomic_load_n(p, JU_POLL_ORDER); }
  static uint64_t LoadRelaxed(const uint64_t* p) { return __atomic_load_n(p, JU_POLL_ORDER); }
  static void StoreRelaxed(uint32_t* p, uint32_t v) { __atomic_store_n(p, v, __ATOMIC_RELAXED); }
  static void StoreRelease(uint32_t* p, uint32_t v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
  static void StoreRelease(uint64_t* p, uint64_t v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
  static void AddRelease(uint32_t* p, uint32_t v) { __atomic_fetch_add(p, v, __ATOMIC_RELEASE); }
  static void AddRelaxed(uint32_t* p, uint32_t v) { __atomic_fetch_add(p, v, __ATOMIC_RELAXED); }
  static uint32_t Exchange(uint32_t* p, uint32_t v) {
    return __atomic_exchange_n(p, v, __ATOMIC_RELAXED);
  }
  static void AcquireFence() {
#if !defined(__SANITIZE_THREAD__)
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
#endif
  }

  // There may be far more ranks than cores: give the core away soon, then sleep.
  static void Pause(int polls) {
    if (polls < 8) return;
    if (polls < 256) {
      sched_yield();
      return;
    }
    const timespec nap = {0, polls < 2048 ? 20000 : 200000};
    nanosleep(&nap, nullptr);
  }

  static uint64_t NowNs() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<uint64_t>(now.tv_sec) * 1000000000u + static_cast<uint64_t>(now.tv_nsec);
  }
};

}  // namespace jax_ulysses

#endif  // JAX_ULYSSES_COMM_HOST_MEMORY_H_
