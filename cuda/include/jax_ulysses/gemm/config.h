// SPDX-License-Identifier: Apache-2.0
// What a kernel is compiled for, and what one CTA of it has in shared memory.
//
// Consumers are in teams that make a tile each: of 128x256 and 128x192, whose accumulators take the
// registers of two warp groups, one team of both; of the others two teams of one, which take turns:
// one stores its tile while the other has the tensor cores. (CUTLASS calls the two schedules
// cooperative and ping-pong.)
//
// Tiles are made by clusters of two CTAs, one above the other, of which each loads half of what
// both need of w (TMA multicast). So 128x256 and 64x128 read a third less out of L2 and 128x128 a
// quarter; L2 gives an SM about 64 bytes a cycle, which is what 128x128 would take alone.
#ifndef JAX_ULYSSES_GEMM_CONFIG_H_
#define JAX_ULYSSES_GEMM_CONFIG_H_

#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/gemm/collective/collective_builder.hpp"
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

  static constexpr int kTeams = kTileN > 128 ? 1 : 2;
  static constexpr int kTeamThreads = 256 / kTeams;
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
  static constexpr int kStages = Mainloop::DispatchPolicy::Stages;
  static constexpr int kTileBytesA = kTileM * kTileK * static_cast<int>(sizeof(Element));

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

}  // namespace jax_ulysses

#endif  // JAX_ULYSSES_GEMM_CONFIG_H_
