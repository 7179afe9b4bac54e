// SPDX-License-Identifier: Apache-2.0
// The gathered operand of all-to-all -> GEMM: the producer stores tiles of A that it has loaded for
// the GEMM a second time, from shared memory to where they belong in global memory. So the copy
// takes neither loads nor waits of its own, and is complete when the GEMM is. Heads that ranks
// share are added up elsewhere (exchange/sum_gathered.h).
//
// Every CTA that makes a tile of a row block loads all of its A: that of column block j copies the
// steps j, j + n, j + 2 n, ... of K, of n column blocks.
#ifndef JAX_ULYSSES_GEMM_COPY_TILES_H_
#define JAX_ULYSSES_GEMM_COPY_TILES_H_

#include "jax_ulysses/gemm/cta.h"

namespace jax_ulysses {

// Used by the one lane that loads, whose every step of K costs what it does here.
template <class C>
class TileCopies {
 public:
  using Mainloop = typename C::Mainloop;
  using Pipeline = typename Mainloop::MainloopPipeline;
  using State = typename Mainloop::PipelineState;
  using TensorMap = decltype(Mainloop::Params::tma_load_a);
  static constexpr int kStages = C::kStages;
  // A tile is stored when the producer has asked for the tiles up to the second after it: by then
  // it has arrived, or the producer would have to wait for the consumers anyway.
  static constexpr int kBehind = 2;
  static_assert(kStages > kBehind);

  JU_D TileCopies(Pipeline& pipeline, typename C::Shared& shared, const TestHooks& hooks)
      : pipeline_(pipeline), shared_(shared), hooks_(hooks) {}

  // Of the steps of the tile that comes now, this CTA copies `first`, `first` + `stride`, ...
  JU_D void Begin(int32_t first, int32_t stride) {
    next_ = first;
    stride_ = stride;
  }

  // Before the stage of a step is loaded again; the consumers are done with it.
  JU_D void WaitRead() {
    if (TestHooks::Adversary<C::kTest>(hooks_)) StoreLate();
    if (to_reuse_ == 0) WaitStoreRead();
  }
  // After the loads of a step, of which `map`, if not null, knows where (row, column) of `block`
  // is to be stored. Stores what is due.
  JU_D void Next(const State& state, const TensorMap* map, int32_t row, int32_t column,
                 int32_t block) {
    if (--to_store_ == 0 && !TestHooks::Adversary<C::kTest>(hooks_)) Store();
    --to_reuse_;
    if (--next_ >= 0) return;
    next_ = stride_ - 1;
    if (map == nullptr) return;
    // From one tile to the next it may come early.
    if (to_reuse_ >= 0) {
      Store();
      WaitStoreRead();
    }
    map_ = map;
    row_ = row, column_ = column, block_ = block;
    state_ = state;
    to_store_ = kBehind;
    to_reuse_ = kStages - 1;
  }
  // After the last step: on return all stores are complete.
  JU_D void Finish() {
    Store();
    ptx::BulkWait<0>();
  }

 private:
  JU_D char* Tile() {
    return reinterpret_cast<char*>(shared_.tensors.smem_A.data()) + state_.index() * C::kTileBytesA;
  }
  JU_D void Store() {
    if (map_ == nullptr) return;
    // Edge "tile copy": what the loads have written is there.
    if (!TestHooks::Removed<C::kTest>(hooks_, kEdgeCopyFull)) {
      pipeline_.consumer_wait(State(state_.index(), state_.phase() ^ 1, 0));
    }
    // As loads do, with coordinates (column, row, block).
    cute::SM90_TMA_STORE_3D::copy(map_->get_tma_descriptor(), Tile(), column_, row_, block_);
    ptx::BulkCommit();
    map_ = nullptr;
  }
  // Edge "tile copy", back: the store has read its stage, which may be loaded again.
  JU_D void WaitStoreRead() {
    if (!TestHooks::Removed<C::kTest>(hooks_, kEdgeCopyRead)) ptx::BulkWaitRead<0>();
  }
  // The adversary stores as late as possible, and then overwrites the stage as soon as nothing but
  // the edge forbids it.
  JU_D void StoreLate() {
    if (map_ == nullptr || to_reuse_ != 0) return;
    Store();
    WaitStoreRead();
    // From the end, which the store reads last.
    for (int32_t i = C::kTileBytesA - 16; i >= 0; i -= 16) {
      *reinterpret_cast<uint4*>(Tile() + i) = make_uint4(~0u, ~0u, ~0u, ~0u);
    }
    ptx::ProxyFence();
  }

  Pipeline& pipeline_;
  typename C::Shared& shared_;
  const TestHooks& hooks_;
  int32_t stride_ = 1;
  // Steps until the next copy, until the noted one is stored, until its stage is loaded again.
  int32_t next_ = 0, to_store_ = 0, to_reuse_ = -1;
  // The noted copy: none if map_ is null.
  const TensorMap* map_ = nullptr;
  int32_t row_ = 0, column_ = 0, block_ = 0;
  State state_;
};

}  // namespace jax_ulysses

#endif  // JAX_ULYSSES_GEMM_COPY_TILES_H_
