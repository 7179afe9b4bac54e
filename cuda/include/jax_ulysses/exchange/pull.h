// SPDX-License-Identifier: Apache-2.0
// The two work lists of GEMM -> all-to-all: the order in which a rank makes tiles, and the order in
// which it pulls rows out of the slots of the others into its output.
//
// Slot of a rank: for each segment, for each block of columns (of one destination, or of the ranks
// that share a replicated head), [rows, columns]. A replicated block is made once and pulled by
// each of its owners, the maker among them.
#ifndef JAX_ULYSSES_EXCHANGE_PULL_H_
#define JAX_ULYSSES_EXCHANGE_PULL_H_

#include "jax_ulysses/base.h"
#include "jax_ulysses/exchange/geometry.h"
#include "jax_ulysses/exchange/push.h"

namespace jax_ulysses {

// Rank r makes the blocks of r+1, r+2, ..., its own last. Within a destination: windows of rows;
// in a window column blocks of all segments; in a column block the row blocks of the window.
//
// A tile has one or two column blocks. Those of a rank are numbered through, over all destinations,
// so that a destination with an odd number of them ends in a tile that it shares with the next one.
// A unit is what a cluster makes at a time: tiles of the same columns, one above the other. What
// has no rows or columns left is empty.
struct TileOrder {
  int32_t tile_rows;
  int32_t tile_blocks;
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

  JU_HD static constexpr TileOrder Make(const Geometry& g, int32_t tile_rows, int32_t tile_blocks,
                                        int32_t cluster_rows) {
    TileOrder order{};
    order.tile_rows = tile_rows;
    order.tile_blocks = tile_blocks;
    order.cluster_rows = cluster_rows;
    order.row_blocks = static_cast<int32_t>(CeilDiv(g.rows, tile_rows));
    order.row_units = static_cast<int32_t>(CeilDiv(order.row_blocks, cluster_rows));
    int32_t columns = 0;
    for (int seg = 0; seg < g.num_segments; ++seg) {
      order.col_blocks[seg] = static_cast<int32_t>(CeilDiv(g.columns[seg], kBlockColumns));
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
  // Tiles in a row that begin before column block `end`.
  JU_HD constexpr int32_t Units(int32_t end) const {
    return (end + tile_blocks - 1) >> (tile_blocks - 1);  // of 1 or 2: no division
  }
};

// Rank r pulls from r-1, r-2, ...: the source at distance d makes r's block as its d-th. The
// source is r itself, last, for what r did not store into its output directly. An item is a piece
// of rows of all segments: one wait for many bytes.
struct PullOrder {
  struct Item {
    int32_t source;
    int32_t piece;
  };

  JU_HD static constexpr bool OwnInSlot(const Geometry& g, int seg, bool own_in_place) {
    return !own_in_place || g.replicated(seg);
  }
  // Whether rank r pulls segment `seg` of `source`.
  JU_HD static constexpr bool Pulls(const Geometry& g, int32_t source, int seg, bool own_in_place) {
    return source != g.rank || OwnInSlot(g, seg, own_in_place);
  }

  JU_HD static constexpr int32_t num_items(const Geometry& g, bool own_in_place) {
    bool own = false;
    for (int seg = 0; seg < g.num_segments; ++seg) own = own || OwnInSlot(g, seg, own_in_place);
    return static_cast<int32_t>(CeilDiv(g.rows, kPieceRows)) * (g.num_ranks - 1 + own);
  }

  JU_HD static constexpr Item At(const Geometry& g, int32_t index) {
    const int32_t pieces = static_cast<int32_t>(CeilDiv(g.rows, kPieceRows));
    const int32_t step = index / pieces;
    const int32_t source = g.rank - 1 - step;
    return {source < 0 ? source + g.num_ranks : source, index - step * pieces};
  }
};

// Byte offset of block `block` of segment `seg` in a slot that is filled by its owner's GEMM.
JU_HD constexpr int64_t MadeBlockOffset(const Geometry& g, int seg, int32_t block,
                                        int32_t element_bytes) {
  int64_t elements = 0;
  for (int i = 0; i < seg; ++i) elements += g.SlotElements(i, false);
  return (elements + static_cast<int64_t>(block) * g.rows * g.columns[seg]) * element_bytes;
}

}  // namespace jax_ulysses

#if defined(__CUDACC__)
#include "jax_ulysses/exchange/copy_ring.h"
#include "jax_ulysses/exchange/rank_call.h"

namespace jax_ulysses {

struct PullArgs {
  Geometry geometry;
  TileOrder order;
  char* out[kMaxFusedSegments] = {};          // head shards [B*S, columns]
  int64_t own_block[kMaxFusedSegments] = {};  // what this rank pulls, in the slots of all, bytes
  int32_t element_bytes = 2;
  int32_t own_in_place = 0;
};

template <bool kTest, class Protocol>
class PullWork {
 public:
  static constexpr bool kSignals = false;

