// SPDX-License-Identifier: Apache-2.0
// The exchange alone, for any element size: warps push pieces of rows into the slots of the other
// ranks; other warps copy what arrives, and the own block, into the outputs.
//
// The slot is that of all-to-all -> GEMM (push.h); for its pieces see exchange_order.h. Bulk copies
// where every row is a multiple of 16 bytes and aligned, plain loads and stores otherwise.
#ifndef JAX_ULYSSES_EXCHANGE_EXCHANGE_H_
#define JAX_ULYSSES_EXCHANGE_EXCHANGE_H_

#include "jax_ulysses/exchange/exchange_order.h"
#include "jax_ulysses/exchange/push.h"
#include "jax_ulysses/launch.h"

namespace jax_ulysses {

struct ExchangeArgs {
  Geometry geometry;
  const char* in[kMaxFusedSegments] = {};
  char* out[kMaxFusedSegments] = {};
  int32_t element_bytes = 1;
  int32_t gather = 0;                     // 0: sequence shards -> head shards, 1: the reverse
  SumType sum_replicas = SumType::kNone;  // gather only
  int32_t bulk = 0;
  int32_t piece_rows = 1;

  JU_HD constexpr ExchangeOrder order() const {
    return {geometry.num_ranks, geometry.rank,
            static_cast<int32_t>(CeilDiv(geometry.rows, piece_rows)),
            sum_replicas == SumType::kNone};
  }
  JU_HD constexpr int32_t piece_end(int32_t begin) const {
    const int32_t end = begin + piece_rows;
    return end < geometry.rows ? end : geometry.rows;
  }
  JU_HD constexpr int32_t row_bytes(int seg) const { return geometry.columns[seg] * element_bytes; }
  // Bytes of a row of the sequence shard.
  JU_HD constexpr int32_t pitch(int seg) const { return geometry.num_blocks(seg) * row_bytes(seg); }
  // Offset of the columns that `rank` owns, in a sequence shard.
  JU_HD constexpr int64_t SequenceOffset(int seg, int32_t row, int32_t rank) const {
    return static_cast<int64_t>(row) * pitch(seg) +
           static_cast<int64_t>(geometry.block(seg, rank)) * row_bytes(seg);
  }
  JU_HD constexpr bool Summed(int seg) const {
    return sum_replicas != SumType::kNone && gather && geometry.replicated(seg);
  }
};

}  // namespace jax_ulysses

#if defined(__CUDACC__)

namespace jax_ulysses {

// `rows` rows of the sequence shard at `offset`, `pitch` apart, become one row where they touch.
JU_D void SetRows(Strip& strip, int32_t rows, int32_t row_bytes, int32_t source_pitch,
                  int32_t dest_pitch) {
  const bool joined = source_pitch == row_bytes && dest_pitch == row_bytes;
  strip.rows = joined ? 1 : rows;
  strip.row_bytes = joined ? rows * row_bytes : row_bytes;
  strip.source_pitch = source_pitch;
  strip.dest_pitch = dest_pitch;
}

template <bool kTest, class Protocol>
class ExchangePush {
 public:
  static constexpr bool kSignals = true;
  JU_D ExchangePush(const ExchangeArgs& args, const Protocol& protocol, HandOff<kTest>& hand_off,
                    int32_t worker, int32_t workers)
      : args_(args),
        protocol_(protocol),
        hand_off_(hand_off),
        index_(worker - workers),
        stride_(workers) {}

  JU_D bool Next(Strip& strip) {
    const Geometry& g = args_.geometry;
    if (row_ == end_) {
      row_ = begin_;
      if (++seg_ >= g.num_segments && !NextPiece()) return false;
    }
    const int32_t row_bytes = args_.row_bytes(seg_);
    int32_t rows = end_ - row_;
    if (args_.gather) {
      const RowSpan span = g.HeadShardRows(dest_, row_);
      rows = min(rows, span.length);
      strip.source = args_.in[seg_] + static_cast<int64_t>(span.begin) * row_bytes;
    } else {
      strip.source = args_.in[seg_] + args_.SequenceOffset(seg_, row_, dest_);
    }
    strip.dest = protocol_.Slot(dest_) + SourceBlockOffset(g, seg_, g.rank, args_.element_bytes) +
                 static_cast<int64_t>(row_) * row_bytes;
    SetRows(strip, rows, row_bytes, args_.gather ? row_bytes : args_.pitch(seg_), row_bytes);
    strip.remote = dest_ != g.rank;
    row_ += rows;
    const bool last = row_ == end_ && seg_ == g.num_segments - 1;
    strip.signal = last ? index_ : kNoSignal;
    return true;
  }
  JU_D void Signal(int32_t index) { hand_off_.GiveByLane(index); }

 private:
  JU_D bool NextPiece() {
    const ExchangeOrder order = args_.order();
    index_ += stride_;
    if (index_ >= order.num_sent()) return false;
    const ExchangeOrder::Item item = order.Sent(index_);
    dest_ = item.rank;
    seg_ = 0;
    begin_ = row_ = item.piece * args_.piece_rows;
    end_ = args_.piece_end(begin_);
    return true;
  }

