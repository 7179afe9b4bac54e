// SPDX-License-Identifier: Apache-2.0
// Which tile a call gets and how many CTAs communicate: arithmetic on shapes, the same on every
// rank, testable without a GPU. docs/measurements.md has what is behind the numbers.
#ifndef JAX_ULYSSES_HEURISTICS_H_
#define JAX_ULYSSES_HEURISTICS_H_

#include "jax_ulysses/exchange/geometry.h"
#include "jax_ulysses/exchange/push.h"
#include "jax_ulysses/exchange/tile_order.h"
#include "jax_ulysses/launch.h"

namespace jax_ulysses {

// The CTAs of a cluster make tiles one above the other (gemm/config.h).
struct TileShape {
  TilePolicy policy;
  int32_t rows;
  int32_t columns;
  int32_t cluster;
  // Rate of the matrix products relative to the best tile, and the steps of K that the tensor cores
  // lose to the epilogue: those of two teams that take turns do not wait for it.
  double rate;
  double epilogue_steps;
  // Rate of a full wave, epilogue included, on a part of a device.
  double shared_rate;
};

// Fitted to the GEMM alone on all SMs, 174 shapes: the tile that is taken is 0.5 % slower than the
// fastest, on average. 128x128 reads the most out of L2 and memory: where several ranks have their
// operands in one L2, it loses what it wins by its turns at small K.
inline constexpr TileShape kTileShapes[] = {
    {TilePolicy::k128x256, 128, 256, 2, 1.0, 4, 1.0},
    {TilePolicy::k128x192, 128, 192, 2, 0.98, 4, 0.98},
    {TilePolicy::k128x128, 128, 128, 2, 0.94, 0, 0.98},
    {TilePolicy::k64x128, 64, 128, 2, 0.75, 0, 0.75},
};
// More than half of the largest Hopper device: no other rank has as much.
inline constexpr int32_t kWholeDeviceCtas = 72;

// What a GEMM looks like to the tile choice: `blocks[i]` blocks of `columns[i]` columns, each
// padded to whole column blocks; `narrow`: of half of kBlockColumns, as they always are in a tile
// of no multiple of that.
struct TileProblem {
  int64_t rows = 0;
  int64_t depth = 0;  // K
  bool narrow = false;
  int num_kinds = 0;
  int64_t columns[kMaxFusedSegments] = {};
  int64_t blocks[kMaxFusedSegments] = {};
};

// What clusters make: tiles one above the other. The column blocks of a row are put together as
// they come, across the problem's blocks.
inline int64_t NumUnits(const TileProblem& problem, const TileShape& tile) {
  const bool narrow = problem.narrow || tile.columns % kBlockColumns != 0;
  const int64_t block = narrow ? kBlockColumns / 2 : kBlockColumns;
  int64_t columns = 0;
  for (int i = 0; i < problem.num_kinds; ++i) {
    columns += problem.blocks[i] * RoundUp(problem.columns[i], block);
  }
  return CeilDiv(CeilDiv(problem.rows, tile.rows), tile.cluster) * CeilDiv(columns, tile.columns);
}

// Time of whole waves of whole units, in steps of K of a tile of 128x128.
inline double TileCost(const TileProblem& problem, const TileShape& tile, int32_t ctas) {
  const int64_t waves = CeilDiv(NumUnits(problem, tile), ctas / tile.cluster);
  const double tiles = static_cast<double>(waves * tile.columns * tile.rows) / (128 * 128);
  constexpr int64_t kStep = 64;
  const auto steps = static_cast<double>(CeilDiv(problem.depth, kStep));
  if (ctas < kWholeDeviceCtas) return tiles * steps / tile.shared_rate;
  return tiles * (steps / tile.rate + tile.epilogue_steps);
}

// The cheapest tile; earlier ones win ties. `available(policy)` says what is compiled.
template <class Available>
TilePolicy ChooseTile(const TileProblem& problem, int32_t ctas, Available&& available) {
  TilePolicy best = TilePolicy::kAuto;
  double best_cost = 0;
  for (const TileShape& tile : kTileShapes) {
    if (!available(tile.policy) || ctas < tile.cluster) continue;
    const double cost = TileCost(problem, tile, ctas);
    if (best == TilePolicy::kAuto || cost < best_cost) {
      best = tile.policy;
      best_cost = cost;
    }
  }
  return best;
}

inline TileProblem ProblemOf(const GemmA2aCall& call) {
  const Geometry g = MakeGeometry(call.exchange, call.info.rank, call.batch);
  TileProblem problem;
  problem.rows = g.rows;
  problem.depth = call.depth;
  problem.narrow = BlockColumns(g, call.w_transposed, kBlockColumns) < kBlockColumns;
  problem.num_kinds = g.num_segments;
  for (int seg = 0; seg < g.num_segments; ++seg) {
    problem.columns[seg] = g.columns[seg];
    problem.blocks[seg] = g.num_blocks(seg);
  }
  return problem;
}

inline TileProblem ProblemOf(const A2aGemmCall& call) {
  TileProblem problem;
  problem.rows = call.batch * call.exchange.local_tokens;
  problem.depth = call.exchange.fused_columns();
  problem.num_kinds = 1;
  problem.columns[0] = call.width;
  problem.blocks[0] = 1;
  return problem;
}

// Rows of the windows of a2a_gemm: the fewer, the sooner they have arrived; but what is made at a
// time should be about eight units wide, or the same columns of w are read again and again.
inline int32_t WindowRows(int32_t ctas, int32_t cluster, int32_t tile_rows) {
  const int32_t unit_rows = cluster * tile_rows;
  const int32_t rows = unit_rows * (ctas / cluster / 8);
  return rows < unit_rows     ? unit_rows
         : rows < kWindowRows ? rows / unit_rows * unit_rows
                              : kWindowRows;
}

// CTAs that push. On two H200s over NVLink 22 and 33 of 132 were the best of 16 to 66: fewer do not
// fill the link, and more of them fill its queues, behind which the mainloop's loads then wait.
// Pushing what the first tiles need from all CTAs (LaunchPlan::head_rows) does the same. With a
// smaller budget all take part. Pulls block nothing.
inline constexpr int32_t kPushingCtas = 33;
inline int32_t DefaultCommCtas(const A2aGemmCall&, int32_t ctas) {
  return ctas < kPushingCtas ? ctas : kPushingCtas;
}
inline int32_t DefaultCommCtas(const GemmA2aCall&, int32_t ctas) { return ctas; }

}  // namespace jax_ulysses

#endif  // JAX_ULYSSES_HEURISTICS_H_
