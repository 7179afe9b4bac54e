// SPDX-License-Identifier: Apache-2.0
// The communication of GEMM -> all-to-all: the order in which a rank pulls rows out of the slots of
// the others into its output.
//
// Slot of a rank: for each segment, for each block of columns (of one destination, or of the ranks
// that share a replicated head), [rows, columns]. A replicated block is made once and pulled by
// each of its owners, the maker among them.
#ifndef JAX_ULYSSES_EXCHANGE_PULL_H_
#define JAX_ULYSSES_EXCHANGE_PULL_H_

#include "jax_ulysses/base.h"
#include "jax_ulysses/exchange/geometry.h"
#include "jax_ulysses/exchange/tile_order.h"

namespace jax_ulysses {

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
