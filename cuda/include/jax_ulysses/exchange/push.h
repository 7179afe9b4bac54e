// SPDX-License-Identifier: Apache-2.0
// The communication of all-to-all -> GEMM: which pieces of rows a rank pushes into the slots of the
// others, and in which order.
//
// Slot of a rank: for each segment, for each source, the block [rows, columns] that the source
// holds of this rank's rows. A piece is kPieceRows rows of all segments and has one flag.
#ifndef JAX_ULYSSES_EXCHANGE_PUSH_H_
#define JAX_ULYSSES_EXCHANGE_PUSH_H_

#include "jax_ulysses/base.h"
#include "jax_ulysses/exchange/geometry.h"
#include "jax_ulysses/exchange/output_tiles.h"

namespace jax_ulysses {

// The GEMM of rank r takes its K blocks from sources r, r+1, ..., so rank s is needed first by
// itself, then by s-1, s-2, ...: that is the order in which it serves them.
struct PushOrder {
  int32_t num_ranks;
  int32_t rank;
  int32_t rows;
  int32_t first_step;  // 0: the own block goes through the slot too; 1: it is read in place
  int32_t window_pieces = kWindowRows / kPieceRows;

  struct Item {
    int32_t dest;
    int32_t piece;
  };

  JU_HD constexpr int32_t num_pieces() const {
    return static_cast<int32_t>(CeilDiv(rows, kPieceRows));
  }
  JU_HD constexpr int32_t num_items() const { return (num_ranks - first_step) * num_pieces(); }
  JU_HD constexpr Item At(int32_t index) const {
    const int32_t steps = num_ranks - first_step;
    const int32_t window = index / (steps * window_pieces);
    const int32_t left = num_pieces() - window * window_pieces;
    const int32_t pieces = left < window_pieces ? left : window_pieces;
    const int32_t within = index - window * steps * window_pieces;
    const int32_t step = within / pieces;
    const int32_t dest = rank - step - first_step;
    return {dest < 0 ? dest + num_ranks : dest, window * window_pieces + within - step * pieces};
  }
};

// Byte offset of the block of `source` in segment `seg` of a slot that is filled by sources.
JU_HD constexpr int64_t SourceBlockOffset(const Geometry& g, int seg, int32_t source,
                                          int32_t element_bytes) {
  int64_t elements = 0;
  for (int i = 0; i < seg; ++i) elements += g.SlotElements(i, true);
  return (elements + static_cast<int64_t>(source) * g.rows * g.columns[seg]) * element_bytes;
}

}  // namespace jax_ulysses

#if defined(__CUDACC__)
#include "jax_ulysses/exchange/copy_ring.h"
#include "jax_ulysses/exchange/hand_off.h"
#include "jax_ulysses/exchange/rank_call.h"
#include "jax_ulysses/exchange/wait_pieces.h"

namespace jax_ulysses {

struct PushArgs {
  Geometry geometry;
  const char* parts[kMaxFusedSegments] = {};  // head shards [B*S, columns]
  int64_t own_block[kMaxFusedSegments] = {};  // this rank's block in the slots of others, bytes
  char* gathered = nullptr;                   // [rows, C], or null
  int32_t element_bytes = 2;
  int32_t own_in_place = 0;
  int32_t window_rows = kWindowRows;
  // The first items may be pushed by all CTAs, the others by those that communicate.
  int32_t head_items = 0;

  JU_HD constexpr PushOrder order() const {
    return {geometry.num_ranks, geometry.rank, geometry.rows, own_in_place,
            window_rows / kPieceRows};
  }
};

// Pushes the pieces of a CTA, and hands each one that is written to the publisher warp.
template <bool kTest, class Protocol>
class PushWork {
 public:
  static constexpr bool kSignals = true;

  JU_D PushWork(const PushArgs& args, const Protocol& protocol, HandOff<kTest>& hand_off,
                const PushShare& share)
      : args_(args),
        peers_(protocol.call().peers),
        hand_off_(hand_off),
        slot_offset_(protocol.call().layout.slot(protocol.slot_index())),
        share_(share) {}

  JU_D bool Next(Strip& strip) {
    const Geometry& g = args_.geometry;
    if (row_ == end_) {
      row_ = begin_;
      if (++seg_ >= g.num_segments && !NextItem()) return false;
    }
    const RowSpan span = g.HeadShardRows(dest_, row_);
    const int32_t rows = min(end_ - row_, span.length);
    const int32_t row_bytes = g.columns[seg_] * args_.element_bytes;
    strip.source = args_.parts[seg_] + static_cast<int64_t>(span.begin) * row_bytes;
    strip.dest = peers_.heap[dest_] + slot_offset_ + args_.own_block[seg_] +
                 static_cast<int64_t>(row_) * row_bytes;
    strip.rows = 1;  // contiguous on both sides
    strip.row_bytes = rows * row_bytes;
    strip.remote = dest_ != g.rank;
    row_ += rows;
    const bool last = row_ == end_ && seg_ == g.num_segments - 1;
    strip.signal = last ? item_ : kNoSignal;
    return true;
  }

  JU_D void Signal(int32_t item) { hand_off_.GiveByLane(item); }

 private:
  JU_D bool NextItem() {
    const PushOrder order = args_.order();
    item_ = share_.Next(args_.head_items, order.num_items());
    if (item_ < 0) return false;
    const PushOrder::Item item = order.At(item_);
    dest_ = item.dest;
    seg_ = 0;
    begin_ = row_ = item.piece * kPieceRows;
    end_ = min(begin_ + kPieceRows, order.rows);
    return true;
  }

  const PushArgs& args_;
  const PeerTable& peers_;
  HandOff<kTest>& hand_off_;
  const int64_t slot_offset_;
  PushShare share_;
  int32_t item_ = 0;
  int32_t dest_ = 0;
  int32_t seg_ = kMaxFusedSegments;
  int32_t begin_ = 0;
  int32_t row_ = 0;
  int32_t end_ = 0;
};

// The publisher warp: raises the flags of pieces that PushWork hands over, until kNoSignal comes. A
// release takes as long for several flags, a lane each, as for one.
template <bool kTest, class Protocol>
JU_D void PublishPieces(const PushArgs& args, Protocol& protocol, HandOff<kTest>& hand_off) {
  const PushOrder order = args.order();
  bool last = false;
  while (!last) {
    int32_t index = 0;
    const int32_t pieces = hand_off.TakeSome(index);
    const bool mine = static_cast<int32_t>(threadIdx.x % 32) < pieces;
    // Edge "tile", here per piece: released to the destination, system scope; acquired by the
    // watcher warps of its GEMM (WaitPiecesWarp) and by its GatherWork.
    if (mine && index != kNoSignal) {
      const PushOrder::Item item = order.At(index);
      protocol.PublishTile(item.dest, item.piece);
    }
    last = __any_sync(~0u, mine && index == kNoSignal);
    hand_off.TakeDone(pieces);
  }
}

}  // namespace jax_ulysses
#endif  // __CUDACC__

#endif  // JAX_ULYSSES_EXCHANGE_PUSH_H_
