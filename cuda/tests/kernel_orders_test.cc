// SPDX-License-Identifier: Apache-2.0
// The work lists of the kernels, without a GPU: everything is made, pushed and pulled exactly once,
// and what is waited for is what is raised.
#include <set>
#include <tuple>

#include "check.h"
#include "jax_ulysses/exchange/geometry.h"
#include "jax_ulysses/exchange/pull.h"
#include "jax_ulysses/exchange/push.h"
#include "jax_ulysses/exchange/sum_gathered.h"
#include "jax_ulysses/heuristics.h"

namespace jax_ulysses {
namespace {

HeadExchange Make(int64_t ranks, int64_t tokens, std::initializer_list<int64_t> heads,
                  int64_t head_dim, bool zigzag) {
  HeadExchange ex;
  ex.num_ranks = ranks;
  ex.head_dim = head_dim;
  ex.token_order = zigzag ? TokenOrder::kZigzag : TokenOrder::kContiguous;
  ex.local_tokens = tokens;
  for (int64_t h : heads) ex.heads[ex.num_segments++] = h;
  return ex;
}

// Geometry says the same as HeadExchange and TokenMap.
void TestGeometry(const HeadExchange& ex, int64_t batch) {
  for (int rank = 0; rank < ex.num_ranks; ++rank) {
    const Geometry g = MakeGeometry(ex, rank, batch);
    JU_CHECK(g.fused_columns == ex.fused_columns());
    for (int seg = 0; seg < g.num_segments; ++seg) {
      for (int r = 0; r < g.num_ranks; ++r) {
        JU_CHECK(g.block_begin(seg, r) == ex.fused_block_begin(seg, r));
      }
    }
    for (int32_t row = 0; row < g.rows; ++row) {
      const RowSpan span = g.HeadShardRows(rank, row);
      const int64_t b = row / ex.local_tokens, t = row % ex.local_tokens;
      JU_CHECK(span.begin == b * ex.local_tokens * ex.num_ranks + ex.tokens().GlobalRow(rank, t));
      JU_CHECK(span.length >= 1 && t % g.run_rows + span.length == g.run_rows);
    }
  }
}

void TestTiles(const HeadExchange& ex, int64_t batch, const TileShape& tile,
               int32_t block_columns) {
  const int32_t parts = tile.columns / block_columns;
  for (int rank = 0; rank < ex.num_ranks; ++rank) {
    const Geometry g = MakeGeometry(ex, rank, batch);
    const TileOrder order =
        TileOrder::Make(g, tile.rows, tile.columns, block_columns, tile.cluster);
    std::set<std::tuple<int, int, int, int>> made;  // segment, block, row block, column block
    std::set<std::tuple<int, int>> raised;          // dest, flag
    int empty = 0;
    for (int32_t i = 0; i < order.num_units; ++i) {
      for (int32_t cta = 0; cta < tile.cluster; ++cta) {
        for (int32_t part = 0; part < parts; ++part) {
          const TileOrder::Part first = order.At(g, i, 0, part);
          const TileOrder::Part p = order.At(g, i, cta, part);
          // CTAs of a cluster share the columns.
          JU_CHECK(p.row_block == first.row_block + cta && p.seg == first.seg);
          JU_CHECK(p.dest == first.dest && p.col_block == first.col_block);
          JU_CHECK(p.row_block == order.At(g, i, cta, 0).row_block);
          JU_CHECK(p.col_block < order.col_blocks[p.seg]);
          JU_CHECK(p.empty || p.row_block < order.row_blocks);
          empty += p.empty;
          if (p.empty) continue;
          JU_CHECK(made.insert({p.seg, g.block(p.seg, p.dest), p.row_block, p.col_block}).second);
          JU_CHECK(order.SegmentOf(p.flag % order.all_col_blocks) == p.seg);
          JU_CHECK(p.flag / order.all_col_blocks == p.row_block);
          JU_CHECK(p.flag < order.num_flags());
          const int owner = p.dest / g.replicas[p.seg] * g.replicas[p.seg];
          for (int d = owner; d < owner + g.replicas[p.seg]; ++d) {
            JU_CHECK(raised.insert({d, p.flag}).second);
          }
        }
      }
    }
    // Every rank finds every flag that it can wait for.
    JU_CHECK(static_cast<int>(raised.size()) == ex.num_ranks * order.num_flags());
    // No more than what fills up the last row and the last column of units.
    const int columns = static_cast<int>(made.size()) / order.row_blocks;
    const int all =
        static_cast<int>(RoundUp(order.row_blocks, tile.cluster) * RoundUp(columns, parts));
    JU_CHECK(empty == all - static_cast<int>(made.size()));
  }
}

// Units of the other operator: every tile once, the CTAs of a cluster one below the other.
void TestOutputTiles() {
  for (int32_t cluster : {1, 2}) {
    for (int32_t rows : {1, 2, 3, 4, 5, 8, 11}) {
      for (int32_t columns : {1, 3, 16}) {
        const OutputTiles tiles = {rows, columns, 4, cluster};
        std::set<std::tuple<int, int>> made;
        for (int32_t i = 0; i < tiles.num_units(); ++i) {
          const OutputTiles::Tile first = tiles.At(i, 0);
          JU_CHECK(first.row_block % cluster == 0 && first.row_block < rows);
          for (int32_t cta = 0; cta < cluster; ++cta) {
            const OutputTiles::Tile t = tiles.At(i, cta);
            JU_CHECK(t.row_block == first.row_block + cta && t.col_block == first.col_block);
            JU_CHECK(t.col_block < columns && made.insert({t.row_block, t.col_block}).second);
          }
        }
        JU_CHECK(static_cast<int32_t>(made.size()) == (rows + rows % cluster) * columns);
      }
    }
  }
}

void TestPulls(const HeadExchange& ex, int64_t batch) {
  for (int rank = 0; rank < ex.num_ranks; ++rank) {
    const Geometry g = MakeGeometry(ex, rank, batch);
    const int32_t pieces = static_cast<int32_t>(CeilDiv(g.rows, kPieceRows));
    for (bool in_place : {false, true}) {
      std::set<std::tuple<int, int>> pulled;
      bool own = false;
      for (int seg = 0; seg < g.num_segments; ++seg) {
        own = own || PullOrder::Pulls(g, rank, seg, in_place);
      }
      for (int32_t i = 0; i < PullOrder::num_items(g, in_place); ++i) {
        const PullOrder::Item item = PullOrder::At(g, i);
        JU_CHECK(item.piece < pieces && (own || item.source != rank));
        JU_CHECK(pulled.insert({item.source, item.piece}).second);
      }
      JU_CHECK(static_cast<int>(pulled.size()) == pieces * (g.num_ranks - 1 + own));
    }
    for (int32_t first_step : {0, 1}) {
      const PushOrder order = {g.num_ranks, g.rank, g.rows, first_step};
      std::set<std::tuple<int, int>> pushed;
      for (int32_t i = 0; i < order.num_items(); ++i) {
        const PushOrder::Item item = order.At(i);
        JU_CHECK(item.dest >= 0 && item.dest < g.num_ranks && item.piece < pieces);
        JU_CHECK(first_step == 0 || item.dest != rank);
        JU_CHECK(pushed.insert({item.dest, item.piece}).second);
      }
      JU_CHECK(static_cast<int>(pushed.size()) == (g.num_ranks - first_step) * pieces);
    }
  }
}

// Every item is pushed by one CTA, in order; the head by all of them.
void TestPushShares() {
  for (int32_t ctas : {1, 16, 66, 132}) {
    for (int32_t comm : {1, 5, 16, 44, 132}) {
      for (int32_t head : {0, 30, 500}) {
        constexpr int32_t kItems = 300;
        std::set<int32_t> pushed;
        for (int32_t cta = 0; cta < ctas; ++cta) {
          const int32_t workers = comm < ctas ? comm : ctas;
          PushShare share = PushShare::Make(head, cta, ctas, workers);
          const bool rest = CommWorker::Of(cta, ctas, workers).communicates;
          int32_t last = -1;
          for (int32_t i = share.Next(head, kItems); i >= 0; i = share.Next(head, kItems)) {
            JU_CHECK(i > last && i < kItems && (i < head || rest) && pushed.insert(i).second);
            last = i;
          }
        }
        JU_CHECK(pushed.size() == kItems);
      }
    }
  }
}

// What is added up at a time fits into a tile, and every worker has several items wherever there
// are enough of them.
void TestJoinedPieces() {
  for (int32_t pieces : {1, 3, 32, 512, 4096}) {
    for (int32_t blocks : {1, 4}) {
      for (int32_t workers : {1, 16, 132}) {
        const int32_t join = JoinedPieces(pieces, blocks, workers);
        JU_CHECK(join == 1 || join == 2 || join == 4);
        JU_CHECK(join * kPieceRows <= 64);
        JU_CHECK(join == 1 || blocks * (pieces / join) >= 4 * workers);
        if (pieces * blocks >= 32 * workers) JU_CHECK(join == 4);
      }
    }
  }
}

}  // namespace
}  // namespace jax_ulysses

int main() {
  using namespace jax_ulysses;
  for (int64_t ranks : {1, 2, 4, 8}) {
    for (int64_t tokens : {2, 6, 130, 512, 1000, 1408}) {
      for (bool zigzag : {false, true}) {
        for (int64_t batch : {1, 2, 3}) {
          for (const HeadExchange& ex :
               {Make(ranks, tokens, {16}, 64, zigzag), Make(ranks, tokens, {16, 8, 8}, 128, zigzag),
                Make(ranks, tokens, {16, 1, 1}, 80, zigzag),
                Make(ranks, tokens, {16, 2, 8}, 96, zigzag)}) {
            TestGeometry(ex, batch);
            for (const TileShape& tile : kTileShapes) {
              for (int32_t block_columns : {kBlockColumns / 2, kBlockColumns}) {
                if (tile.columns % block_columns == 0) TestTiles(ex, batch, tile, block_columns);
              }
            }
            TestPulls(ex, batch);
          }
        }
      }
    }
  }
  TestOutputTiles();
  TestPushShares();
  TestJoinedPieces();
  return testing::Finish("kernel_orders_test");
}
