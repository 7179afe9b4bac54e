// SPDX-License-Identifier: Apache-2.0
// The order in which a rank makes the tiles of GEMM -> all-to-all.
#ifndef JAX_ULYSSES_EXCHANGE_TILE_ORDER_H_
#define JAX_ULYSSES_EXCHANGE_TILE_ORDER_H_

#include "jax_ulysses/base.h"
#include "jax_ulysses/exchange/geometry.h"

namespace jax_ulysses {

// Columns of the blocks that tiles are made of. A block is padded to them: those of 64 waste less
// if a rank has one KV head of 64, say. With w [N,K] a TMA box is as wide as what a CTA loads, so
// there is no choice. A tile of 192 columns is made of three narrow ones.
JU_HD constexpr int32_t BlockColumns(const Geometry& g, bool w_transposed, int32_t tile_columns) {
  constexpr int32_t kHalf = kBlockColumns / 2;
  if (tile_columns % kBlockColumns != 0) return kHalf;
  for (int seg = 0; seg < g.num_segments; ++seg) {
    const int32_t rest = g.columns[seg] % kBlockColumns;
    if (!w_transposed && rest > 0 && rest <= kHalf) return kHalf;
  }
  return kBlockColumns;
}

// Rank r makes the blocks of r+1, r+2, ..., its own last. Within a destination: windows of rows;
// in a window column blocks of all segments; in a column block the row blocks of the window.
//
// A tile has one to four column blocks. Those of a rank are numbered through, over all
// destinations, so that the last tile of a destination may be shared with the next ones.
// A unit is what a cluster makes at a time: tiles of the same columns, one above the other. What
// has no rows or columns left is empty.
struct TileOrder {
  int32_t tile_rows;
  int32_t block_columns;
  int32_t tile_blocks;
  uint64_t tile_inverse;  // 2^32 / tile_blocks, rounded up
  int32_t cluster_rows;
  int32_t row_blocks;
  int32_t row_units;
  int32_t col_blocks[kMaxFusedSegments];  // of one block of a segment
  int32_t all_col_blocks;                 // of a destination
  int32_t num_units;
  // What is made at a step: the number of column blocks, and from bit kSegmentBit on a bit for each
  // segment. From a table, because kernels look a tile up before each that they make.
  uint32_t steps[kMaxRanks];
  static constexpr int kSegmentBit = 24;

  // One column block of a tile.
  struct Part {
    int32_t dest;  // the first one, if the block is shared
    int32_t seg;
    int32_t row_block;
    int32_t col_block;  // within the block of the segment
    int32_t flag;
    bool empty;
  };

  JU_HD static constexpr TileOrder Make(const Geometry& g, int32_t tile_rows, int32_t tile_columns,
                                        int32_t block_columns, int32_t cluster_rows) {
    TileOrder order{};
    order.tile_rows = tile_rows;
    order.block_columns = block_columns;
    order.tile_blocks = tile_columns / block_columns;
    order.tile_inverse = CeilDiv(int64_t{1} << 32, order.tile_blocks);
    order.cluster_rows = cluster_rows;
    order.row_blocks = static_cast<int32_t>(CeilDiv(g.rows, tile_rows));
    order.row_units = static_cast<int32_t>(CeilDiv(order.row_blocks, cluster_rows));
    int32_t columns = 0;
    for (int seg = 0; seg < g.num_segments; ++seg) {
      order.col_blocks[seg] = static_cast<int32_t>(CeilDiv(g.columns[seg], block_columns));
      order.all_col_blocks += order.col_blocks[seg];
      columns += order.col_blocks[seg] * g.num_blocks(seg);
      for (int32_t step = 0; step < g.num_ranks; ++step) {
        if (!MadeAt(g, seg, step)) continue;
        order.steps[step] += static_cast<uint32_t>(order.col_blocks[seg]);
        order.steps[step] |= 1u << (kSegmentBit + seg);
      }
    }
    order.num_units = order.Units(columns) * order.row_units;
    return order;
  }

  JU_HD constexpr int32_t num_flags() const { return row_blocks * all_col_blocks; }

  // Whether segment `seg` has a block to make at `step`: always, or when the first of the ranks
  // that share it comes up. The group of the first destination may be entered in its middle; its
  // other ranks come last and find it done.
  JU_HD static constexpr bool MadeAt(const Geometry& g, int seg, int32_t step) {
    const int32_t copies = g.replicas[seg];
    if (copies == 1 || step == 0) return true;
    const int32_t first = (g.rank + 1) % g.num_ranks;
    const int32_t dest = (first + step) % g.num_ranks;
    return dest % copies == 0 && dest / copies != first / copies;
  }

  // Part `part` of the tile that the CTA makes in the unit.
  JU_HD constexpr Part At(const Geometry& g, int32_t unit, int32_t cta_in_cluster,
                          int32_t part) const {
    int32_t step = 0;
    int32_t done = 0;                  // column blocks of the steps before
    int32_t units = Units(Blocks(0));  // of this step, in a row
    while (unit >= units * row_units) {
      unit -= units * row_units;
      done += Blocks(step++);
      units = Units(done + Blocks(step)) - Units(done);
    }
    const int32_t window_units = kWindowRows / (tile_rows * cluster_rows);
    const int32_t window = unit / (window_units * units);
    unit -= window * window_units * units;
    const int32_t left = row_units - window * window_units;
    const int32_t height = left < window_units ? left : window_units;
    const int32_t col_unit = unit / height;
    const int32_t row_block =
        (window * window_units + unit - col_unit * height) * cluster_rows + cta_in_cluster;
    // In the last tile of a step this may be a block of a later one.
    int32_t col_block = (Units(done) + col_unit) * tile_blocks + part - done;
    while (col_block >= Blocks(step)) {
      col_block -= Blocks(step);
      if (++step == g.num_ranks) return {g.rank, 0, row_block, 0, 0, true};
    }
    int seg = 0;
    int32_t flag = 0;
    while (true) {
      const bool made = (steps[step] >> (kSegmentBit + seg) & 1) != 0;
      if (made && col_block < col_blocks[seg]) break;
      if (made) col_block -= col_blocks[seg];
      flag += col_blocks[seg++];
    }
    int32_t dest = g.rank + 1 + step;
    if (dest >= g.num_ranks) dest -= g.num_ranks;
    return {dest,
            seg,
            row_block,
            col_block,
            row_block * all_col_blocks + flag + col_block,
            row_block >= row_blocks};
  }

  // Segment of column block `col_block` of a destination, counted over all segments. The flag of
  // a tile is row_block * all_col_blocks + col_block.
  JU_HD constexpr int SegmentOf(int32_t col_block) const {
    int seg = 0;
    while (col_block >= col_blocks[seg]) col_block -= col_blocks[seg++];
    return seg;
  }

 private:
  JU_HD constexpr int32_t Blocks(int32_t step) const {
    return static_cast<int32_t>(steps[step] & ((1u << kSegmentBit) - 1));
  }
  // Tiles in a row that begin before column block `end`: a division, which is exact up to 2^30.
  JU_HD constexpr int32_t Units(int32_t end) const {
    return static_cast<int32_t>(static_cast<uint64_t>(end + tile_blocks - 1) * tile_inverse >> 32);
  }
};

}  // namespace jax_ulysses

#endif  // JAX_ULYSSES_EXCHANGE_TILE_ORDER_H_