  JU_D PullWork(const PullArgs& args, Protocol& protocol, const TestHooks& hooks, int32_t worker,
                int32_t workers)
      : args_(args),
        protocol_(protocol),
        hooks_(hooks),
        slot_offset_(protocol.call().layout.slot(protocol.slot_index())),
        item_(worker - workers),
        stride_(workers) {}

  JU_D bool Next(Strip& strip) {
    const Geometry& g = args_.geometry;
    while (row_ == end_) {
      row_ = begin_;
      if (++seg_ >= g.num_segments && !NextItem()) return false;
      if (!PullOrder::Pulls(g, source_, seg_, args_.own_in_place)) row_ = end_;
    }
    const RowSpan span = g.HeadShardRows(source_, row_);
    const int32_t rows = min(end_ - row_, span.length);
    const int32_t row_bytes = g.columns[seg_] * args_.element_bytes;
    strip.source = protocol_.call().peers.heap[source_] + slot_offset_ + args_.own_block[seg_] +
                   static_cast<int64_t>(row_) * row_bytes;
    strip.dest = args_.out[seg_] + static_cast<int64_t>(span.begin) * row_bytes;
    strip.rows = 1;  // contiguous on both sides
    strip.row_bytes = rows * row_bytes;
    strip.remote = source_ != g.rank;
    row_ += rows;
    return true;
  }
  JU_D void Signal(int32_t) {}

 private:
  JU_D bool NextItem() {
    const Geometry& g = args_.geometry;
    const TileOrder& order = args_.order;
    item_ += stride_;
    if (item_ >= PullOrder::num_items(g, args_.own_in_place)) return false;
    const PullOrder::Item item = PullOrder::At(g, item_);
    source_ = item.source;
    seg_ = 0;
    begin_ = row_ = item.piece * kPieceRows;
    end_ = min(row_ + kPieceRows, g.rows);
    // Edge "tile": released by the publisher warp of the source, acquired here, one flag per lane;
    // then the async proxy may read the peer's slot.
    bool ok = true;
    for (int32_t i = static_cast<int32_t>(threadIdx.x % 32); i < order.all_col_blocks; i += 32) {
      if (!PullOrder::Pulls(g, source_, order.SegmentOf(i), args_.own_in_place)) continue;
      const int32_t flag = row_ / order.tile_rows * order.all_col_blocks + i;
      ok = protocol_.WaitTile(source_, flag) && ok;
    }
    ok = AllLanes(ok);
    if (!TestHooks::Removed<kTest>(hooks_, kEdgeProxyFence)) ptx::ProxyFence();
    TestHooks::DelayRead<kTest>(hooks_);
    return ok;
  }

  const PullArgs& args_;
  Protocol& protocol_;
  const TestHooks& hooks_;
  const int64_t slot_offset_;
  int32_t item_;
  const int32_t stride_;
  int32_t source_ = 0;
  int32_t seg_ = kMaxFusedSegments;
  int32_t begin_ = 0;
  int32_t row_ = 0;
  int32_t end_ = 0;
};

}  // namespace jax_ulysses
#endif  // __CUDACC__

#endif  // JAX_ULYSSES_EXCHANGE_PULL_H_
