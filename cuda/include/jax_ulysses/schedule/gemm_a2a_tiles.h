// SPDX-License-Identifier: Apache-2.0
// Work lists of GEMM -> all-to-all: the order in which a rank makes its tiles, and the order in
// which a rank pulls the tiles that others made for it.
//
// Production order of rank r: remote blocks first, destinations r+1, r+2, ... (mod P), the own
// block last. At any moment every rank then works for another destination. The pull list of rank r
// walks sources r-1, r-2, ...: the source at distance d makes r's block as its d-th one, so both
// sides meet in the same order. A tile never straddles destinations, nor segments of one
// destination, so its columns are contiguous in the fused matrix as well as in the packed block.
#ifndef JAX_ULYSSES_SCHEDULE_GEMM_A2A_TILES_H_
#define JAX_ULYSSES_SCHEDULE_GEMM_A2A_TILES_H_

#include "jax_ulysses/base.h"
#include "jax_ulysses/layout/head_exchange.h"

namespace jax_ulysses {

// One tile of the block that `source` makes for `dest`. Rows are flattened (b, t) of the source.
struct GemmTile {
  int64_t source;
  int64_t dest;
  int64_t segment;
  int64_t row_begin;
  int64_t rows;
  int64_t packed_begin;  // first column in the packed block of dest
  int64_t fused_begin;   // first column in the fused matrix
  int64_t cols;
  int64_t flag;  // ready flag of this tile in dest's heap, among those of source
};

class GemmA2aTiles {
 public:
  // `tile_rows` x `tile_cols` tiles; `window_rows_blocks` row blocks are walked for each column
  // block before the next column block, so that a panel of w is used while it is in cache.
  JU_HD constexpr GemmA2aTiles(const HeadExchange& exchange, int64_t rank, int64_t batch,
                               int64_t tile_rows, int64_t tile_cols, int64_t window_row_blocks)
      : exchange_(exchange),
        rank_(rank),
        rows_(batch * exchange.local_tokens),
        tile_rows_(tile_rows),
        tile_cols_(tile_cols),
        window_(window_row_blocks),
        row_blocks_(CeilDiv(batch * exchange.local_tokens, tile_rows)) {
    for (int64_t seg = 0; seg < exchange.num_segments; ++seg) {
      col_blocks_ += CeilDiv(exchange.segment_columns(seg), tile_cols);
    }
  }

  JU_HD constexpr int64_t row_blocks() const { return row_blocks_; }
  JU_HD constexpr int64_t col_blocks() const { return col_blocks_; }
  JU_HD constexpr int64_t tiles_per_dest() const { return row_blocks_ * col_blocks_; }
  JU_HD constexpr int64_t num_tiles() const { return exchange_.num_ranks * tiles_per_dest(); }
  JU_HD constexpr int64_t num_pulls() const { return num_tiles() - tiles_per_dest(); }

  // The index-th tile that this rank makes, index in [0, num_tiles()).
  JU_HD constexpr GemmTile Made(int64_t index) const {
    const int64_t step = index / tiles_per_dest() + 1;
    return TileOf(rank_, (rank_ + step) % exchange_.num_ranks, index % tiles_per_dest());
  }

  // The index-th tile that this rank pulls, index in [0, num_pulls()).
  JU_HD constexpr GemmTile Pulled(int64_t index) const {
    const int64_t step = index / tiles_per_dest() + 1;
    const int64_t source = (rank_ - step + exchange_.num_ranks) % exchange_.num_ranks;
    return TileOf(source, rank_, index % tiles_per_dest());
  }

 private:
  JU_HD constexpr GemmTile TileOf(int64_t source, int64_t dest, int64_t within) const {
    const int64_t per_window = window_ * col_blocks_;
    const int64_t first_row_block = within / per_window * window_;
    const int64_t in_window = within % per_window;
    const int64_t blocks = Min(window_, row_blocks_ - first_row_block);
    const int64_t row_block = first_row_block + in_window % blocks;
    const int64_t col_block = in_window / blocks;
    int64_t seg = 0;
    int64_t first = 0;  // first column block of seg
    while (seg < kMaxSegments - 1 &&
           col_block >= first + CeilDiv(exchange_.segment_columns(seg), tile_cols_)) {
      first += CeilDiv(exchange_.segment_columns(seg), tile_cols_);
      ++seg;
    }
    const int64_t col = (col_block - first) * tile_cols_;
    return {source,
            dest,
            seg,
            row_block * tile_rows_,
            Min(tile_rows_, rows_ - row_block * tile_rows_),
            exchange_.packed_begin(seg) + col,
            exchange_.fused_block_begin(seg, dest) + col,
            Min(tile_cols_, exchange_.segment_columns(seg) - col),
            row_block * col_blocks_ + col_block};
  }

  HeadExchange exchange_;
  int64_t rank_;
  int64_t rows_;
  int64_t tile_rows_;
  int64_t tile_cols_;
  int64_t window_;
  int64_t row_blocks_;
  int64_t col_blocks_ = 0;
};

}  // namespace jax_ulysses

#endif  // JAX_ULYSSES_SCHEDULE_GEMM_A2A_TILES_H_
