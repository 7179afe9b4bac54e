// SPDX-License-Identifier: Apache-2.0
// One CTA of a persistent Hopper GEMM: CUTLASS's mainloop, unmodified, under the library's own
// kernel layer (what cutlass::gemm::kernel::GemmUniversal is to CUTLASS, without its scheduler) and
// epilogue (store_tile.h).
//
// Warp group 0: warp 0 loads (Producer), warp 1 communicates, warp 2 publishes, warp 3 looks ahead:
// watches what arrives, or plans tiles (tile_plan.h). After it the consumers, in teams that make a
// tile each: of 128x256, whose accumulators take the registers of two warp groups, one team of
// both; of the others two teams of one, which take turns: one stores its tile while the other has
// the tensor cores. (CUTLASS calls the two schedules cooperative and ping-pong.)
//
// Tiles are made by clusters of two CTAs, one above the other, of which each loads half of what
// both need of w (TMA multicast). So 128x256 and 64x128 read a third less out of L2 and 128x128 a
// quarter; L2 gives an SM about 64 bytes a cycle, which is what 128x128 would take alone.
#ifndef JAX_ULYSSES_GEMM_CTA_H_
#define JAX_ULYSSES_GEMM_CTA_H_

#include "cute/tensor.hpp"
#include "cutlass/arch/reg_reconfig.h"
#include "cutlass/cutlass.h"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/pipeline/pipeline.hpp"
#include "jax_ulysses/exchange/copy_ring.h"
#include "jax_ulysses/exchange/hand_off.h"
#include "jax_ulysses/exchange/rank_call.h"
#include "jax_ulysses/gemm/tile_plan.h"

namespace jax_ulysses {

// Shared memory of one CTA on sm_90.
inline constexpr int kSharedBytes = 227 * 1024;
// The ring of the communication warp: what the operands leave.
inline constexpr int kCopyStages = 4;
inline constexpr int kCopyStageBytes = 8192;

// D = A B + bias: A [M,K] row-major, B = w [K,N] row-major or, if kTransposed, w [N,K] row-major.
template <class Element_, bool kTransposed_, class TileShape_, bool kTest_>
struct GemmConfig {
  using Element = Element_;
  using TileShape = TileShape_;
  static constexpr int kCluster = 2;
  using ClusterShape = cute::Shape<cute::Int<kCluster>, cute::_1, cute::_1>;
  static constexpr bool kTransposed = kTransposed_;
  static constexpr bool kTest = kTest_;
  static constexpr int kTileM = cute::size<0>(TileShape{});
  static constexpr int kTileN = cute::size<1>(TileShape{});
  static constexpr int kTileK = cute::size<2>(TileShape{});
  // Columns of a tile that may come from anywhere in w, and go anywhere: those of a TMA box, and
  // with w [N,K] what one CTA of a cluster loads.
  static constexpr int kPartColumns = kTransposed ? kTileN / kCluster : kBlockColumns / 2;
  static constexpr int kParts = kTileN / kPartColumns;
  static constexpr int kAlignment = 16 / sizeof(Element);  // TMA: 16 bytes

  static constexpr int kTeams = kTileN == 256 ? 1 : 2;
  static constexpr int kTeamThreads = kTileN == 256 ? 256 : 128;
  static constexpr int kTeamWarps = kTeamThreads / 32;
  static constexpr int kThreads = 128 + kTeams * kTeamThreads;
  // Registers a thread after setmaxnreg: 128 * 72 + 256 * 216 fill what 384 * 168 leave. CUTLASS
  // gives its producers 40; the communication warp would spill there (96 to 344 bytes), at 72
  // nothing does.
  static constexpr int kProducerRegisters = 72;
  static constexpr int kConsumerRegisters = 216;

  using LayoutB =
      cute::conditional_t<kTransposed, cutlass::layout::ColumnMajor, cutlass::layout::RowMajor>;
  using Ring = CopyRing<kCopyStages, kCopyStageBytes, kTest>;
  static constexpr int kOtherBytes = static_cast<int>(sizeof(typename Ring::Storage)) + 2048;

  using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Element, cutlass::layout::RowMajor,
      kAlignment, Element, LayoutB, kAlignment, float, TileShape, ClusterShape,
      cutlass::gemm::collective::StageCountAutoCarveout<kOtherBytes>,
      cute::conditional_t<(kTeams > 1), cutlass::gemm::KernelTmaWarpSpecializedPingpong,
                          cutlass::gemm::KernelTmaWarpSpecializedCooperative>>::CollectiveOp;
  static_assert(cute::size(typename Mainloop::TiledMma{}) == kTeamThreads);

  using Plan = TilePlan<Element, kParts>;  // gemm_a2a

  struct Shared {
    alignas(1024) typename Mainloop::TensorStorage tensors;
    typename Ring::Storage ring;  // here, where its alignment leaves no hole
    alignas(16) typename Mainloop::PipelineStorage pipeline;
    alignas(16) HandOffStorage<Plan> plans;
    HandOffStorage<int32_t> hand_off;
    SharedCredit credit;
    RankShared rank;
    uint32_t arrivals;
  };
  // The rest is for the parameters of a world (WorldKernel).
  static_assert(sizeof(Shared) + 2048 <= kSharedBytes);
};

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
  using Pipeline = typename Mainloop::MainloopPipeline;

  JU_D Producer(Pipeline& pipeline, typename C::Shared& shared)
      : pipeline_(pipeline),
        shared_(shared),
        state_(cutlass::make_producer_start_state<Pipeline>()) {}

  // Whole warp. Loads `k_tiles` tiles from (row, 0) of block `block` of A and from row `depth` of
  // w. `params` holds the tensor maps of both. columns[i] is where the i-th part of the columns
  // of the tile begins, less what lies before it in the tile: one, or C::kParts of them. This is
  // CUTLASS's load, except that the parts may come from different places.
  template <int kParts>
  JU_D void Load(const typename Mainloop::Params& params, const OperandA& a, const OperandB& b,
                 int32_t row, int32_t block, int32_t depth, const int32_t (&columns)[kParts],
                 int32_t k_tiles) {
    if (cute::elect_one_sync()) LoadByLane(params, a, b, row, block, depth, columns, k_tiles);
    state_.advance(k_tiles);
    __syncwarp();
  }

  JU_D void Tail() { mainloop_.load_tail(pipeline_, state_); }

 private:
  template <int kParts>
  JU_D void LoadByLane(const typename Mainloop::Params& params, const OperandA& a,
                       const OperandB& b, int32_t row, int32_t block, int32_t depth,
                       const int32_t (&columns)[kParts], int32_t k_tiles) {
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
      ++state;
    }
  }

  Mainloop mainloop_;
  Pipeline& pipeline_;
  typename C::Shared& shared_;
  typename Mainloop::PipelineState state_;
};

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

// Host side: tensor maps of A [blocks][rows, columns] (row-major, blocks one after the other) and
// of w.
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

}  // namespace jax_ulysses

#endif  // JAX_ULYSSES_GEMM_CTA_H_
