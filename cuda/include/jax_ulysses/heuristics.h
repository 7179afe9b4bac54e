// SPDX-License-Identifier: Apache-2.0
// Which tile a call gets and how many CTAs communicate: arithmetic on shapes, the same on every
// rank, testable without a GPU. docs/kernels.md has the measurements behind the numbers.
#ifndef JAX_ULYSSES_HEURISTICS_H_
#define JAX_ULYSSES_HEURISTICS_H_

#include "jax_ulysses/exchange/geometry.h"
#include "jax_ulysses/launch.h"

namespace jax_ulysses {

struct TileShape {
  TilePolicy policy;
  int32_t rows;
  int32_t columns;
  // Rate of a full wave relative to the best tile.
  double efficiency;
};

inline constexpr TileShape kTileShapes[] = {
    {TilePolicy::k128x256, 128, 256, 1.0},
    {TilePolicy::k256x128, 256, 128, 1.0},
    {TilePolicy::k128x128, 128, 128, 0.93},
};

// What a GEMM looks like to the tile choice: `blocks[i]` column blocks of `columns[i]` columns.
struct TileProblem {
  int64_t rows = 0;
  int num_kinds = 0;
  int64_t columns[kMaxFusedSegments] = {};
  int64_t blocks[kMaxFusedSegments] = {};
};

inline int64_t NumTiles(const TileProblem& problem, const TileShape& tile) {
  int64_t columns = 0;
  for (int i = 0; i < problem.num_kinds; ++i) {
    columns += problem.blocks[i] * CeilDiv(problem.columns[i], tile.columns);
  }
  return CeilDiv(problem.rows, tile.rows) * columns;
}

// Time in units of one CTA and one multiply-add column: whole waves of whole tiles.
inline double TileCost(const TileProblem& problem, const TileShape& tile, int32_t ctas) {
  const int64_t waves = CeilDiv(NumTiles(problem, tile), ctas);
  return static_cast<double>(waves * tile.rows * tile.columns) / tile.efficiency;
}

// The cheapest tile; earlier ones win ties. `available(policy)` says what is compiled.
template <class Available>
TilePolicy ChooseTile(const TileProblem& problem, int32_t ctas, Available&& available) {
  TilePolicy best = TilePolicy::kAuto;
  double best_cost = 0;
  for (const TileShape& tile : kTileShapes) {
    if (!available(tile.policy)) continue;
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
  problem.num_kinds = 1;
  problem.columns[0] = call.width;
  problem.blocks[0] = 1;
  return problem;
}

// CTAs that push. On two H200s over NVLink 33 and 44 of 132 were the best of 10 to 132: fewer do
// not fill the link (a communication warp moves 6 to 9 GB/s), and more of them fill its queues,
// behind which the mainloop's loads then wait. With a smaller budget all take part. Pulls block
// nothing.
inline constexpr int32_t kPushingCtas = 44;
inline int32_t DefaultCommCtas(const A2aGemmCall&, int32_t ctas) {
  return ctas < kPushingCtas ? ctas : kPushingCtas;
}
inline int32_t DefaultCommCtas(const GemmA2aCall&, int32_t ctas) { return ctas; }

}  // namespace jax_ulysses

#endif  // JAX_ULYSSES_HEURISTICS_H_
