// SPDX-License-Identifier: Apache-2.0
// head_exchange.h against a reference that is written the slow way: it lists, for every rank, the
// global heads and rows that the definition gives it, and searches those lists.
#include "jax_ulysses/layout/head_exchange.h"

#include <vector>

#include "check.h"

namespace jax_ulysses {
namespace {

struct Reference {
  // columns[rank]: fused column of each packed column. rows[rank]: global row of each local row.
  std::vector<std::vector<int64_t>> columns;
  std::vector<std::vector<int64_t>> rows;
  std::vector<int64_t> segment_of_fused;
};

Reference MakeReference(int64_t ranks, const std::vector<int64_t>& heads, int64_t dim, int64_t t,
                        bool zigzag) {
  Reference ref;
  ref.columns.resize(ranks);
  ref.rows.resize(ranks);
  int64_t fused = 0;
  for (size_t seg = 0; seg < heads.size(); ++seg) {
    // Deal the heads out: with M >= P in order, M/P to each rank; else each head to P/M ranks.
    for (int64_t head = 0; head < heads[seg]; ++head) {
      for (int64_t lane = 0; lane < dim; ++lane, ++fused) {
        ref.segment_of_fused.push_back(static_cast<int64_t>(seg));
        for (int64_t rank = 0; rank < ranks; ++rank) {
          const bool holds = heads[seg] >= ranks ? rank == head / (heads[seg] / ranks)
                                                 : head == rank / (ranks / heads[seg]);
          if (holds) ref.columns[rank].push_back(fused);
        }
      }
    }
  }
  if (!zigzag) {
    for (int64_t s = 0; s < ranks * t; ++s) ref.rows[s / t].push_back(s);
  } else {
    const int64_t half = t / 2;
    // Low chunks go up the ranks, high chunks come back down.
    for (int64_t chunk = 0; chunk < 2 * ranks; ++chunk) {
      const int64_t rank = chunk < ranks ? chunk : 2 * ranks - 1 - chunk;
      for (int64_t i = 0; i < half; ++i) ref.rows[rank].push_back(chunk * half + i);
    }
  }
  return ref;
}

void CheckAgainstReference(int64_t ranks, const std::vector<int64_t>& heads, int64_t dim, int64_t t,
                           bool zigzag) {
  HeadExchange ex;
  ex.num_ranks = ranks;
  ex.head_dim = dim;
  ex.local_tokens = t;
  ex.token_order = zigzag ? TokenOrder::kZigzag : TokenOrder::kContiguous;
  ex.num_segments = static_cast<int64_t>(heads.size());
  for (size_t i = 0; i < heads.size(); ++i) ex.heads[i] = heads[i];
  JU_CHECK(ex.Check() == LayoutError::kNone);
  const Reference ref = MakeReference(ranks, heads, dim, t, zigzag);
  JU_CHECK(ex.fused_columns() == static_cast<int64_t>(ref.segment_of_fused.size()));
  std::vector<std::vector<int64_t>> holders(ref.segment_of_fused.size());
  for (int64_t rank = 0; rank < ranks; ++rank) {
    JU_CHECK(ex.packed_columns() == static_cast<int64_t>(ref.columns[rank].size()));
    for (size_t packed = 0; packed < ref.columns[rank].size(); ++packed) {
      const int64_t fused = ref.columns[rank][packed];
      holders[fused].push_back(rank);
      const int64_t column = static_cast<int64_t>(packed);
      JU_CHECK(ex.PackedToFused(rank, column) == fused);
      JU_CHECK(ex.SegmentOfPacked(column) == ref.segment_of_fused[fused]);
      const ColumnOwner owner = ex.Owner(fused);
      JU_CHECK(owner.packed_column == column);
      JU_CHECK(owner.first_rank <= rank && rank < owner.first_rank + owner.replicas);
    }
    // Runs tile the local rows and agree with the row map.
    const TokenMap tokens = ex.tokens();
    JU_CHECK(tokens.IsValid());
    int64_t local = 0;
    for (int i = 0; i < tokens.num_runs(); ++i) {
      const RowRun run = tokens.run(rank, i);
      JU_CHECK(run.local_begin == local);
      for (int64_t j = 0; j < run.length; ++j, ++local) {
        JU_CHECK(ref.rows[rank][local] == run.global_begin + j);
      }
    }
    JU_CHECK(local == t);
    for (int64_t row = 0; row < t; ++row) {
      const int64_t global = ref.rows[rank][row];
      JU_CHECK(tokens.GlobalRow(rank, row) == global);
      const RowOwner owner = tokens.Owner(global);
      JU_CHECK(owner.rank == rank && owner.local_row == row);
    }
  }
  for (size_t fused = 0; fused < holders.size(); ++fused) {
    const ColumnOwner owner = ex.Owner(static_cast<int64_t>(fused));
    JU_CHECK(owner.segment == ref.segment_of_fused[fused]);
    JU_CHECK(owner.replicas == static_cast<int64_t>(holders[fused].size()));
    JU_CHECK(owner.first_rank == holders[fused].front());
  }
}

void CheckAll() {
  const int64_t all_heads[] = {1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32, 40, 48};
  for (int64_t ranks : {1, 2, 3, 4, 5, 6, 7, 8, 10, 16}) {
    for (int64_t n : all_heads) {
      if (n % ranks != 0 && ranks % n != 0) continue;
      for (int64_t k : all_heads) {
        if (k > n || (k % ranks != 0 && ranks % k != 0)) continue;
        for (bool zigzag : {false, true}) {
          for (int64_t t : {0, 1, 2, 6, 7}) {
            if (zigzag && t % 2 != 0) continue;
            CheckAgainstReference(ranks, {n, k, k}, 3, t, zigzag);
          }
        }
      }
      CheckAgainstReference(ranks, {n}, 1, 4, true);
      CheckAgainstReference(ranks, {n}, 8, 5, false);
    }
  }
}

void CheckErrors() {
  HeadExchange ex;
  JU_CHECK(ex.Check() == LayoutError::kSegments);
  ex.num_segments = 2;
  ex.heads[0] = 8;
  ex.heads[1] = 3;
  ex.num_ranks = 4;
  JU_CHECK(ex.Check() == LayoutError::kHeads);
  ex.heads[1] = 2;
  JU_CHECK(ex.Check() == LayoutError::kNone);
  ex.token_order = TokenOrder::kZigzag;
  ex.local_tokens = 5;
  JU_CHECK(ex.Check() == LayoutError::kZigzagOdd);
  ex.local_tokens = -2;
  JU_CHECK(ex.Check() == LayoutError::kTokens);
  ex.local_tokens = 4;
  ex.head_dim = 0;
  JU_CHECK(ex.Check() == LayoutError::kHeadDim);
  ex.head_dim = 1;
  ex.num_ranks = kMaxRanks + 1;
  JU_CHECK(ex.Check() == LayoutError::kNumRanks);
  ex.num_ranks = 4;
  ex.token_order = static_cast<TokenOrder>(2);
  JU_CHECK(ex.Check() == LayoutError::kTokenOrder);
}

// The map is usable in constant expressions, and its sizes are 64-bit: a fused matrix of 2^40
// elements is counted without overflow.
constexpr HeadExchange Large() {
  HeadExchange ex;
  ex.num_ranks = 8;
  ex.head_dim = 256;
  ex.local_tokens = int64_t{1} << 25;
  ex.num_segments = 3;
  ex.heads[0] = 128;
  ex.heads[1] = 8;
  ex.heads[2] = 4;
  return ex;
}
static_assert(Large().Check() == LayoutError::kNone);
static_assert(Large().fused_columns() == (128 + 8 + 4) * 256);
static_assert(Large().packed_columns() == (16 + 1 + 1) * 256);
static_assert(Large().block_elements(16) == 16 * (int64_t{1} << 25) * 18 * 256);
static_assert(Large().PackedToFused(7, 17 * 256) == (128 + 8 + 3) * 256);
static_assert(Large().Owner((128 + 8 + 3) * 256).first_rank == 6);

}  // namespace
}  // namespace jax_ulysses

int main() {
  jax_ulysses::CheckAll();
  jax_ulysses::CheckErrors();
  return jax_ulysses::testing::Finish("head_exchange_test");
}
