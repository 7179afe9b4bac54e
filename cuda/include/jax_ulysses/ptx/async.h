// SPDX-License-Identifier: Apache-2.0
// The PTX of asynchronous copies: mbarriers, one-dimensional bulk copies and the fences between
// proxies. Names follow the PTX manual.
#ifndef JAX_ULYSSES_PTX_ASYNC_H_
#define JAX_ULYSSES_PTX_ASYNC_H_

#include <cstdint>

#define JU_D __device__ __forceinline__

namespace jax_ulysses::ptx {

JU_D uint32_t SharedAddress(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

JU_D void BarrierInit(uint64_t* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(SharedAddress(barrier)),
               "r"(arrivals)
               : "memory");
}

// Makes initialised barriers visible to the async proxy; before the CTA-wide barrier that follows.
JU_D void BarrierInitFence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Barriers of some of the warps of a CTA, by number; 0 is __syncthreads. Those that arrive go on.
JU_D void NamedBarrierSync(int barrier, int threads) {
  asm volatile("barrier.cta.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
JU_D void NamedBarrierArrive(int barrier, int threads) {
  asm volatile("barrier.cta.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

JU_D void BarrierExpect(uint64_t* barrier, uint32_t bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(SharedAddress(barrier)),
      "r"(bytes)
      : "memory");
}

JU_D void BarrierArrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(SharedAddress(barrier)) : "memory");
}

JU_D bool BarrierTryWait(uint64_t* barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n.reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n}"
      : "=r"(done)
      : "r"(SharedAddress(barrier)), "r"(parity)
      : "memory");
  return done != 0;
}

// Whether the phase is over, at once.
JU_D bool BarrierTest(uint64_t* barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n.reg .pred p;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n}"
      : "=r"(done)
      : "r"(SharedAddress(barrier)), "r"(parity)
      : "memory");
  return done != 0;
}

// Waits without a deadline: only for barriers inside a CTA, whose other side always makes progress
// (waits for other ranks give up on an abort, and the pipelines drain).
JU_D void BarrierWait(uint64_t* barrier, uint32_t parity) {
  while (!BarrierTryWait(barrier, parity)) {
  }
}

// Addresses and sizes are multiples of 16 bytes.
JU_D void BulkLoad(void* shared, const void* global, uint32_t bytes, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(SharedAddress(shared)),
      "l"(global), "r"(bytes), "r"(SharedAddress(barrier))
      : "memory");
}

JU_D void BulkStore(void* global, const void* shared, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global),
               "r"(SharedAddress(shared)), "r"(bytes)
               : "memory");
}

JU_D void BulkCommit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// At most kPending groups of this thread are not yet complete: written, not only read.
template <int kPending>
JU_D void BulkWait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

// The same for their shared-memory sources only.
template <int kPending>
JU_D void BulkWaitRead() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Sixteen bytes, global -> shared, by the generic proxy; the thread sees them after CopyWaitAll.
JU_D void CopyAsync16(void* shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(SharedAddress(shared)), "l"(global)
               : "memory");
}
JU_D void CopyWaitAll() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Orders what the generic proxy observed or wrote before what the async proxy does next.
JU_D void ProxyFence() { asm volatile("fence.proxy.async;" ::: "memory"); }

// A count in this CTA's shared memory, with release and acquire at CTA scope. Both are atomics, the
// read too: racecheck takes a plain load or store for a race whatever its order is.
JU_D void AddReleaseShared(uint32_t* count, uint32_t value) {
  asm volatile("red.release.cta.shared::cta.add.u32 [%0], %1;" ::"r"(SharedAddress(count)),
               "r"(value)
               : "memory");
}
JU_D uint32_t ReadAcquireShared(uint32_t* count) {
  uint32_t value;
  asm volatile("atom.acquire.cta.shared::cta.or.b32 %0, [%1], 0;"
               : "=r"(value)
               : "r"(SharedAddress(count))
               : "memory");
  return value;
}

// A word at the same place in the shared memory of CTA `cta` of this cluster.
JU_D uint32_t LoadClusterShared(const uint32_t* word, uint32_t cta) {
  uint32_t value;
  asm volatile(
      "{\n.reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %1, %2;\n"
      "ld.shared::cluster.u32 %0, [there];\n}"
      : "=r"(value)
      : "r"(SharedAddress(word)), "r"(cta)
      : "memory");
  return value;
}

JU_D uint64_t GlobalTimer() {
  uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

JU_D uint32_t AddAcqRelGpu(uint32_t* p, uint32_t value) {
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(p), "r"(value)
               : "memory");
  return before;
}

}  // namespace jax_ulysses::ptx

#endif  // JAX_ULYSSES_PTX_ASYNC_H_
