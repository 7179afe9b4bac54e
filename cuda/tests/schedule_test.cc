// SPDX-License-Identifier: Apache-2.0
// Work lists: every element of every block exactly once, and the order that the protocol's
// overlap relies on.
#include <map>
#include <set>
#include <vector>

#include "check.h"
#include "jax_ulysses/schedule/a2a_gemm_pieces.h"
#include "jax_ulysses/schedule/gemm_a2a_tiles.h"

namespace jax_ulysses {
namespace {

HeadExchange Exchange(int64_t ranks, std::vector<int64_t> heads, int64_t dim, int64_t t) {
  HeadExchange ex;
  ex.num_ranks = ranks;
  ex.head_dim = dim;
  ex.local_tokens = t;
  ex.num_segments = static_cast<int64_t>(heads.size());
  for (size_t i = 0; i < heads.size(); ++i) ex.heads[i] = heads[i];
  return ex;
}

bool Same(const GemmTile& a, const GemmTile& b) {
  return a.source == b.source && a.dest == b.dest && a.segment == b.segment &&
         a.row_begin == b.row_begin && a.rows == b.rows && a.packed_begin == b.packed_begin &&
         a.fused_begin == b.fused_begin && a.cols == b.cols && a.flag == b.flag;
}

void CheckTiles(const HeadExchange& ex, int64_t batch, int64_t tile_rows, int64_t tile_cols,
                int64_t window) {
  const int64_t ranks = ex.num_ranks;
  const int64_t rows = batch * ex.local_tokens;
  const int64_t packed = ex.packed_columns();
  // made[dest][source]: the tiles in the order in which source makes them.
  std::vector<std::vector<std::vector<GemmTile>>> made(ranks,
                                                       std::vector<std::vector<GemmTile>>(ranks));
  for (int64_t rank = 0; rank < ranks; ++rank) {
    const GemmA2aTiles tiles(ex, rank, batch, tile_rows, tile_cols, window);
    std::vector<std::vector<int>> seen(ranks, std::vector<int>(rows * packed, 0));
    int64_t previous_step = 0;
    for (int64_t i = 0; i < tiles.num_tiles(); ++i) {
      const GemmTile tile = tiles.Made(i);
      JU_CHECK(tile.source == rank && tile.rows > 0 && tile.cols > 0);
      JU_CHECK(tile.flag >= 0 && tile.flag < tiles.tiles_per_dest());
      // Destinations rotate from the next rank; the own block, step P, is last.
      const int64_t step = tile.dest == rank ? ranks : (tile.dest - rank + ranks) % ranks;
      JU_CHECK(step == previous_step || step == previous_step + 1);
      previous_step = step;
      for (int64_t c = 0; c < tile.cols; ++c) {
        // Contiguous in the fused matrix, within one destination and one segment.
        JU_CHECK(ex.PackedToFused(tile.dest, tile.packed_begin + c) == tile.fused_begin + c);
        JU_CHECK(ex.SegmentOfPacked(tile.packed_begin + c) == tile.segment);
        for (int64_t r = 0; r < tile.rows; ++r) {
          ++seen[tile.dest][(tile.row_begin + r) * packed + tile.packed_begin + c];
        }
      }
      made[tile.dest][rank].push_back(tile);
    }
    JU_CHECK(tiles.num_tiles() == 0 || previous_step == ranks);
    for (const auto& block : seen) {
      for (int count : block) JU_CHECK(count == 1);
    }
  }
  for (int64_t rank = 0; rank < ranks; ++rank) {
    const GemmA2aTiles tiles(ex, rank, batch, tile_rows, tile_cols, window);
    std::vector<size_t> next(ranks, 0);
    std::vector<std::set<int64_t>> flags(ranks);
    int64_t previous_step = 0;
    for (int64_t i = 0; i < tiles.num_pulls(); ++i) {
      const GemmTile tile = tiles.Pulled(i);
      JU_CHECK(tile.dest == rank && tile.source != rank);
      // The nearest source below comes first: it makes this rank's block first.
      const int64_t step = (rank - tile.source + ranks) % ranks;
      JU_CHECK(step == previous_step || step == previous_step + 1);
      previous_step = step;
      JU_CHECK(flags[tile.source].insert(tile.flag).second);
      const auto& order = made[rank][tile.source];
      JU_CHECK(next[tile.source] < order.size());
      JU_CHECK(Same(tile, order[next[tile.source]++]));
    }
    for (int64_t source = 0; source < ranks; ++source) {
      JU_CHECK(source == rank || next[source] == made[rank][source].size());
    }
  }
}

void CheckPieces(int64_t ranks, int64_t rows, int64_t block_rows, int64_t piece_rows,
                 int64_t window) {
  for (int64_t rank = 0; rank < ranks; ++rank) {
    const A2aGemmPieces pieces(ranks, rank, rows, block_rows, piece_rows, window);
    std::vector<std::vector<int>> seen(ranks, std::vector<int>(rows, 0));
    std::map<std::pair<int64_t, int64_t>, int64_t> arrivals;
    int64_t previous_window = 0;
    int64_t previous_step = 0;
    for (int64_t i = 0; i < pieces.num_pieces(); ++i) {
      const Piece piece = pieces.Pushed(i);
      JU_CHECK(piece.dest != rank && piece.rows > 0 && piece.rows <= piece_rows);
      // A piece lies in one row block.
      JU_CHECK(piece.row_begin / block_rows == piece.block);
      JU_CHECK((piece.row_begin + piece.rows - 1) / block_rows == piece.block);
      for (int64_t r = 0; r < piece.rows; ++r) ++seen[piece.dest][piece.row_begin + r];
      ++arrivals[{piece.dest, piece.block}];
      // Windows in order; inside a window the rank that needs this one first is served first.
      const int64_t in_window = piece.block / window;
      JU_CHECK(in_window >= previous_window);
      const int64_t step = (rank - piece.dest + ranks) % ranks;
      JU_CHECK(in_window > previous_window ? step == 1 : step - previous_step <= 1);
      JU_CHECK(in_window > previous_window || step >= previous_step);
      previous_window = in_window;
      previous_step = step;
      // dest consumes this rank at position `step` of its K order.
      const A2aGemmPieces other(ranks, piece.dest, rows, block_rows, piece_rows, window);
      JU_CHECK(other.KSource(step) == rank);
    }
    for (int64_t dest = 0; dest < ranks; ++dest) {
      for (int64_t r = 0; r < rows; ++r) JU_CHECK(seen[dest][r] == (dest == rank ? 0 : 1));
      for (int64_t b = 0; dest != rank && b < pieces.num_blocks(); ++b) {
        JU_CHECK((arrivals[{dest, b}] == pieces.pieces_in_block(b)));
      }
    }
    JU_CHECK(pieces.KSource(0) == rank);
    std::set<int64_t> sources;
    for (int64_t p = 0; p < ranks; ++p) sources.insert(pieces.KSource(p));
    JU_CHECK(static_cast<int64_t>(sources.size()) == ranks);
    for (int64_t count = 1; count <= ranks; ++count) {
      if (ranks % count != 0) continue;
      for (int64_t first = 0; first < ranks; first += count) {
        const int64_t at = pieces.GroupReadyAt(first, count);
        std::set<int64_t> until;
        for (int64_t p = 0; p <= at; ++p) until.insert(pieces.KSource(p));
        bool all = true;
        for (int64_t i = 0; i < count; ++i) all = all && until.count(first + i) == 1;
        JU_CHECK(all);
        until.erase(pieces.KSource(at));
        bool before = true;
        for (int64_t i = 0; i < count; ++i) before = before && until.count(first + i) == 1;
        JU_CHECK(!before);
      }
    }
  }
}

void CheckAll() {
  for (int64_t ranks : {1, 2, 3, 4, 5, 8}) {
    for (int64_t t : {0, 1, 5, 16, 37}) {
      for (int64_t window : {1, 2, 4, 100}) {
        CheckTiles(Exchange(ranks, {2 * ranks, ranks, 1}, 5, t), 2, 8, 4, window);
        CheckTiles(Exchange(ranks, {ranks}, 3, t), 1, 4, 64, window);
      }
    }
    for (int64_t rows : {0, 1, 15, 16, 17, 100, 129}) {
      for (int64_t window : {1, 2, 4}) {
        CheckPieces(ranks, rows, 32, 16, window);
        CheckPieces(ranks, rows, 16, 16, window);
      }
    }
  }
}

static_assert(GemmA2aTiles(HeadExchange{1, 1, TokenOrder::kContiguous, 8, 1, {1}}, 0, 1, 4, 1, 1)
                  .num_tiles() == 2);
static_assert(A2aGemmPieces(8, 3, 256, 128, 16, 4).Pushed(0).dest == 2);

}  // namespace
}  // namespace jax_ulysses

int main() {
  jax_ulysses::CheckAll();
  return jax_ulysses::testing::Finish("schedule_test");
}
