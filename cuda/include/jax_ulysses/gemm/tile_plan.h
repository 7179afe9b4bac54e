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

// A part of a tile: a column block, or the first or second half of one. That of a unit that has no
// rows or columns left has no rows.
template <class Element>
struct PartPlan {
  // Consumers: where the part goes, in the slot or, for the own block in place, in the output.
  Element* data;
  int32_t pitch;  // elements from row to row
  // Producer: where the part begins in w, less what lies before it in the tile, and in x.
  int32_t column_of_w;
  int32_t row;
  // Whose the part is; no owners: not in the slot. Publisher: which flag to raise at them, none if
  // that is the business of another part.
  int32_t flag;
  uint8_t first_owner;
  uint8_t owners;
  uint8_t rows;  // that exist
  uint8_t columns;
};
// Four plans of four parts: what is left beside operands and ring.
static_assert(sizeof(PartPlan<uint16_t>) == 32);

inline constexpr int32_t kNoFlag = -1;

template <class Element, int kParts>
struct TilePlan {
  PartPlan<Element> parts[kParts];
};

// Plan of part `index`, of kColumns columns, of the tile that a CTA makes in a unit. `slot` is this
// rank's own.
template <int kColumns, class Element>
JU_D PartPlan<Element> PlanPart(const PullArgs& pull, char* slot, int32_t unit,
                                int32_t cta_in_cluster, int32_t index) {
  const Geometry& g = pull.geometry;
  // Blocks have as many columns as a part, or twice as many.
  const bool halves = pull.order.block_columns != kColumns;
  const TileOrder::Part part = pull.order.At(g, unit, cta_in_cluster, halves ? index / 2 : index);
  const bool second = halves && index % 2 != 0;
  const bool in_place =
      part.dest == g.rank && !PullOrder::OwnInSlot(g, part.seg, pull.own_in_place);
  const int32_t columns = g.columns[part.seg];
  const int32_t row = part.row_block * pull.order.tile_rows;
  const int32_t column = part.col_block * pull.order.block_columns + (second ? kColumns : 0);
  const int32_t of_w = g.block_begin(part.seg, part.dest) + column;
  char* const data =
      in_place ? pull.out[part.seg]
               : slot + MadeBlockOffset(g, part.seg, g.block(part.seg, part.dest), sizeof(Element));
  const int64_t first = in_place ? g.HeadShardRows(g.rank, row).begin : row;
  const int32_t copies = g.replicas[part.seg];
  PartPlan<Element> plan;
  plan.data = reinterpret_cast<Element*>(data) + first * columns + column;
  plan.pitch = columns;
  plan.column_of_w = of_w - index * kColumns;
  plan.row = row;
  plan.flag = second ? kNoFlag : part.flag;
  plan.first_owner = static_cast<uint8_t>(part.dest / copies * copies);
  plan.owners = static_cast<uint8_t>(part.empty || in_place ? 0 : copies);
  plan.rows = static_cast<uint8_t>(part.empty ? 0 : min(pull.order.tile_rows, g.rows - row));
  plan.columns = static_cast<uint8_t>(max(0, min(kColumns, columns - column)));
  return plan;
}

// One warp, a lane a part: most of it is waiting for divisions and for parameters.
template <int kColumns, class Element, int kParts>
JU_D void PlanTile(TilePlan<Element, kParts>& plan, const PullArgs& pull, char* slot, int32_t unit,
                   int32_t cta_in_cluster) {
  const int32_t part = static_cast<int32_t>(threadIdx.x % 32);
  if (part < kParts) {
    plan.parts[part] = PlanPart<kColumns, Element>(pull, slot, unit, cta_in_cluster, part);
  }
}

}  // namespace jax_ulysses

#endif  // JAX_ULYSSES_GEMM_TILE_PLAN_H_
