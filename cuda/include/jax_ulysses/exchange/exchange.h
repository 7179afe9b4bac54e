// SPDX-License-Identifier: Apache-2.0
// The exchange alone, for any element size: warps push pieces of rows into the slots of the other
// ranks; other warps copy what arrives, and the own block, into the outputs.
//
// Slot and flags are those of all-to-all -> GEMM (push.h). Bulk copies where every row is a
// multiple of 16 bytes and aligned, plain loads and stores otherwise.
#ifndef JAX_ULYSSES_EXCHANGE_EXCHANGE_H_
#define JAX_ULYSSES_EXCHANGE_EXCHANGE_H_

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
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace jax_ulysses {

// Walks the pieces of an order: (rank, rows [begin, end)) of each, segment by segment.
class PieceWalk {
 public:
  JU_D PieceWalk(PushOrder order, int32_t worker, int32_t workers)
      : order_(order), index_(worker - workers), stride_(workers) {}
  JU_D bool Next() {
    index_ += stride_;
    if (index_ >= order_.num_items()) return false;
    const PushOrder::Item item = order_.At(index_);
    rank = item.dest;
    piece = item.piece;
    begin = row = item.piece * kPieceRows;
    end = min(begin + kPieceRows, order_.rows);
    seg = 0;
    return true;
  }
  JU_D int32_t index() const { return index_; }
  JU_D PushOrder::Item At(int32_t index) const { return order_.At(index); }

  int32_t rank = 0, piece = 0, begin = 0, row = 0, end = 0;
  int32_t seg = kMaxFusedSegments;

 private:
  const PushOrder order_;
  int32_t index_;
  const int32_t stride_;
};

// `rows` rows of the sequence shard at `offset`, `pitch` apart, become one row where they touch.
JU_D void SetRows(Strip& strip, int32_t rows, int32_t row_bytes, int32_t source_pitch,
                  int32_t dest_pitch) {
  const bool joined = source_pitch == row_bytes && dest_pitch == row_bytes;
  strip.rows = joined ? 1 : rows;
  strip.row_bytes = joined ? rows * row_bytes : row_bytes;
  strip.source_pitch = source_pitch;
  strip.dest_pitch = dest_pitch;
}

template <class Protocol>
class ExchangePush {
 public:
  static constexpr bool kSignals = true;
  JU_D ExchangePush(const ExchangeArgs& args, Protocol& protocol, int32_t worker, int32_t workers)
      : args_(args),
        protocol_(protocol),
        walk_({args.geometry.num_ranks, args.geometry.rank, args.geometry.rows,
               args.sum_replicas == SumType::kNone},
              worker, workers) {}

  JU_D bool Next(Strip& strip) {
    const Geometry& g = args_.geometry;
    if (walk_.row == walk_.end) {
      walk_.row = walk_.begin;
      if (++walk_.seg >= g.num_segments && !walk_.Next()) return false;
    }
    const int seg = walk_.seg;
    const int32_t row_bytes = args_.row_bytes(seg);
    int32_t rows = walk_.end - walk_.row;
    if (args_.gather) {
      const RowSpan span = g.HeadShardRows(walk_.rank, walk_.row);
      rows = min(rows, span.length);
      strip.source = args_.in[seg] + static_cast<int64_t>(span.begin) * row_bytes;
    } else {
      strip.source = args_.in[seg] + args_.SequenceOffset(seg, walk_.row, walk_.rank);
    }
    strip.dest = protocol_.Slot(walk_.rank) +
                 SourceBlockOffset(g, seg, g.rank, args_.element_bytes) +
                 static_cast<int64_t>(walk_.row) * row_bytes;
    SetRows(strip, rows, row_bytes, args_.gather ? row_bytes : args_.pitch(seg), row_bytes);
    strip.remote = walk_.rank != g.rank;
    walk_.row += rows;
    const bool last = walk_.row == walk_.end && seg == g.num_segments - 1;
    strip.signal = last ? walk_.index() : kNoSignal;
    return true;
  }
  // Edge "tile" (a piece): acquired by the ExchangeCopyOut or SumReplicas of the destination.
  JU_D void Signal(int32_t index) {
    const PushOrder::Item item = walk_.At(index);
    protocol_.PublishTile(item.dest, item.piece);
  }

 private:
  const ExchangeArgs& args_;
  Protocol& protocol_;
  PieceWalk walk_;
};

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
        walk_({args.geometry.num_ranks, args.geometry.rank, args.geometry.rows, 0}, worker,
              workers) {}

  JU_D bool Next(Strip& strip) {
    const Geometry& g = args_.geometry;
    do {
      if (walk_.row == walk_.end) {
        walk_.row = walk_.begin;
        if (++walk_.seg >= g.num_segments && !NextPiece()) return false;
      }
      // Replicas of a head are equal: the first one is taken, or all are summed elsewhere.
      if (args_.gather && (walk_.rank % g.replicas[walk_.seg] != 0 || args_.Summed(walk_.seg))) {
        walk_.row = walk_.end;
      }
    } while (walk_.row == walk_.end);
    const int seg = walk_.seg;
    const int32_t row_bytes = args_.row_bytes(seg);
    int32_t rows = walk_.end - walk_.row;
    RowSpan head_rows = {0, 0};
    // Rows of a head shard: the output of scatter, the own input of gather.
    if (!args_.gather || in_place_) {
      head_rows = g.HeadShardRows(walk_.rank, walk_.row);
      rows = min(rows, head_rows.length);
    }
    int32_t source_pitch = row_bytes;
    if (!in_place_) {
      strip.source = protocol_.Slot(g.rank) +
                     SourceBlockOffset(g, seg, walk_.rank, args_.element_bytes) +
                     static_cast<int64_t>(walk_.row) * row_bytes;
    } else if (args_.gather) {
      strip.source = args_.in[seg] + static_cast<int64_t>(head_rows.begin) * row_bytes;
    } else {
      strip.source = args_.in[seg] + args_.SequenceOffset(seg, walk_.row, g.rank);
      source_pitch = args_.pitch(seg);
    }
    strip.dest =
        args_.out[seg] + (args_.gather ? args_.SequenceOffset(seg, walk_.row, walk_.rank)
                                       : static_cast<int64_t>(head_rows.begin) * row_bytes);
    SetRows(strip, rows, row_bytes, source_pitch, args_.gather ? args_.pitch(seg) : row_bytes);
    strip.signal = kNoSignal;
    strip.remote = false;
    walk_.row += rows;
    return true;
  }
  JU_D void Signal(int32_t) {}

 private:
  JU_D bool NextPiece() {
    if (!walk_.Next()) return false;
    const Geometry& g = args_.geometry;
    // The peers serve this rank in the opposite order: see PushOrder.
    int32_t source = 2 * g.rank - walk_.rank;
    if (source < 0) source += g.num_ranks;
    if (source >= g.num_ranks) source -= g.num_ranks;
    walk_.rank = source;
    in_place_ = source == g.rank && args_.sum_replicas == SumType::kNone;
    if (in_place_) return true;
    TouchPiece<kTest>(args_, protocol_, hooks_, source, walk_.begin, walk_.end);
    return WaitPiecesWarp<kTest>(protocol_, hooks_, source, walk_.begin, walk_.end);
  }

  const ExchangeArgs& args_;
  Protocol& protocol_;
  const TestHooks& hooks_;
  PieceWalk walk_;
  bool in_place_ = false;
};

