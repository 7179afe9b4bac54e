// SPDX-License-Identifier: Apache-2.0
// One CTA of a persistent Hopper GEMM: CUTLASS's collectives, unmodified, under the library's own
// kernel layer (what cutlass::gemm::kernel::GemmUniversal is to CUTLASS, without its scheduler).
//
// Warp group 0: warp 0 loads (Producer), warp 1 communicates, warp 2 publishes or nothing, warp 3
// nothing. Warp groups 1 and 2: Consumer, 128x256 or so of accumulators between them.
#ifndef JAX_ULYSSES_GEMM_CTA_H_
#define JAX_ULYSSES_GEMM_CTA_H_

#include "cute/tensor.hpp"
#include "cutlass/arch/reg_reconfig.h"
#include "cutlass/cutlass.h"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/epilogue/fusion/sm90_callbacks_tma_warpspecialized.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/pipeline/pipeline.hpp"
#include "jax_ulysses/exchange/copy_ring.h"
#include "jax_ulysses/exchange/hand_off.h"
#include "jax_ulysses/exchange/rank_call.h"

namespace jax_ulysses {

// Shared memory of one CTA on sm_90.
inline constexpr int kSharedBytes = 227 * 1024;
// Pieces of 8, 16 and 32 KB are 2, 3 and 6 chunks.
inline constexpr int kCopyStages = 3;
inline constexpr int kCopyStageBytes = 5632;

inline constexpr int kThreads = 384;
// Registers a thread after setmaxnreg: 128 * 72 + 256 * 216 fill what 384 * 168 leave. CUTLASS
// gives its producers 40; the communication warp would spill there (96 to 344 bytes), at 72 nothing
// does.
inline constexpr int kProducerRegisters = 72;
inline constexpr int kConsumerRegisters = 216;

// D = A B + bias: A [M,K] row-major, B = w [K,N] row-major or, if kTransposed, w [N,K] row-major.
template <class Element_, bool kTransposed_, class TileShape_, bool kTest_>
struct GemmConfig {
  using Element = Element_;
  using TileShape = TileShape_;
  using ClusterShape = cute::Shape<cute::_1, cute::_1, cute::_1>;
  static constexpr bool kTransposed = kTransposed_;
  static constexpr bool kTest = kTest_;
  static constexpr int kTileM = cute::size<0>(TileShape{});
  static constexpr int kTileN = cute::size<1>(TileShape{});
  static constexpr int kTileK = cute::size<2>(TileShape{});
  static constexpr int kAlignment = 16 / sizeof(Element);  // TMA: 16 bytes

  using LayoutB =
      cute::conditional_t<kTransposed, cutlass::layout::ColumnMajor, cutlass::layout::RowMajor>;
  // One rounding: acc + bias in fp32, then converted. A null bias reads as zero.
  using Bias =
      cutlass::epilogue::fusion::Sm90RowBroadcast<0, TileShape, Element, float,
                                                  cute::Stride<cute::_0, cute::_1, int64_t>, 1>;
  using Fusion = cutlass::epilogue::fusion::Sm90EVT<
      cutlass::epilogue::fusion::Sm90Compute<cutlass::plus, Element, float,
                                             cutlass::FloatRoundStyle::round_to_nearest>,
      cutlass::epilogue::fusion::Sm90AccFetch, Bias>;
  using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, TileShape, ClusterShape,
      cutlass::epilogue::collective::EpilogueTileAuto, float, float, void,
      cutlass::layout::RowMajor, kAlignment, Element, cutlass::layout::RowMajor, kAlignment,
      cutlass::epilogue::TmaWarpSpecializedCooperative, Fusion>::CollectiveOp;

  using Ring = CopyRing<kCopyStages, kCopyStageBytes, kTest>;
  static constexpr int kOtherBytes = static_cast<int>(sizeof(typename Epilogue::SharedStorage) +
                                                      sizeof(typename Ring::Storage) + 1024);

  using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Element, cutlass::layout::RowMajor,
      kAlignment, Element, LayoutB, kAlignment, float, TileShape, ClusterShape,
      cutlass::gemm::collective::StageCountAutoCarveout<kOtherBytes>,
      cutlass::gemm::KernelTmaWarpSpecializedCooperative>::CollectiveOp;
  static_assert(cute::size(typename Mainloop::TiledMma{}) == kThreads - 128);

