// SPDX-License-Identifier: Apache-2.0
// The one mapping behind every operator: which columns of the fused [.., C] matrix belong to which
// rank. Pure integer code, usable in constant expressions, on the host and on the device.
//
// Fused columns are segments one after the other, heads inside a segment, H columns a head.
// Packed columns of a destination are the same segments with only the heads that this rank holds.
// A segment of M heads is split when M % P == 0 (rank r holds heads [r*M/P, (r+1)*M/P)) and
// replicated when P % M == 0 (rank r holds head floor(r*M/P), so R = P/M ranks share a head).
#ifndef JAX_ULYSSES_LAYOUT_HEAD_EXCHANGE_H_
#define JAX_ULYSSES_LAYOUT_HEAD_EXCHANGE_H_

#include "jax_ulysses/base.h"
#include "jax_ulysses/layout/token_order.h"

namespace jax_ulysses {

enum class LayoutError : int32_t {
  kNone = 0,
  kNumRanks,    // P outside [1, kMaxRanks]
  kHeadDim,     // H < 1
  kSegments,    // number of segments outside [1, kMaxSegments]
  kHeads,       // a segment neither splits nor replicates over P
  kTokens,      // T < 0
  kZigzagOdd,   // zigzag order with an odd T
  kTokenOrder,  // not a TokenOrder
};

// A fused column and every rank that holds it: ranks [first_rank, first_rank + replicas), at the
// same packed column on each.
struct ColumnOwner {
  int64_t segment;
  int64_t head;
  int64_t first_rank;
  int64_t replicas;
  int64_t packed_column;
};

struct HeadExchange {
  int64_t num_ranks = 1;                                   // P
  int64_t head_dim = 1;                                    // H
  TokenOrder token_order = TokenOrder::kContiguous;        //
  int64_t local_tokens = 0;                                // T
  int64_t num_segments = 0;                                //
  int64_t heads[kMaxSegments] = {0, 0, 0, 0, 0, 0, 0, 0};  // M of each segment

  JU_HD constexpr LayoutError Check() const {
    if (num_ranks < 1 || num_ranks > kMaxRanks) return LayoutError::kNumRanks;
    if (head_dim < 1) return LayoutError::kHeadDim;
    if (num_segments < 1 || num_segments > kMaxSegments) return LayoutError::kSegments;
    for (int64_t i = 0; i < num_segments; ++i) {
      if (heads[i] < 1) return LayoutError::kHeads;
      if (heads[i] % num_ranks != 0 && num_ranks % heads[i] != 0) return LayoutError::kHeads;
    }
    if (local_tokens < 0) return LayoutError::kTokens;
    if (token_order != TokenOrder::kContiguous && token_order != TokenOrder::kZigzag) {
      return LayoutError::kTokenOrder;
    }
    if (token_order == TokenOrder::kZigzag && local_tokens % 2 != 0) return LayoutError::kZigzagOdd;
    return LayoutError::kNone;
  }

  JU_HD constexpr TokenMap tokens() const { return {token_order, num_ranks, local_tokens}; }

  // Ranks that hold the same head of segment `seg`: 1 when it is split.
  JU_HD constexpr int64_t replicas(int64_t seg) const {
    return heads[seg] >= num_ranks ? 1 : num_ranks / heads[seg];
  }
  JU_HD constexpr bool is_replicated(int64_t seg) const { return replicas(seg) > 1; }

  // Heads of segment `seg` on every rank.
  JU_HD constexpr int64_t local_heads(int64_t seg) const {
    return heads[seg] >= num_ranks ? heads[seg] / num_ranks : 1;
  }

  // First global head of segment `seg` on `rank`; floor(r*M/P) in both cases.
  JU_HD constexpr int64_t first_head(int64_t seg, int64_t rank) const {
    return rank * heads[seg] / num_ranks;
  }

  // First fused column of a segment; `seg == num_segments` gives C.
  JU_HD constexpr int64_t fused_begin(int64_t seg) const {
    int64_t sum = 0;
    for (int64_t i = 0; i < seg; ++i) sum += heads[i];
    return sum * head_dim;
  }
  JU_HD constexpr int64_t fused_columns() const { return fused_begin(num_segments); }

  // First packed column of a segment; `seg == num_segments` gives the packed width of a rank.
  JU_HD constexpr int64_t packed_begin(int64_t seg) const {
    int64_t sum = 0;
    for (int64_t i = 0; i < seg; ++i) sum += local_heads(i);
    return sum * head_dim;
  }
  JU_HD constexpr int64_t packed_columns() const { return packed_begin(num_segments); }

  // Columns of segment `seg` on every rank.
  JU_HD constexpr int64_t segment_columns(int64_t seg) const { return local_heads(seg) * head_dim; }

  // Fused column where the block of segment `seg` for `rank` begins; its segment_columns(seg)
  // columns are contiguous there.
  JU_HD constexpr int64_t fused_block_begin(int64_t seg, int64_t rank) const {
    return fused_begin(seg) + first_head(seg, rank) * head_dim;
  }

  JU_HD constexpr int64_t SegmentOfPacked(int64_t packed_column) const {
    int64_t seg = 0;
    int64_t end = segment_columns(0);
    while (seg < kMaxSegments - 1 && packed_column >= end) end += segment_columns(++seg);
    return seg;
  }

  JU_HD constexpr int64_t PackedToFused(int64_t rank, int64_t packed_column) const {
    const int64_t seg = SegmentOfPacked(packed_column);
    return fused_block_begin(seg, rank) + (packed_column - packed_begin(seg));
  }

  JU_HD constexpr ColumnOwner Owner(int64_t fused_column) const {
    int64_t seg = 0;
    int64_t begin = 0;
    while (seg < kMaxSegments - 1 && fused_column >= begin + heads[seg] * head_dim) {
      begin += heads[seg++] * head_dim;
    }
    const int64_t head = (fused_column - begin) / head_dim;
    const int64_t lane = (fused_column - begin) % head_dim;
    const int64_t local = local_heads(seg);
    const int64_t copies = replicas(seg);
    // With replicas local == 1, so both cases are one formula.
    return {seg, head, head / local * copies, copies,
            packed_begin(seg) + head % local * head_dim + lane};
  }

  // Elements that a rank receives from each other rank: B*T rows of its packed width.
  JU_HD constexpr int64_t block_elements(int64_t batch) const {
    return batch * local_tokens * packed_columns();
  }
};

// Index of the block of rank `other` among the P-1 remote blocks of rank `rank`.
JU_HD constexpr int64_t RemoteBlockIndex(int64_t rank, int64_t other, int64_t num_ranks) {
  return (other - rank + num_ranks) % num_ranks - 1;
}

}  // namespace jax_ulysses

#endif  // JAX_ULYSSES_LAYOUT_HEAD_EXCHANGE_H_