// Plain copies by a warp, for what bulk copies cannot do.
template <class Unit>
JU_D void CopyRow(char* dest, const char* source, int32_t bytes) {
  for (int32_t i = static_cast<int32_t>(threadIdx.x % 32); i < bytes / int32_t{sizeof(Unit)};
       i += 32) {
    reinterpret_cast<Unit*>(dest)[i] = reinterpret_cast<const Unit*>(source)[i];
  }
}

template <bool kTest, class Work>
JU_D void CopyPlain(Work& work, const TestHooks& hooks) {
  Strip strip;
  while (work.Next(strip)) {
    const bool first = TestHooks::FlagsFirst<kTest>(hooks);
    auto signal = [&] {
      __syncwarp();
      if (strip.signal != kNoSignal && threadIdx.x % 32 == 0) work.Signal(strip.signal);
    };
    if (first) signal();
    if constexpr (kTest) {
      if (strip.remote) hooks.Throttle(strip.rows * strip.row_bytes, threadIdx.x % 32 == 0);
    }
    for (int32_t row = 0; row < strip.rows; ++row) {
      char* dest = strip.dest + static_cast<int64_t>(row) * strip.dest_pitch;
      const char* source = strip.source + static_cast<int64_t>(row) * strip.source_pitch;
      const uint64_t bits = reinterpret_cast<uint64_t>(dest) | reinterpret_cast<uint64_t>(source) |
                            static_cast<uint64_t>(strip.row_bytes);
      if (bits % 8 == 0) {
        CopyRow<uint64_t>(dest, source, strip.row_bytes);
      } else if (bits % 4 == 0) {
        CopyRow<uint32_t>(dest, source, strip.row_bytes);
      } else if (bits % 2 == 0) {
        CopyRow<uint16_t>(dest, source, strip.row_bytes);
      } else {
        CopyRow<uint8_t>(dest, source, strip.row_bytes);
      }
    }
    // The release of lane 0 covers the stores of all lanes, which are before the barrier.
    if (!first) signal();
  }
  __syncwarp();
}

