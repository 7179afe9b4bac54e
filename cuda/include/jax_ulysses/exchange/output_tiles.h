// SPDX-License-Identifier: Apache-2.0
// The order in which a rank makes the tiles of all-to-all -> GEMM, and which of its CTAs
// communicate.
#ifndef JAX_ULYSSES_EXCHANGE_OUTPUT_TILES_H_
#define JAX_ULYSSES_EXCHANGE_OUTPUT_TILES_H_

#include "jax_ulysses/base.h"

namespace jax_ulysses {

// The CTAs that communicate are spread over those of the rank: worker w is CTA w * ctas / workers.
struct CommWorker {
  int32_t index;
  bool communicates;

  JU_HD static constexpr CommWorker Of(int32_t cta, int32_t ctas, int32_t workers) {
    const int32_t index = (cta * workers + ctas - 1) / ctas;
    return {index, index < workers && index * ctas / workers == cta};
  }
};

// The pieces of one CTA: some of the head, then, if it communicates, some of the rest.
struct PushShare {
  int32_t item;         // the first one
  int32_t head_stride;  // CTAs
  int32_t rest;         // the first one behind the head
  int32_t rest_stride;  // CTAs that communicate; 0: this one does not

  JU_HD static constexpr PushShare Make(int32_t head_items, int32_t cta, int32_t ctas,
                                        int32_t comm_ctas) {
    const CommWorker worker = CommWorker::Of(cta, ctas, comm_ctas);
    return {cta, ctas, head_items + worker.index, worker.communicates ? comm_ctas : 0};
  }
  // The next item, -1 if there is none. Items from num_items on do not exist.
  JU_HD constexpr int32_t Next(int32_t head_items, int32_t num_items) {
    int32_t next = -1;
    if (item < head_items) {
      next = item;
      item += head_stride;
    } else if (rest_stride > 0) {
      next = rest;
      rest += rest_stride;
    }
    return next < num_items ? next : -1;
  }
};

// Tiles of y: windows of rows; in a window column after column, and down each column. A unit is
// what a cluster makes at a time: `cluster_rows` tiles of a column, one a CTA. The last of them may
// lie below the last row, where there is nothing to wait for, to add up or to store.
struct OutputTiles {
  int32_t row_blocks;
  int32_t col_blocks;
  int32_t window_blocks;  // a multiple of cluster_rows
  int32_t cluster_rows;

  struct Tile {
    int32_t row_block;
    int32_t col_block;
  };
  JU_HD constexpr int32_t num_units() const { return row_units() * col_blocks; }
  JU_HD constexpr Tile At(int32_t unit, int32_t cta_in_cluster) const {
    const int32_t window_units = window_blocks / cluster_rows;
    const int32_t window = unit / (window_units * col_blocks);
    unit -= window * window_units * col_blocks;
    const int32_t left = row_units() - window * window_units;
    const int32_t height = left < window_units ? left : window_units;
    const int32_t col_block = unit / height;
    const int32_t row_unit = window * window_units + unit - col_block * height;
    return {row_unit * cluster_rows + cta_in_cluster, col_block};
  }

 private:
  JU_HD constexpr int32_t row_units() const {
    return static_cast<int32_t>(CeilDiv(row_blocks, cluster_rows));
  }
};

}  // namespace jax_ulysses

#endif  // JAX_ULYSSES_EXCHANGE_OUTPUT_TILES_H_
