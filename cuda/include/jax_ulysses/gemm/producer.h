// SPDX-License-Identifier: Apache-2.0
// Warp 0 of a CTA: the loads of the operands, by TMA; and the tensor maps that they need.
#ifndef JAX_ULYSSES_GEMM_PRODUCER_H_
#define JAX_ULYSSES_GEMM_PRODUCER_H_

#include "jax_ulysses/gemm/copy_tiles.h"

namespace jax_ulysses {

// Operand views: which matrix a tensor map of Mainloop::Params describes.
struct OperandA {
  int32_t rows;     // M
  int32_t columns;  // K; loads beyond it read as zero
  int32_t blocks;   // L
  // Elements between rows and between blocks; 0 where they follow one another.
  int64_t row_pitch = 0;
  int64_t block_pitch = 0;
};
struct OperandB {
  int32_t depth;    // K
  int32_t columns;  // N
};

// Warp 0. Issues the loads of one stretch of K after the other.
template <class C>
class Producer {
 public:
  using Mainloop = typename C::Mainloop;
  using Pipeline = typename Mainloop::MainloopPipeline;

  using TensorMapA = typename TileCopies<C>::TensorMap;

  // `copies`: whether any tile of A is stored a second time.
  JU_D Producer(Pipeline& pipeline, typename C::Shared& shared, const TestHooks& hooks, bool copies)
      : pipeline_(pipeline),
        shared_(shared),
        copies_(pipeline, shared, hooks),
        copying_(copies),
        state_(cutlass::make_producer_start_state<Pipeline>()) {}

  // See TileCopies.
  JU_D void BeginCopies(int32_t first, int32_t stride) { copies_.Begin(first, stride); }

  // Whole warp. Loads `k_tiles` tiles from (row, 0) of block `block` of A and from row `depth` of
  // w. `params` holds the tensor maps of both. columns[i] is where the i-th part of the columns
  // of the tile begins, less what lies before it in the tile: one, or C::kParts of them. This is
  // CUTLASS's load, except that the parts may come from different places. `copy`: null, or the map
  // by which rows from `copy_row` on of block `copy_block` are stored.
  template <int kParts>
  JU_D void Load(const typename Mainloop::Params& params, const OperandA& a, const OperandB& b,
                 int32_t row, int32_t block, int32_t depth, const int32_t (&columns)[kParts],
                 int32_t k_tiles, const TensorMapA* copy = nullptr, int32_t copy_row = 0,
                 int32_t copy_block = 0) {
    if (cute::elect_one_sync()) {
      LoadByLane(params, a, b, row, block, depth, columns, k_tiles, copy, copy_row, copy_block);
    }
    state_.advance(k_tiles);
    __syncwarp();
  }

  JU_D void Tail() {
    if (copying_ && cute::elect_one_sync()) copies_.Finish();
    __syncwarp();
    mainloop_.load_tail(pipeline_, state_);
  }

