// SPDX-License-Identifier: Apache-2.0
// The matrix products of a CTA. What is stored, and where, is the kernel's business (store_tile.h).
#ifndef JAX_ULYSSES_GEMM_CONSUMER_H_
#define JAX_ULYSSES_GEMM_CONSUMER_H_

#include "jax_ulysses/gemm/cta.h"

namespace jax_ulysses {

// The warp groups after the first. Team t of them makes the tiles t, t + kTeams, ... of the CTA.
template <class C>
class Consumer {
 public:
  using Mainloop = typename C::Mainloop;
  using Pipeline = typename Mainloop::MainloopPipeline;
  using TiledMma = typename Mainloop::TiledMma;

  // All tiles take k_tiles stages of the pipeline.
  JU_D Consumer(Pipeline& pipeline, typename C::Shared& shared, int32_t k_tiles,
                const typename Mainloop::Params& params, const TestHooks& hooks)
      : pipeline_(pipeline),
        shared_(shared),
        k_tiles_(k_tiles),
        params_(params),
        turns_(C::kTeams > 1 && !TestHooks::Removed<C::kTest>(hooks, kEdgeTurn)) {
    if (team() > 0) load_state_.advance(k_tiles);
  }

  JU_D static int team() { return C::kTeams == 1 ? 0 : cutlass::canonical_warp_group_idx() - 1; }
  // Of the team.
  JU_D static int thread() { return static_cast<int>(threadIdx.x) % C::kTeamThreads; }

  JU_D static auto MakeAccumulator() {
    return cute::partition_fragment_C(TiledMma{}, cute::take<0, 2>(typename C::TileShape{}));
  }

  // `first` and `last`: whether the tile is that of the CTA.
  template <class Accumulator>
  JU_D void Accumulate(Accumulator& accumulator, bool first, bool last) {
    // Edge "turn", inside a CTA: who waits for a stage before the other team has had all of the
    // stages before it would take an older phase of its barrier for the one it waits for.
    if (turns_ && !first) ptx::NamedBarrierSync(1 + team(), C::kTeams * C::kTeamThreads);
    mainloop_.mma(pipeline_, load_state_, accumulator, k_tiles_, thread(), shared_.tensors,
                  params_);
    if (turns_ && !last) ptx::NamedBarrierArrive(2 - team(), C::kTeams * C::kTeamThreads);
    mainloop_.mma_tail(pipeline_, load_state_, k_tiles_);
    load_state_.advance(C::kTeams * k_tiles_);
  }

 private:
  Mainloop mainloop_;
  Pipeline& pipeline_;
  typename C::Shared& shared_;
  const int32_t k_tiles_;
  const typename Mainloop::Params& params_;
  const bool turns_;
  typename Mainloop::PipelineState load_state_;
};

}  // namespace jax_ulysses

#endif  // JAX_ULYSSES_GEMM_CONSUMER_H_
