// SPDX-License-Identifier: Apache-2.0
// What the warps of GEMM -> all-to-all have to know about a tile. Finding it out takes a few
// hundred instructions with several divisions, about 2 us a tile while the tensor cores would wait.
// The watcher warp does it ahead of the others and leaves plans in a ring (exchange/hand_off.h);
// they cost their readers a few loads from shared memory.
#ifndef JAX_ULYSSES_GEMM_TILE_PLAN_H_
#define JAX_ULYSSES_GEMM_TILE_PLAN_H_

#include "jax_ulysses/exchange/pull.h"
#include "jax_ulysses/gemm/store_tile.h"

namespace jax_ulysses {

// One column block of a tile. The block of a unit that has no rows or columns left has no rows.
template <class Element>
struct alignas(16) BlockPlan {
  // Consumers: the slot or, for the own block in place, the output.
  TileOutput<Element> output;
  // Producer: where the block begins in w, less what lies before it in the tile.
  int32_t column_of_w;
  int32_t row;  // of x
  // Publisher: which flag to raise, at whom. No owners: not in the slot.
  int32_t flag;
  int16_t first_owner;
  int16_t owners;
};

template <class Element, int kBlocks>
struct TilePlan {
  BlockPlan<Element> blocks[kBlocks];
};

// Plan of block `block` of the tile that a CTA makes in a unit. `slot` is this rank's own, `bias`
// that of all columns, or null.
template <class Element>
JU_D BlockPlan<Element> PlanBlock(const PullArgs& pull, char* slot, const Element* bias,
                                  int32_t unit, int32_t cta_in_cluster, int32_t block) {
  const Geometry& g = pull.geometry;
  const TileOrder::Part part = pull.order.At(g, unit, cta_in_cluster, block);
  const bool in_place =
      part.dest == g.rank && !PullOrder::OwnInSlot(g, part.seg, pull.own_in_place);
  const int32_t columns = g.columns[part.seg];
  const int32_t row = part.row_block * pull.order.tile_rows;
  const int32_t column = part.col_block * kBlockColumns;
  const int32_t of_w = g.block_begin(part.seg, part.dest) + column;
  char* const data =
      in_place ? pull.out[part.seg]
               : slot + MadeBlockOffset(g, part.seg, g.block(part.seg, part.dest), sizeof(Element));
  const int64_t first = in_place ? g.HeadShardRows(g.rank, row).begin : row;
  const int32_t copies = g.replicas[part.seg];
  BlockPlan<Element> plan;
  plan.output = {reinterpret_cast<Element*>(data) + first * columns + column,
                 bias == nullptr ? nullptr : bias + of_w, columns, part.empty ? 0 : g.rows - row,
                 columns - column};
  plan.column_of_w = of_w - block * kBlockColumns;
  plan.row = row;
  plan.flag = part.flag;
  plan.first_owner = static_cast<int16_t>(part.dest / copies * copies);
  plan.owners = static_cast<int16_t>(part.empty || in_place ? 0 : copies);
  return plan;
}

// One warp, a lane a block: most of it is waiting for divisions and for parameters.
template <class Element, int kBlocks>
JU_D void PlanTile(TilePlan<Element, kBlocks>& plan, const PullArgs& pull, char* slot,
                   const Element* bias, int32_t unit, int32_t cta_in_cluster) {
  const int32_t block = static_cast<int32_t>(threadIdx.x % 32);
  if (block < kBlocks) {
    plan.blocks[block] = PlanBlock(pull, slot, bias, unit, cta_in_cluster, block);
  }
}

}  // namespace jax_ulysses

#endif  // JAX_ULYSSES_GEMM_TILE_PLAN_H_