 private:
  template <int kParts>
  JU_D void LoadByLane(const typename Mainloop::Params& params, const OperandA& a,
                       const OperandB& b, int32_t row, int32_t block, int32_t depth,
                       const int32_t (&columns)[kParts], int32_t k_tiles,
                       const TensorMapA* copy_map, int32_t copy_row, int32_t copy_block) {
    static_assert(kParts == 1 || kParts == C::kParts);
    using namespace cute;
    using X = Underscore;
    const uint32_t cta = C::kCluster == 1 ? 0 : block_rank_in_cluster();
    Tensor sA =
        make_tensor(make_smem_ptr(shared_.tensors.smem_A.data()), typename Mainloop::SmemLayoutA{});
    Tensor sB =
        make_tensor(make_smem_ptr(shared_.tensors.smem_B.data()), typename Mainloop::SmemLayoutB{});
    // Offsets of coordinates, not of tiles: blocks begin anywhere.
    Tensor mA = params.tma_load_a.get_tma_tensor(make_shape(a.rows, a.columns, a.blocks));
    Tensor mB = params.tma_load_b.get_tma_tensor(make_shape(b.columns, b.depth, 1));
    Tensor gA = local_tile(domain_offset(make_coord(row, 0, block), mA), typename C::TileShape{},
                           make_coord(0, _, _), Step<_1, X, _1>{})(_, _, _, 0);
    auto columns_from = [&](int32_t column) {
      return local_tile(domain_offset(make_coord(column, depth, 0), mB), typename C::TileShape{},
                        make_coord(_, 0, _), Step<X, _1, _1>{})(_, _, _, 0);
    };
    auto slice_a = params.tma_load_a.get_slice(_0{});
    auto slice_b = params.tma_load_b.get_slice(cta);
    Tensor from_a = slice_a.partition_S(gA);  // (TMA, TMA_M, TMA_K, k)
    Tensor to_a = slice_a.partition_D(sA);    // (TMA, TMA_M, TMA_K, stage)
    Tensor to_b = slice_b.partition_D(sB);    // (TMA, TMA_N, TMA_K, stage)
    // Each CTA loads half of B for both. With w [N,K] that is half of the columns, with w [K,N]
    // half of the depth of all of them.
    constexpr int kBoxes = size<0, 1>(to_b);  // that follow one another along the columns
    const int32_t column = columns[C::kTransposed && kParts > 1 ? cta : 0];
    Tensor from_b = slice_b.partition_S(columns_from(column));
    const uint16_t all = static_cast<uint16_t>((1u << C::kCluster) - 1);
    auto state = state_;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int32_t k = 0; k < k_tiles; ++k) {
      pipeline_.producer_acquire(state);
      auto* barrier = pipeline_.producer_get_barrier(state);
      const int stage = state.index();
      if (copying_) copies_.WaitRead();
      copy(params.tma_load_a.with(*barrier, 0), from_a(_, _, _, k), to_a(_, _, _, stage));
      if constexpr (C::kTransposed || kParts == 1) {
        copy(params.tma_load_b.with(*barrier, all), from_b(_, _, _, k), to_b(_, _, _, stage));
      } else {
        static_assert(kBoxes % kParts == 0);
        CUTLASS_PRAGMA_UNROLL
        for (int box = 0; box < kBoxes; ++box) {
          Tensor from_part = slice_b.partition_S(columns_from(columns[box * kParts / kBoxes]));
          copy(params.tma_load_b.with(*barrier, all), from_part(make_coord(_, box), _, _, k),
               to_b(make_coord(_, box), _, _, stage));
        }
      }
      if (copying_) copies_.Next(state, copy_map, copy_row, k * C::kTileK, copy_block);
      ++state;
    }
  }

  Mainloop mainloop_;
  Pipeline& pipeline_;
  typename C::Shared& shared_;
  TileCopies<C> copies_;
  const bool copying_;
  typename Mainloop::PipelineState state_;
};

// Host side: tensor maps of A [blocks][rows, columns] (row-major) and of w.
template <class C>
typename C::Mainloop::Params MakeOperands(const void* a, OperandA shape, const void* w,
                                          OperandB w_shape) {
  using Mainloop = typename C::Mainloop;
  typename Mainloop::StrideA stride_a{};
  cute::get<0>(stride_a) = shape.row_pitch > 0 ? shape.row_pitch : shape.columns;
  cute::get<2>(stride_a) =
      shape.block_pitch > 0 ? shape.block_pitch : static_cast<int64_t>(shape.rows) * shape.columns;
  typename Mainloop::StrideB stride_b{};
  if constexpr (C::kTransposed) {
    cute::get<0>(stride_b) = w_shape.depth;
  } else {
    cute::get<1>(stride_b) = w_shape.columns;
  }
  cute::get<2>(stride_b) = 0;
  // A and B have different numbers of blocks and, where K is cut, different depths: two calls, of
  // which one map each is used.
  using Element = typename C::Element;
  const typename Mainloop::Arguments args{static_cast<const Element*>(a), stride_a,
                                          static_cast<const Element*>(w), stride_b};
  auto params = Mainloop::to_underlying_arguments(
      cute::make_shape(shape.rows, w_shape.columns, shape.columns, shape.blocks), args, nullptr);
  params.tma_load_b =
      Mainloop::to_underlying_arguments(
          cute::make_shape(shape.rows, w_shape.columns, w_shape.depth, 1), args, nullptr)
          .tma_load_b;
  return params;
}

}  // namespace jax_ulysses

#endif  // JAX_ULYSSES_GEMM_PRODUCER_H_
