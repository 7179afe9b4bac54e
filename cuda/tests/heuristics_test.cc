// SPDX-License-Identifier: Apache-2.0
// What a call gets, by arithmetic on its shape: tiles, column blocks, windows, CTAs that push.
#include "jax_ulysses/heuristics.h"

#include "check.h"

namespace jax_ulysses {
namespace {

// Blocks are narrow where that pads less.
void TestBlockColumns() {
  auto columns = [](std::initializer_list<int64_t> heads, int64_t head_dim, bool transposed) {
    HeadExchange ex;
    ex.num_ranks = 8;
    ex.local_tokens = 512;
    ex.head_dim = head_dim;
    for (int64_t h : heads) ex.heads[ex.num_segments++] = h;
    return BlockColumns(MakeGeometry(ex, 0, 1), transposed, 256);
  };
  JU_CHECK(columns({64, 8, 8}, 64, false) == 64);  // 512, 64 and 64 columns a rank
  JU_CHECK(columns({64, 8, 8}, 64, true) == 128);  // with w [N,K] it is as it is
  JU_CHECK(columns({64, 16, 16}, 64, false) == 128);
  JU_CHECK(columns({8, 8, 8}, 192, false) == 64);  // 3 * 64 instead of 2 * 128
  JU_CHECK(columns({8, 8, 8}, 80, false) == 128);  // 2 * 64 are no less
  JU_CHECK(columns({8, 8, 8}, 128, false) == 128);
  JU_CHECK(BlockColumns(Geometry{}, false, 192) == 64 &&
           BlockColumns(Geometry{}, false, 128) == 128);
}

// The tile choice: whole waves of whole tiles.
void TestHeuristics() {
  auto all = [](TilePolicy) { return true; };
  auto make = [](int64_t rows, int64_t columns, int64_t blocks, int64_t depth = 5120) {
    TileProblem problem;
    problem.rows = rows;
    problem.depth = depth;
    problem.num_kinds = 1;
    problem.columns[0] = columns;
    problem.blocks[0] = blocks;
    return problem;
  };
  // Blocks of 128 columns are put together.
  JU_CHECK(ChooseTile(make(8192, 128, 24), 132, all) == TilePolicy::k128x256);
  // One row block of 128 leaves half of a cluster without work.
  JU_CHECK(ChooseTile(make(128, 65536, 1), 132, all) == TilePolicy::k64x128);
  JU_CHECK(ChooseTile(make(256, 65536, 1), 132, all) == TilePolicy::k128x256);
  // A single CTA is no cluster.
  JU_CHECK(ChooseTile(make(16384, 8192, 1), 1, all) == TilePolicy::kAuto);
  // Fewer tiles than CTAs: smaller ones keep more of them busy.
  JU_CHECK(ChooseTile(make(128, 8192, 1), 132, all) == TilePolicy::k64x128);
  JU_CHECK(ChooseTile(make(512, 4096, 1), 132, all) == TilePolicy::k128x128);
  JU_CHECK(ChooseTile(make(512, 6144, 1), 132, all) == TilePolicy::k128x192);  // 128, one wave
  JU_CHECK(ChooseTile(make(512, 7168, 1), 132, all) == TilePolicy::k128x256);  // 112, one wave
  // Two and a half waves: smaller ones waste less of the last.
  JU_CHECK(ChooseTile(make(2048, 5120, 1), 132, all) == TilePolicy::k128x128);
  // Half of the rows of a tile would be empty.
  JU_CHECK(ChooseTile(make(64, 65536, 1), 132, all) == TilePolicy::k64x128);
  // Large and even: the first.
  JU_CHECK(ChooseTile(make(16384, 8192, 1, 8192), 132, all) == TilePolicy::k128x256);
  // The less there is to multiply, the more an epilogue counts that the tensor cores wait for; but
  // not where ranks share a device.
  JU_CHECK(ChooseTile(make(16384, 8192, 1, 2048), 132, all) == TilePolicy::k128x128);
  JU_CHECK(ChooseTile(make(1024, 4096, 1, 3072), 132, all) == TilePolicy::k128x128);
  JU_CHECK(ChooseTile(make(1024, 4096, 1, 5120), 132, all) == TilePolicy::k128x256);
  JU_CHECK(ChooseTile(make(8192, 8192, 1, 2048), 66, all) == TilePolicy::k128x256);
  // Only what is compiled.
  auto small = [](TilePolicy p) { return p == TilePolicy::k128x128; };
  JU_CHECK(ChooseTile(make(16384, 8192, 1), 132, small) == TilePolicy::k128x128);
  JU_CHECK(ChooseTile(make(1, 8, 1), 1, [](TilePolicy) { return false; }) == TilePolicy::kAuto);
  JU_CHECK(NumUnits(make(300, 300, 2), kTileShapes[0]) == 2 * 3);  // of 3 x 6 blocks
  JU_CHECK(NumUnits(make(300, 300, 3), kTileShapes[0]) == 2 * 5);  // of 3 x 9
  JU_CHECK(NumUnits(make(300, 300, 3), kTileShapes[1]) == 2 * 5);  // of 3 x 15 narrow ones
  JU_CHECK(NumUnits(make(300, 300, 3), kTileShapes[2]) == 2 * 9);
  JU_CHECK(NumUnits(make(300, 300, 3), kTileShapes[3]) == 3 * 9);
  TileProblem narrow = make(300, 64, 5);
  narrow.narrow = true;
  JU_CHECK(NumUnits(narrow, kTileShapes[0]) == 2 * 2);  // of 3 x 5 blocks, four a tile
  JU_CHECK(NumUnits(narrow, kTileShapes[1]) == 2 * 2);  // three
  JU_CHECK(NumUnits(narrow, kTileShapes[2]) == 2 * 3);
  JU_CHECK(DefaultCommCtas(A2aGemmCall(), 132) == 33 && DefaultCommCtas(A2aGemmCall(), 16) == 16);
  JU_CHECK(DefaultCommCtas(GemmA2aCall(), 132) == 132);
  // Windows: eight units wide, at least a unit and at most kWindowRows high.
  JU_CHECK(WindowRows(16, 2, 128) == 256 && WindowRows(32, 2, 128) == 512);
  JU_CHECK(WindowRows(132, 2, 128) == 512 && WindowRows(2, 2, 128) == 256);
  JU_CHECK(WindowRows(16, 1, 128) == 256 && WindowRows(132, 1, 128) == 512);
  JU_CHECK(WindowRows(1, 1, 128) == 128);
  JU_CHECK(WindowRows(16, 1, 64) == 128 && WindowRows(132, 1, 64) == 512);
}

}  // namespace
}  // namespace jax_ulysses

int main() {
  jax_ulysses::TestBlockColumns();
  jax_ulysses::TestHeuristics();
  return jax_ulysses::testing::Finish("heuristics_test");
}