  struct Shared {
    struct Tensors : cute::aligned_struct<1024, cute::_1> {
      typename Mainloop::TensorStorage mainloop;
      typename Epilogue::TensorStorage epilogue;
    } tensors;
    alignas(16) typename Mainloop::PipelineStorage mainloop_pipeline;
    alignas(16) typename Epilogue::PipelineStorage epilogue_pipeline;
    typename Ring::Storage ring;
    alignas(16) HandOffStorage hand_off;
    RankShared rank;
  };
  // The rest is for the parameters of a world (WorldKernel).
  static_assert(sizeof(Shared) + 1024 <= kSharedBytes);
};

enum class WarpRole { kProducer, kCommunicator, kPublisher, kIdle, kConsumer };

JU_D WarpRole RoleOfWarp() {
  const int warp = cutlass::canonical_warp_idx_sync();
  return warp >= 4 ? WarpRole::kConsumer : static_cast<WarpRole>(warp);
}

// The pipelines of a CTA. Constructing them initialises their barriers: a CTA-wide barrier must
// follow.
template <class C>
struct GemmPipelines {
  using Main = typename C::Mainloop::MainloopPipeline;
  using EpiLoad = typename C::Epilogue::LoadPipeline;
  using EpiStore = typename C::Epilogue::StorePipeline;

  JU_D explicit GemmPipelines(typename C::Shared& shared)
      : main(shared.mainloop_pipeline, MainParams(), typename C::ClusterShape{}),
        epi_load(shared.epilogue_pipeline, EpiLoadParams()),
        epi_store(EpiStoreParams()) {}

  Main main;
  EpiLoad epi_load;  // the epilogue reads no C: never used, but store() takes it
  EpiStore epi_store;

 private:
  JU_D static typename Main::Params MainParams() {
    typename Main::Params params;
    const WarpRole role = RoleOfWarp();
    params.role = role == WarpRole::kConsumer   ? Main::ThreadCategory::Consumer
                  : role == WarpRole::kProducer ? Main::ThreadCategory::Producer
                                                : Main::ThreadCategory::NonParticipant;
    params.is_leader = threadIdx.x % cutlass::NumThreadsPerWarpGroup == 0;
    params.num_consumers = kThreads - 128;
    params.num_producers = C::Mainloop::NumProducerThreadEvents;
    params.transaction_bytes = C::Mainloop::TmaTransactionBytes;
    return params;
  }
  JU_D static typename EpiLoad::Params EpiLoadParams() {
    typename EpiLoad::Params params;
    params.role = EpiLoad::ThreadCategory::Consumer;
    params.dst_blockid = 0;
    params.producer_arv_count = 32;
    params.consumer_arv_count = kThreads - 128;
    params.transaction_bytes = C::Epilogue::TmaTransactionBytes;
    return params;
  }
  JU_D static typename EpiStore::Params EpiStoreParams() {
    typename EpiStore::Params params;
    params.always_wait = true;
    return params;
  }
};

// Operand views: which matrix a tensor map of Mainloop::Params describes.
struct OperandA {
  int32_t rows;     // M
  int32_t columns;  // K; loads beyond it read as zero
  int32_t blocks;   // L
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

  JU_D Producer(GemmPipelines<C>& pipelines, typename C::Shared& shared)
      : pipelines_(pipelines),
        shared_(shared),
        state_(cutlass::make_producer_start_state<typename GemmPipelines<C>::Main>()) {}

  // Whole warp. Loads `k_tiles` tiles from (row, 0) of block `block` of A and from row `depth`,
  // column `column` of w. `params` holds the tensor maps of both.
  JU_D void Load(const typename Mainloop::Params& params, const OperandA& a, const OperandB& b,
                 int32_t row, int32_t block, int32_t depth, int32_t column, int32_t k_tiles) {
    using namespace cute;
    using X = Underscore;
    // Offsets of coordinates, not of tiles: blocks begin anywhere.
    Tensor mA = params.tma_load_a.get_tma_tensor(make_shape(a.rows, a.columns, a.blocks));
    Tensor mB = params.tma_load_b.get_tma_tensor(make_shape(b.columns, b.depth, 1));
    Tensor gA = local_tile(domain_offset(make_coord(row, 0, block), mA), typename C::TileShape{},
                           make_coord(_, _, _), Step<_1, X, _1>{});
    Tensor gB = local_tile(domain_offset(make_coord(column, depth, 0), mB), typename C::TileShape{},
                           make_coord(_, _, _), Step<X, _1, _1>{});
    auto k_iterator = make_coord_iterator(idx2crd(0, shape<3>(gA)), shape<3>(gA));
    mainloop_.load(params, pipelines_.main, state_, make_tuple(gA, gB), make_coord(0, 0, _, 0),
                   k_iterator, k_tiles, cutlass::canonical_lane_idx(), 0, shared_.tensors.mainloop);
    state_.advance(k_tiles);
    __syncwarp();
  }

  JU_D void Tail() { mainloop_.load_tail(pipelines_.main, state_); }

