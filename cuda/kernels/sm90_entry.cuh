// SPDX-License-Identifier: Apache-2.0
// Builds the KernelEntry of one instantiation. Included by cuda/instantiations/*.cu, one kernel
// configuration a file, because each takes half a minute to compile.
#ifndef JAX_ULYSSES_KERNELS_SM90_ENTRY_CUH_
#define JAX_ULYSSES_KERNELS_SM90_ENTRY_CUH_

#include <new>

#include "jax_ulysses/gemm/kernels.h"
#include "jax_ulysses/heuristics.h"
#include "kernels/entry.h"

namespace jax_ulysses {

inline void FillRankCall(const FusedCall& call, const LaunchPlan& plan, RankCall& rank) {
  rank.info = call.info;
  rank.mailbox = call.mailbox;
  rank.ctas = plan.ctas;
  rank.comm_ctas = plan.comm_ctas;
  rank.communicate = call.communicate;
  rank.compute = call.compute;
  rank.hooks = call.hooks;
  rank.info.removed_edges = call.hooks.removed_edges;
}

inline char* SlotAddress(const CallInfo& info, int slot) {
  return info.peers.heap[info.rank] + info.layout.slot(slot);
}

template <class C>
void Build(const A2aGemmCall& call, const LaunchPlan& plan, void* memory) {
  auto& p = *new (memory) A2aGemmParams<C>;
  using Element = typename C::Element;
  FillRankCall(call, plan, p.call);
  const Geometry g = MakeGeometry(call.exchange, call.info.rank, call.batch);
  p.args.geometry = g;
  p.args.element_bytes = sizeof(Element);
  p.args.own_in_place = g.TilesFollowRuns(C::kTileM);
  p.args.gathered = static_cast<char*>(call.gathered);
  p.width = static_cast<int32_t>(call.width);
  const int32_t window_rows =
      plan.window_rows > 0 ? plan.window_rows : WindowRows(plan.ctas, C::kCluster, C::kTileM);
  p.args.window_rows = window_rows;
  p.args.head_items = static_cast<int32_t>(CeilDiv(plan.head_rows, window_rows)) *
                      (window_rows / kPieceRows) * (g.num_ranks - p.args.own_in_place);
  const OperandB w = {g.fused_columns, p.width};
  for (int seg = 0; seg < g.num_segments; ++seg) {
    p.k_tiles += g.num_ranks * static_cast<int32_t>(CeilDiv(g.columns[seg], C::kTileK));
    p.args.parts[seg] = static_cast<const char*>(call.parts[seg]);
    p.args.own_block[seg] = SourceBlockOffset(g, seg, g.rank, sizeof(Element));
    p.from_input[seg] =
        MakeOperands<C>(call.parts[seg], {g.rows * g.num_ranks, g.columns[seg], 1}, call.w, w);
    if (call.gathered != nullptr) {
      auto* begin = static_cast<Element*>(call.gathered) + g.block_begin(seg, 0);
      p.gathered[seg] =
          MakeOperands<C>(
              begin, {g.rows, g.columns[seg], g.num_blocks(seg), g.fused_columns, g.columns[seg]},
              call.w, w)
              .tma_load_a;
    }
    for (int slot = 0; slot < call.info.layout.num_slots; ++slot) {
      p.from_slot[slot][seg] = MakeOperands<C>(
          SlotAddress(call.info, slot) + SourceBlockOffset(g, seg, 0, sizeof(Element)),
          {g.rows, g.columns[seg], g.num_ranks}, call.w, w);
    }
  }
  p.output = static_cast<Element*>(call.y);
  p.bias = static_cast<const Element*>(call.bias);
  const int64_t rows = g.rows;
  p.call.outputs[p.call.num_outputs++] = {static_cast<char*>(call.y),
                                          rows * p.width * int64_t{sizeof(Element)}};
  if (call.gathered != nullptr) {
    p.call.outputs[p.call.num_outputs++] = {static_cast<char*>(call.gathered),
                                            rows * g.fused_columns * int64_t{sizeof(Element)}};
  }
}

template <class C>
void Build(const GemmA2aCall& call, const LaunchPlan& plan, void* memory) {
  auto& p = *new (memory) GemmA2aParams<C>;
  using Element = typename C::Element;
  FillRankCall(call, plan, p.call);
  const Geometry g = MakeGeometry(call.exchange, call.info.rank, call.batch);
  p.args.geometry = g;
  p.args.order = TileOrder::Make(g, C::kTileM, C::kTileN,
                                 BlockColumns(g, C::kTransposed, C::kTileN), C::kCluster);
  p.args.element_bytes = sizeof(Element);
  p.args.own_in_place = g.TilesFollowRuns(C::kTileM);
  p.depth = static_cast<int32_t>(call.depth);
  p.operands = MakeOperands<C>(call.x, {g.rows, p.depth, 1}, call.w, {p.depth, g.fused_columns});
  p.bias = static_cast<const Element*>(call.bias);
  for (int seg = 0; seg < g.num_segments; ++seg) {
    p.args.out[seg] = static_cast<char*>(call.out[seg]);
    p.args.own_block[seg] = MadeBlockOffset(g, seg, g.block(seg, g.rank), sizeof(Element));
    p.call.outputs[p.call.num_outputs++] = {
        static_cast<char*>(call.out[seg]),
        int64_t{g.rows} * g.num_ranks * g.columns[seg] * int64_t{sizeof(Element)}};
  }
}

constexpr TilePolicy PolicyOf(int rows, int columns) {
  return columns == 256   ? TilePolicy::k128x256
         : columns == 192 ? TilePolicy::k128x192
         : rows == 128    ? TilePolicy::k128x128
                          : TilePolicy::k64x128;
}

template <template <class> class Params, class Call, class C>
KernelEntry<Call> MakeEntry() {
  KernelEntry<Call> entry{};
  entry.type = cute::is_same_v<typename C::Element, cutlass::bfloat16_t> ? ElementType::kBf16
                                                                         : ElementType::kF16;
  entry.transposed = C::kTransposed;
  entry.tile = PolicyOf(C::kTileM, C::kTileN);
  entry.tile_rows = C::kTileM;
  entry.tile_columns = C::kTileN;
  entry.cluster = C::kCluster;
  entry.threads = C::kThreads;
  entry.shared_bytes = sizeof(typename C::Shared);
  entry.params_bytes = sizeof(Params<C>);
  static_assert(sizeof(Params<C>) <= 16 * 1024, "kernel parameters");
  entry.rank_kernel = reinterpret_cast<const void*>(&RankKernel<Params<C>>);
  // Only tests put a world into one launch.
  if constexpr (C::kTest) {
    entry.world_kernel = reinterpret_cast<const void*>(&WorldKernel<Params<C>>);
  }
  entry.build = &Build<C>;
  entry.set_agreement = [](void* params, uint32_t agreement) {
    static_cast<Params<C>*>(params)->call.info.agreement = agreement;
  };
  return entry;
}

}  // namespace jax_ulysses

// JU_INSTANTIATE(A2aGemm, name, element, transposed, rows, columns, test)
#define JU_INSTANTIATE(op, name, element, transposed, rows, columns, test)                 \
  namespace jax_ulysses {                                                                  \
  KernelEntry<op##Call> name() {                                                           \
    using Tile = cute::Shape<cute::Int<rows>, cute::Int<columns>, cute::_64>;              \
    return MakeEntry<op##Params, op##Call, GemmConfig<element, transposed, Tile, test>>(); \
  }                                                                                        \
  }

#endif  // JAX_ULYSSES_KERNELS_SM90_ENTRY_CUH_
