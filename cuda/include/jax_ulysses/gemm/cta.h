// SPDX-License-Identifier: Apache-2.0
// One CTA of a persistent Hopper GEMM: CUTLASS's mainloop, unmodified, under the library's own
// kernel layer (what cutlass::gemm::kernel::GemmUniversal is to CUTLASS, without its scheduler) and
// epilogue (store_tile.h). Here: who does what, and the barriers and registers that all share.
//
// Warp group 0: warp 0 loads (producer.h), warp 1 communicates, warp 2 publishes, warp 3 looks
// ahead: watches what arrives, or plans tiles (tile_plan.h). After it the consumers (consumer.h).
#ifndef JAX_ULYSSES_GEMM_CTA_H_
#define JAX_ULYSSES_GEMM_CTA_H_

#include "cutlass/arch/reg_reconfig.h"
#include "cutlass/pipeline/pipeline.hpp"
#include "jax_ulysses/gemm/config.h"

namespace jax_ulysses {

enum class WarpRole { kProducer, kCommunicator, kPublisher, kWatcher, kConsumer };

JU_D WarpRole RoleOfWarp() {
  const int warp = cutlass::canonical_warp_idx_sync();
  return warp >= 4 ? WarpRole::kConsumer : static_cast<WarpRole>(warp);
}

// Moves registers from the first warp group to the consumers. By whole warp groups.
template <class C>
JU_D void TakeRegisters() {
  cutlass::arch::warpgroup_reg_alloc<C::kConsumerRegisters>();
}
template <class C>
JU_D void GiveRegisters() {
  cutlass::arch::warpgroup_reg_dealloc<C::kProducerRegisters>();
}

// A barrier of the whole cluster, of one CTA too. What threads wrote before it, also into shared
// memory, others see after it. In two halves: who has something to do that needs nobody else does
// it between them.
JU_D void ClusterArrive() {
  __syncwarp();
  cute::cluster_arrive();
}
JU_D void ClusterWait() { cute::cluster_wait(); }
JU_D void ClusterSync() {
  ClusterArrive();
  ClusterWait();
}

// After BeginRank and ClusterSync: whether any CTA of the cluster has seen an abort. They must
// agree, because each loads for the other.
template <class C>
JU_D bool AnyAborted(const typename C::Shared& shared) {
  bool any = shared.rank.aborted != 0;
  if constexpr (C::kCluster > 1) {
    for (uint32_t cta = 0; cta < C::kCluster; ++cta) {
      any = ptx::LoadClusterShared(&shared.rank.aborted, cta) != 0 || any;
    }
  }
  return any;
}

// The pipeline of a CTA. Making it initialises its barriers, which the other CTA of a cluster uses
// too: ClusterSync must follow.
template <class C>
JU_D typename C::Mainloop::MainloopPipeline MakePipeline(typename C::Shared& shared) {
  using Pipeline = typename C::Mainloop::MainloopPipeline;
  typename Pipeline::Params params;
  const WarpRole role = RoleOfWarp();
  params.role = role == WarpRole::kConsumer   ? Pipeline::ThreadCategory::Consumer
                : role == WarpRole::kProducer ? Pipeline::ThreadCategory::Producer
                                              : Pipeline::ThreadCategory::NonParticipant;
  params.is_leader = threadIdx.x % cutlass::NumThreadsPerWarpGroup == 0;
  params.num_consumers = C::kTeamThreads;  // of a stage
  params.num_producers = C::Mainloop::NumProducerThreadEvents;
  params.transaction_bytes = C::Mainloop::TmaTransactionBytes;
  return Pipeline(shared.pipeline, params, typename C::ClusterShape{});
}

}  // namespace jax_ulysses

#endif  // JAX_ULYSSES_GEMM_CTA_H_