 private:
  Mainloop mainloop_;
  GemmPipelines<C>& pipelines_;
  typename C::Shared& shared_;
  typename Mainloop::PipelineState state_;
};

// Warp groups 1 and 2.
template <class C>
class Consumer {
 public:
  using Mainloop = typename C::Mainloop;
  using Epilogue = typename C::Epilogue;
  using TiledMma = typename Mainloop::TiledMma;

  JU_D Consumer(GemmPipelines<C>& pipelines, typename C::Shared& shared)
      : pipelines_(pipelines),
        shared_(shared),
        store_state_(cutlass::make_producer_start_state<typename GemmPipelines<C>::EpiStore>()) {}

  JU_D static int thread() { return static_cast<int>(threadIdx.x) % (kThreads - 128); }
  // The warp whose threads issue the TMA stores of the epilogue: only it can wait for them.
  // thread() is not a difference, so this is warp 8, the first of warp group 2.
  JU_D static bool is_storing_warp() { return thread() / 32 == 0; }

  // True if `ok` is true in every thread of both warp groups.
  JU_D static bool All(bool ok) {
    // CUTLASS keeps the first eight barriers and its epilogue for itself.
    constexpr int kBarrier = 15;
    uint32_t all;
    asm volatile(
        "{\n.reg .pred p, q;\n"
        "setp.ne.u32 p, %1, 0;\n"
        "barrier.cta.red.and.pred.aligned q, %2, %3, p;\n"
        "selp.u32 %0, 1, 0, q;\n}"
        : "=r"(all)
        : "r"(static_cast<uint32_t>(ok)), "n"(kBarrier), "n"(kThreads - 128)
        : "memory");
    return all != 0;
  }

  JU_D static auto MakeAccumulator() {
    return cute::partition_fragment_C(TiledMma{}, cute::take<0, 2>(typename C::TileShape{}));
  }

  template <class Accumulator>
  JU_D void Accumulate(Accumulator& accumulator, int32_t k_tiles,
                       const typename Mainloop::Params& params) {
    mainloop_.mma(pipelines_.main, load_state_, accumulator, k_tiles, thread(),
                  shared_.tensors.mainloop, params);
    mainloop_.mma_tail(pipelines_.main, load_state_, k_tiles);
    load_state_.advance(k_tiles);
  }

  // Tile (row_tile, column_tile) of block `block` of D [rows, columns, blocks]; what lies beyond
  // rows or columns is not written.
  template <class Accumulator>
  JU_D void Store(const typename Epilogue::Params& params, int32_t rows, int32_t columns,
                  int32_t blocks, int32_t row_tile, int32_t column_tile, int32_t block,
                  Accumulator& accumulator) {
    Epilogue epilogue(params, shared_.tensors.epilogue);
    auto [unused, next] =
        epilogue.store(pipelines_.epi_load, epi_load_state_, pipelines_.epi_store, store_state_,
                       cute::make_shape(rows, columns, 1, blocks), typename C::TileShape{},
                       cute::make_coord(row_tile, column_tile, cute::_, block), accumulator,
                       TiledMma{}, thread(), shared_.tensors.epilogue);
    store_state_ = next;
  }

 private:
  Mainloop mainloop_;
  GemmPipelines<C>& pipelines_;
  typename C::Shared& shared_;
  typename Mainloop::PipelineState load_state_;
  typename Epilogue::LoadPipelineState epi_load_state_;
  typename Epilogue::StorePipelineState store_state_;
};

// Host side: tensor maps of A [blocks][rows, columns] (row-major, blocks one after the other) and
// of w, and of D with its bias.
template <class C>
typename C::Mainloop::Params MakeOperands(const void* a, OperandA shape, const void* w,
                                          OperandB w_shape) {
  using Mainloop = typename C::Mainloop;
  typename Mainloop::StrideA stride_a{};
  cute::get<0>(stride_a) = shape.columns;
  cute::get<2>(stride_a) = static_cast<int64_t>(shape.rows) * shape.columns;
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

template <class C>
typename C::Epilogue::Params MakeOutput(void* d, int32_t rows, int32_t columns, int32_t blocks,
                                        const void* bias) {
  using Epilogue = typename C::Epilogue;
  using Element = typename C::Element;
  typename Epilogue::StrideD stride{};
  cute::get<0>(stride) = columns;
  cute::get<2>(stride) = static_cast<int64_t>(rows) * columns;
  // The bias of block l begins l * columns further on.
  const typename C::Bias::Arguments bias_args{
      static_cast<const Element*>(bias), Element(0), {cute::_0{}, cute::_1{}, columns}};
  const typename Epilogue::Arguments args{
      {{}, bias_args, {}}, nullptr, {}, static_cast<Element*>(d), stride};
  return Epilogue::to_underlying_arguments(cute::make_shape(rows, columns, 1, blocks), args,
                                           nullptr);
}

}  // namespace jax_ulysses

#endif  // JAX_ULYSSES_GEMM_CTA_H_
