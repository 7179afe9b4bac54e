// SPDX-License-Identifier: Apache-2.0
// The pieces of the plain exchange: how large they are, and in which order a rank sends them and
// copies them out.
#ifndef JAX_ULYSSES_EXCHANGE_EXCHANGE_ORDER_H_
#define JAX_ULYSSES_EXCHANGE_EXCHANGE_ORDER_H_

#include "jax_ulysses/base.h"
#include "jax_ulysses/exchange/output_tiles.h"

namespace jax_ulysses {

// A piece is some rows of all segments and has one flag. Raising it costs a fence, and waiting for
// it another; but what is under way in all warps is copied out only when the last of it has been
// sent, and a call of few bytes has work for many warps. A power of two, because the rows of most
// segments then fill the stages of a ring. Every rank must get the same number: it depends on
// nothing but shapes and the layout of the heap.
inline constexpr int64_t kSmallestPiece = 16384;  // bytes
inline constexpr int64_t kLargestPiece = 65536;
inline constexpr int64_t kFewestPieces = 16;  // where they are not the smallest

JU_HD constexpr int32_t ExchangePieceRows(int64_t num_ranks, int64_t rows, int64_t row_bytes,
                                          int64_t num_flags) {
  const int64_t sent = (num_ranks - 1) * rows * row_bytes;
  const int64_t bytes = Max(kSmallestPiece, Min(kLargestPiece, sent / kFewestPieces));
  int64_t piece = 1;
  // The pieces grow until the flags suffice.
  while (2 * piece * row_bytes <= bytes || CeilDiv(rows, piece) > num_flags) piece *= 2;
  return static_cast<int32_t>(piece);
}

// What the warps of a CTA do. Stores that back up on a full link block all bulk copies of their SM,
// so where there are many CTAs half of them only send and the others only copy out. Where there are
// few, the rank has no more than a part of a GPU, and each does both.
struct ExchangeRole {
  int32_t senders = 0;    // warps of this CTA, the first ones
  int32_t receivers = 0;  // those behind them
  int32_t index = 0;      // of the CTA among those of its kind
  int32_t ctas = 1;       // of its kind

  // CTAs of `ctas` that send.
  JU_HD static constexpr int32_t SendingCtas(int32_t ctas) { return ctas < 100 ? ctas : ctas / 2; }
  JU_HD static constexpr ExchangeRole Of(int32_t cta, int32_t ctas, int32_t sending, int32_t warps,
                                         int32_t senders) {
    if (sending == ctas) return {senders, warps - senders, cta, ctas};
    const CommWorker sender = CommWorker::Of(cta, ctas, sending);
    if (sender.communicates) return {senders, 0, sender.index, sending};
    return {0, warps, cta - sender.index, ctas - sending};
  }
  // Consecutive items go to different CTAs, which spreads them over the memory system.
  JU_HD constexpr int32_t Worker(int32_t warp) const { return warp * ctas + index; }
};

// All destinations of a piece, then the next piece. Rank r serves r, r-1, r-2, ... and is served by
// r, r+1, r+2, ...: at each step every rank sends to another one.
struct ExchangeOrder {
  int32_t num_ranks;
  int32_t rank;
  int32_t num_pieces;
  int32_t first_step;  // 0: the own block goes through the slot too; 1: it is read in place

  struct Item {
    int32_t rank;
    int32_t piece;
  };

  JU_HD constexpr int32_t num_sent() const { return (num_ranks - first_step) * num_pieces; }
  JU_HD constexpr Item Sent(int32_t index) const {
    const int32_t piece = index / (num_ranks - first_step);
    const int32_t dest = rank - Step(index, piece);
    return {dest < 0 ? dest + num_ranks : dest, piece};
  }
  // The own block, if it is read in place, comes first: it is there.
  JU_HD constexpr int32_t num_received() const { return num_ranks * num_pieces; }
  JU_HD constexpr Item Received(int32_t index) const {
    const int32_t own = first_step * num_pieces;
    if (index < own) return {rank, index};
    const int32_t piece = (index - own) / (num_ranks - first_step);
    const int32_t source = rank + Step(index - own, piece);
    return {source < num_ranks ? source : source - num_ranks, piece};
  }

 private:
  JU_HD constexpr int32_t Step(int32_t index, int32_t piece) const {
    return first_step + index - piece * (num_ranks - first_step);
  }
};

}  // namespace jax_ulysses

#endif  // JAX_ULYSSES_EXCHANGE_EXCHANGE_ORDER_H_
