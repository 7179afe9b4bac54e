// SPDX-License-Identifier: Apache-2.0
// Work lists of all-to-all -> GEMM: the order in which a rank pushes pieces of rows to its peers,
// and the order in which a GEMM consumes the sources of a row block.
//
// The GEMM of rank r takes its K blocks from sources r, r+1, ..., r+P-1 (mod P): its own first,
// which never waits. Rank s is therefore needed first by rank s-1, then by s-2, ...; the sender
// serves them in that order. Sender and GEMM walk the same windows of row blocks, so that the
// sender is never far from what the GEMM waits for.
#ifndef JAX_ULYSSES_SCHEDULE_A2A_GEMM_PIECES_H_
#define JAX_ULYSSES_SCHEDULE_A2A_GEMM_PIECES_H_

#include "jax_ulysses/base.h"

namespace jax_ulysses {

// Rows [row_begin, row_begin + rows) of the block that this rank sends to `dest`. Rows are
// flattened (b, t) of the destination's shard.
struct Piece {
  int64_t dest;
  int64_t row_begin;
  int64_t rows;
  int64_t block;  // row block, whose counter at dest this piece advances by one
};

class A2aGemmPieces {
 public:
  // `rows` of every block; counters are kept per `block_rows`, a multiple of `piece_rows`.
  JU_HD constexpr A2aGemmPieces(int64_t num_ranks, int64_t rank, int64_t rows, int64_t block_rows,
                                int64_t piece_rows, int64_t window_blocks)
      : num_ranks_(num_ranks),
        rank_(rank),
        rows_(rows),
        block_rows_(block_rows),
        piece_rows_(piece_rows),
        window_rows_(window_blocks * block_rows) {}

  JU_HD constexpr int64_t num_blocks() const { return CeilDiv(rows_, block_rows_); }
  JU_HD constexpr int64_t block_begin(int64_t block) const { return block * block_rows_; }
  JU_HD constexpr int64_t block_size(int64_t block) const {
    return Min(block_rows_, rows_ - block * block_rows_);
  }
  // Arrivals per source that complete a row block.
  JU_HD constexpr int64_t pieces_in_block(int64_t block) const {
    return CeilDiv(block_size(block), piece_rows_);
  }
  JU_HD constexpr int64_t num_pieces() const {
    return (num_ranks_ - 1) * CeilDiv(rows_, piece_rows_);
  }

  // The index-th piece that this rank pushes, index in [0, num_pieces()).
  JU_HD constexpr Piece Pushed(int64_t index) const {
    const int64_t per_window = (num_ranks_ - 1) * (window_rows_ / piece_rows_);
    const int64_t window_begin = index / per_window * window_rows_;
    const int64_t in_window = index % per_window;
    const int64_t pieces = CeilDiv(Min(window_rows_, rows_ - window_begin), piece_rows_);
    const int64_t step = in_window / pieces + 1;
    const int64_t row = window_begin + in_window % pieces * piece_rows_;
    return {(rank_ - step + num_ranks_) % num_ranks_, row, Min(piece_rows_, rows_ - row),
            row / block_rows_};
  }

  // Source of the position-th K block of this rank's GEMM; position 0 is the rank itself.
  JU_HD constexpr int64_t KSource(int64_t position) const {
    return (rank_ + position) % num_ranks_;
  }

  // Position at which the last of ranks [first, first + count) has been consumed: from there on a
  // head that these ranks replicate can be summed.
  JU_HD constexpr int64_t GroupReadyAt(int64_t first, int64_t count) const {
    int64_t last = 0;
    for (int64_t i = 0; i < count; ++i) {
      last = Max(last, (first + i - rank_ + num_ranks_) % num_ranks_);
    }
    return last;
  }

 private:
  int64_t num_ranks_;
  int64_t rank_;
  int64_t rows_;
  int64_t block_rows_;
  int64_t piece_rows_;
  int64_t window_rows_;
};

}  // namespace jax_ulysses

#endif  // JAX_ULYSSES_SCHEDULE_A2A_GEMM_PIECES_H_