JU_D float LoadAsFloat(const char* p, int64_t i, SumType type) {
  if (type == SumType::kF32) return reinterpret_cast<const float*>(p)[i];
  const uint16_t bits = reinterpret_cast<const uint16_t*>(p)[i];
  return type == SumType::kBf16 ? __bfloat162float(__ushort_as_bfloat16(bits))
                                : __half2float(__ushort_as_half(bits));
}
JU_D void StoreFloat(char* p, int64_t i, SumType type, float v) {
  if (type == SumType::kF32) {
    reinterpret_cast<float*>(p)[i] = v;
  } else if (type == SumType::kBf16) {
    reinterpret_cast<__nv_bfloat16*>(p)[i] = __float2bfloat16(v);
  } else {
    reinterpret_cast<__half*>(p)[i] = __float2half(v);
  }
}

// Gather of replicated heads with their sum: in rank order, in fp32, rounded once.
template <bool kTest, class Protocol>
JU_D void SumReplicas(const ExchangeArgs& args, Protocol& protocol, const TestHooks& hooks,
                      int32_t worker, int32_t workers) {
  const Geometry& g = args.geometry;
  const int32_t pieces = static_cast<int32_t>(CeilDiv(g.rows, kPieceRows));
  for (int seg = 0; seg < g.num_segments; ++seg) {
    if (!args.Summed(seg)) continue;
    const int32_t copies = g.replicas[seg];
    for (int32_t i = worker; i < pieces * g.num_blocks(seg); i += workers) {
      const int32_t first = i / pieces * copies;
      const int32_t begin = i % pieces * kPieceRows;
      const int32_t end = min(begin + kPieceRows, g.rows);
      for (int32_t r = 0; r < copies; ++r) {
        TouchPiece<kTest>(args, protocol, hooks, first + r, begin, end);
        if (!WaitPiecesWarp<kTest>(protocol, hooks, first + r, begin, end)) return;
      }
      const int32_t columns = g.columns[seg];
      for (int32_t e = static_cast<int32_t>(threadIdx.x % 32); e < (end - begin) * columns;
           e += 32) {
        const int32_t row = begin + e / columns, column = e % columns;
        float sum = 0;
        for (int32_t r = 0; r < copies; ++r) {
          const char* block =
              protocol.Slot(g.rank) + SourceBlockOffset(g, seg, first + r, args.element_bytes);
          sum +=
              LoadAsFloat(block, static_cast<int64_t>(row) * columns + column, args.sum_replicas);
        }
        StoreFloat(args.out[seg] + args.SequenceOffset(seg, row, first), column, args.sum_replicas,
                   sum);
      }
    }
  }
}

}  // namespace jax_ulysses
#endif  // __CUDACC__

#endif  // JAX_ULYSSES_EXCHANGE_EXCHANGE_H_
