// SPDX-License-Identifier: Apache-2.0
// The gathered operand of all-to-all -> GEMM: the communication warps copy what has arrived, beside
// the GEMM that reads it. Replicated heads are added up elsewhere (sum_gathered.h).
#ifndef JAX_ULYSSES_EXCHANGE_COPY_GATHERED_H_
#define JAX_ULYSSES_EXCHANGE_COPY_GATHERED_H_

#include "jax_ulysses/exchange/push.h"

namespace jax_ulysses {

// How many pieces of a source, a power of two, are waited for and gathered at a time: a wait takes
// about 1.2 us, however much it is for, and a copy of full chunks is faster than one of short ones.
// As many as leave every worker several items, of `blocks` blocks of `pieces` pieces.
JU_HD constexpr int32_t JoinedPieces(int32_t pieces, int32_t blocks, int32_t most,
                                     int32_t workers) {
  constexpr int32_t kItemsEach = 4;
  int32_t join = 1;
  while (2 * join <= most && blocks * (pieces / (2 * join)) >= kItemsEach * workers) join *= 2;
  return join;
}

// The order in which what has arrived is copied into the gathered operand: that in which the GEMM
// consumes, so that the rows are likely in the cache. An item is one or more pieces of a source.
struct GatherOrder {
  PushOrder order;
  int32_t item_rows;

  struct Item {
    int32_t source;
    int32_t begin;  // row
  };

  static constexpr int32_t kMostPieces = 8;

  JU_HD static constexpr GatherOrder Make(const Geometry& g, int32_t window_rows, int32_t workers) {
    const int32_t pieces = static_cast<int32_t>(CeilDiv(g.rows, kPieceRows));
    const int32_t most =
        window_rows / kPieceRows < kMostPieces ? window_rows / kPieceRows : kMostPieces;
    const int32_t join = JoinedPieces(pieces, g.num_ranks, most, workers);
    // As many pieces as there are items of a source.
    const int32_t rows = static_cast<int32_t>(CeilDiv(pieces, join)) * kPieceRows;
    return {{g.num_ranks, g.rank, rows, 0, window_rows / kPieceRows / join}, join * kPieceRows};
  }
  JU_HD constexpr int32_t num_items() const { return order.num_items(); }
  JU_HD constexpr Item At(int32_t index) const {
    const PushOrder::Item item = order.At(index);
    // Step s: PushOrder goes down from the rank, the GEMM up.
    int32_t source = 2 * order.rank - item.dest;
    if (source < 0) source += order.num_ranks;
    if (source >= order.num_ranks) source -= order.num_ranks;
    return {source, item.piece * item_rows};
  }
};

}  // namespace jax_ulysses

#if defined(__CUDACC__)
namespace jax_ulysses {

// Copies what has arrived, and the own block, into the gathered operand [rows, C]. Segments of
// which ranks share blocks are left to SumGathered.
template <bool kTest, class Protocol>
class GatherWork {
 public:
  static constexpr bool kSignals = false;

  JU_D GatherWork(const PushArgs& args, Protocol& protocol, const TestHooks& hooks, int32_t worker,
                  int32_t workers)
      : args_(args),
        protocol_(protocol),
        hooks_(hooks),
        order_(GatherOrder::Make(args.geometry, args.window_rows, workers)),
        item_(worker - workers),
        stride_(workers) {}

  JU_D bool Next(Strip& strip) {
    const Geometry& g = args_.geometry;
    while (row_ == end_) {
      row_ = begin_;
      if (++seg_ >= g.num_segments && !NextItem()) return false;
      if (g.replicated(seg_)) row_ = end_;
    }
    const int32_t row_bytes = g.columns[seg_] * args_.element_bytes;
    int32_t rows = end_ - row_;
    if (source_ == g.rank && args_.own_in_place) {
      const RowSpan span = g.HeadShardRows(g.rank, row_);
      rows = min(rows, span.length);
      strip.source = args_.parts[seg_] + static_cast<int64_t>(span.begin) * row_bytes;
    } else {
      strip.source = protocol_.Slot(g.rank) +
                     SourceBlockOffset(g, seg_, source_, args_.element_bytes) +
                     static_cast<int64_t>(row_) * row_bytes;
    }
    strip.dest_pitch = g.fused_columns * args_.element_bytes;
    strip.dest = args_.gathered + static_cast<int64_t>(row_) * strip.dest_pitch +
                 static_cast<int64_t>(g.block_begin(seg_, source_)) * args_.element_bytes;
    strip.rows = rows;
    strip.row_bytes = row_bytes;
    strip.source_pitch = row_bytes;
    strip.signal = kNoSignal;
    strip.remote = false;
    row_ += rows;
    return true;
  }
  JU_D void Signal(int32_t) {}

 private:
  JU_D bool NextItem() {
    const Geometry& g = args_.geometry;
    item_ += stride_;
    if (item_ >= order_.num_items()) return false;
    const GatherOrder::Item item = order_.At(item_);
    source_ = item.source;
    seg_ = 0;
    begin_ = row_ = item.begin;
    end_ = min(begin_ + order_.item_rows, g.rows);
    if (source_ == g.rank && args_.own_in_place) return true;
    return WaitPiecesWarp<kTest>(protocol_, hooks_, source_, begin_, end_);
  }

  const PushArgs& args_;
  Protocol& protocol_;
  const TestHooks& hooks_;
  const GatherOrder order_;
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

#endif  // JAX_ULYSSES_EXCHANGE_COPY_GATHERED_H_
