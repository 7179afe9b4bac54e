// SPDX-License-Identifier: Apache-2.0
// Which global row a local row of a sequence shard is, and back.
#ifndef JAX_ULYSSES_LAYOUT_TOKEN_ORDER_H_
#define JAX_ULYSSES_LAYOUT_TOKEN_ORDER_H_

#include "jax_ulysses/base.h"

namespace jax_ulysses {

enum class TokenOrder : int32_t {
  kContiguous = 0,  // rank r holds rows [r*T, (r+1)*T)
  kZigzag = 1,      // 2P chunks of T/2 rows; rank r holds chunks r and 2P-1-r, in that order
};

// Rows of a rank that are neighbours in both numberings: local_begin + i is global_begin + i.
struct RowRun {
  int64_t local_begin;
  int64_t global_begin;
  int64_t length;
};

// Position of a global row: the rank that holds it and its row there.
struct RowOwner {
  int64_t rank;
  int64_t local_row;
};

// The token map of one mesh line: `num_ranks` P shards of `local_tokens` T rows. Zigzag needs an
// even T.
struct TokenMap {
  TokenOrder order = TokenOrder::kContiguous;
  int64_t num_ranks = 1;
  int64_t local_tokens = 0;

  JU_HD constexpr int64_t global_tokens() const { return num_ranks * local_tokens; }

  JU_HD constexpr bool IsValid() const {
    return num_ranks >= 1 && local_tokens >= 0 &&
           (order == TokenOrder::kContiguous ||
            (order == TokenOrder::kZigzag && local_tokens % 2 == 0));
  }

  JU_HD constexpr int num_runs() const { return order == TokenOrder::kZigzag ? 2 : 1; }

  // The i-th run of rank `rank`, in local order; runs tile [0, T).
  JU_HD constexpr RowRun run(int64_t rank, int i) const {
    if (order == TokenOrder::kContiguous) return {0, rank * local_tokens, local_tokens};
    const int64_t half = local_tokens / 2;
    const int64_t chunk = i == 0 ? rank : 2 * num_ranks - 1 - rank;
    return {i * half, chunk * half, half};
  }

  JU_HD constexpr int64_t GlobalRow(int64_t rank, int64_t local_row) const {
    if (order == TokenOrder::kContiguous) return rank * local_tokens + local_row;
    const int64_t half = local_tokens / 2;
    if (local_row < half) return rank * half + local_row;
    return (2 * num_ranks - 1 - rank) * half + (local_row - half);
  }

  JU_HD constexpr RowOwner Owner(int64_t global_row) const {
    if (order == TokenOrder::kContiguous) {
      return {global_row / local_tokens, global_row % local_tokens};
    }
    const int64_t half = local_tokens / 2;
    const int64_t chunk = global_row / half;
    const int64_t within = global_row % half;
    if (chunk < num_ranks) return {chunk, within};
    return {2 * num_ranks - 1 - chunk, half + within};
  }
};

}  // namespace jax_ulysses

#endif  // JAX_ULYSSES_LAYOUT_TOKEN_ORDER_H_
