// SPDX-License-Identifier: Apache-2.0
// The mapping of a call in the 32-bit form that kernels use (a 64-bit division costs about 100
// instructions there). Built from HeadExchange, which is where the rules are.
#ifndef JAX_ULYSSES_EXCHANGE_GEOMETRY_H_
#define JAX_ULYSSES_EXCHANGE_GEOMETRY_H_

#include "jax_ulysses/base.h"
#include "jax_ulysses/layout/head_exchange.h"

namespace jax_ulysses {

// Segments of one fused call; bounds the tensor maps in the kernel parameters.
inline constexpr int kMaxFusedSegments = 4;

// Rows that are sent, or pulled, at a time. A piece that is pushed has one flag.
inline constexpr int32_t kPieceRows = 16;

// Rows that GEMM and communication walk together before they go on: a panel of w stays in the
// cache, and the sender is never far from what the GEMM waits for.
inline constexpr int32_t kWindowRows = 512;

// Columns that are stored, and announced, at a time: what each CTA of a cluster loads of w. Where
// that pads less, half of them (BlockColumns).
inline constexpr int32_t kBlockColumns = 128;

// Rows that lie side by side in a head shard.
struct RowSpan {
  int32_t begin;   // row of [B*S]
  int32_t length;  // rows from here to the end of the run
};

struct Geometry {
  int32_t num_ranks = 1;
  int32_t rank = 0;
  int32_t tokens = 0;    // T
  int32_t rows = 0;      // B*T
  int32_t run_rows = 0;  // T, or T/2 in zigzag order
  int32_t zigzag = 0;
  int32_t fused_columns = 0;  // C
  int32_t num_segments = 0;
  int32_t columns[kMaxFusedSegments] = {};      // of a segment on every rank
  int32_t fused_begin[kMaxFusedSegments] = {};  // of a segment
  int32_t replicas[kMaxFusedSegments] = {};     // ranks that share a block

  // A segment is cut into blocks of columns[seg] columns; `rank` holds this one.
  JU_HD constexpr int32_t block(int seg, int32_t rank_) const { return rank_ / replicas[seg]; }
  JU_HD constexpr int32_t num_blocks(int seg) const { return num_ranks / replicas[seg]; }
  JU_HD constexpr int32_t block_begin(int seg, int32_t rank_) const {
    return fused_begin[seg] + block(seg, rank_) * columns[seg];
  }
  JU_HD constexpr bool replicated(int seg) const { return replicas[seg] > 1; }

  // Where row `row` of the sequence shard of `owner` lies in a head shard.
  JU_HD constexpr RowSpan HeadShardRows(int32_t owner, int32_t row) const {
    const int32_t batch = rows == tokens ? 0 : row / tokens;
    const int32_t token = row - batch * tokens;
    const bool second = token >= run_rows;
    const int32_t chunk = second ? 2 * num_ranks - 1 - owner : owner;
    const int32_t within = second ? token - run_rows : token;
    return {batch * tokens * num_ranks + chunk * run_rows + within, run_rows - within};
  }

  // True when tiles of `tile_rows` rows never straddle runs, except past the last row of all. Then
  // a rank's own block can be read from, and written to, a head shard in place.
  JU_HD constexpr bool TilesFollowRuns(int32_t tile_rows) const {
    return run_rows % tile_rows == 0 || rows == run_rows;
  }

  // Elements of the slot that one segment needs: every block of every rank, rows side by side.
  JU_HD constexpr int64_t SlotElements(int seg, bool from_sources) const {
    const int64_t blocks = from_sources ? num_ranks : num_blocks(seg);
    return blocks * rows * columns[seg];
  }
};

inline Geometry MakeGeometry(const HeadExchange& exchange, int32_t rank, int64_t batch) {
  Geometry g;
  g.num_ranks = static_cast<int32_t>(exchange.num_ranks);
  g.rank = rank;
  g.tokens = static_cast<int32_t>(exchange.local_tokens);
  g.rows = static_cast<int32_t>(batch * exchange.local_tokens);
  g.zigzag = exchange.token_order == TokenOrder::kZigzag;
  g.run_rows = g.zigzag ? g.tokens / 2 : g.tokens;
  g.fused_columns = static_cast<int32_t>(exchange.fused_columns());
  g.num_segments = static_cast<int32_t>(exchange.num_segments);
  for (int seg = 0; seg < g.num_segments; ++seg) {
    g.columns[seg] = static_cast<int32_t>(exchange.segment_columns(seg));
    g.fused_begin[seg] = static_cast<int32_t>(exchange.fused_begin(seg));
    g.replicas[seg] = static_cast<int32_t>(exchange.replicas(seg));
  }
  return g;
}

}  // namespace jax_ulysses

#endif  // JAX_ULYSSES_EXCHANGE_GEOMETRY_H_