  const ExchangeArgs& args_;
  const Protocol& protocol_;
  HandOff<kTest>& hand_off_;
  int32_t index_;
  const int32_t stride_;
  int32_t dest_ = 0;
  int32_t seg_ = kMaxFusedSegments;
  int32_t begin_ = 0, row_ = 0, end_ = 0;
};

// Edge "tile", here per piece: released to the destination, system scope; acquired by its
// ExchangeCopyOut or SumReplicas.
template <class Protocol>
JU_D void PublishPiece(const ExchangeArgs& args, Protocol& protocol, int32_t index) {
  const ExchangeOrder::Item item = args.order().Sent(index);
  protocol.PublishTile(item.rank, item.piece);
}

// One warp: waits for a piece of `count` sources, a lane each. The proxy fence lets the async proxy
// (bulk loads) read what the generic proxy has just acquired.
template <bool kTest, class Protocol>
JU_D bool WaitPieceWarp(Protocol& protocol, const TestHooks& hooks, int32_t first_source,
                        int32_t count, int32_t piece) {
  bool ok = true;
  for (int32_t i = static_cast<int32_t>(threadIdx.x % 32); i < count; i += 32) {
    ok = protocol.WaitTile(first_source + i, piece) && ok;
  }
  ok = AllLanes(ok);
  if (!TestHooks::Removed<kTest>(hooks, kEdgeProxyFence)) ptx::ProxyFence();
  TestHooks::DelayRead<kTest>(hooks);
  return ok;
}

// What lies in the own slot where rows [begin, end) of `source` belong.
template <bool kTest, class Protocol>
JU_D void TouchPiece(const ExchangeArgs& args, const Protocol& protocol, const TestHooks& hooks,
                     int32_t source, int32_t begin, int32_t end) {
  if (!TestHooks::Adversary<kTest>(hooks)) return;
  const Geometry& g = args.geometry;
  for (int seg = 0; seg < g.num_segments; ++seg) {
    const int32_t row_bytes = args.row_bytes(seg);
    const char* block =
        protocol.Slot(g.rank) + SourceBlockOffset(g, seg, source, args.element_bytes);
    TestHooks::Touch<kTest>(hooks, block + static_cast<int64_t>(begin) * row_bytes,
                            (end - begin) * row_bytes);
  }
}

template <bool kTest, class Protocol>
class ExchangeCopyOut {
 public:
  static constexpr bool kSignals = false;
  JU_D ExchangeCopyOut(const ExchangeArgs& args, Protocol& protocol, const TestHooks& hooks,
                       int32_t worker, int32_t workers)
      : args_(args),
        protocol_(protocol),
        hooks_(hooks),
        index_(worker - workers),
        stride_(workers) {}

  JU_D bool Next(Strip& strip) {
    const Geometry& g = args_.geometry;
    do {
      if (row_ == end_) {
        row_ = begin_;
        if (++seg_ >= g.num_segments && !NextPiece()) return false;
      }
      // Replicas of a head are equal: the first one is taken, or all are summed elsewhere.
      if (args_.gather && (source_ % g.replicas[seg_] != 0 || args_.Summed(seg_))) row_ = end_;
    } while (row_ == end_);
    const int32_t row_bytes = args_.row_bytes(seg_);
    int32_t rows = end_ - row_;
    RowSpan head_rows = {0, 0};
    // Rows of a head shard: the output of scatter, the own input of gather.
    if (!args_.gather || in_place_) {
      head_rows = g.HeadShardRows(source_, row_);
      rows = min(rows, head_rows.length);
    }
    int32_t source_pitch = row_bytes;
    if (!in_place_) {
      strip.source = protocol_.Slot(g.rank) +
                     SourceBlockOffset(g, seg_, source_, args_.element_bytes) +
                     static_cast<int64_t>(row_) * row_bytes;
    } else if (args_.gather) {
      strip.source = args_.in[seg_] + static_cast<int64_t>(head_rows.begin) * row_bytes;
    } else {
      strip.source = args_.in[seg_] + args_.SequenceOffset(seg_, row_, g.rank);
      source_pitch = args_.pitch(seg_);
    }
    strip.dest =
        args_.out[seg_] + (args_.gather ? args_.SequenceOffset(seg_, row_, source_)
                                        : static_cast<int64_t>(head_rows.begin) * row_bytes);
    SetRows(strip, rows, row_bytes, source_pitch, args_.gather ? args_.pitch(seg_) : row_bytes);
    strip.signal = kNoSignal;
    strip.remote = false;
    row_ += rows;
    return true;
  }
  JU_D void Signal(int32_t) {}

 private:
  JU_D bool NextPiece() {
    const ExchangeOrder order = args_.order();
    index_ += stride_;
    if (index_ >= order.num_received()) return false;
    const ExchangeOrder::Item item = order.Received(index_);
    source_ = item.rank;
    seg_ = 0;
    begin_ = row_ = item.piece * args_.piece_rows;
    end_ = args_.piece_end(begin_);
    in_place_ = source_ == args_.geometry.rank && args_.sum_replicas == SumType::kNone;
    if (in_place_) return true;
    TouchPiece<kTest>(args_, protocol_, hooks_, source_, begin_, end_);
    return WaitPieceWarp<kTest>(protocol_, hooks_, source_, 1, item.piece);
  }

  const ExchangeArgs& args_;
  Protocol& protocol_;
  const TestHooks& hooks_;
  int32_t index_;
  const int32_t stride_;
  int32_t source_ = 0;
  int32_t seg_ = kMaxFusedSegments;
  int32_t begin_ = 0, row_ = 0, end_ = 0;
  bool in_place_ = false;
};

}  // namespace jax_ulysses
#endif  // __CUDACC__

#endif  // JAX_ULYSSES_EXCHANGE_EXCHANGE_H_
