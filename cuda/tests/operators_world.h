// SPDX-License-Identifier: Apache-2.0
// Global float arrays, their shards, and P threads that run one CPU operator on them.
#ifndef JAX_ULYSSES_TESTS_OPERATORS_WORLD_H_
#define JAX_ULYSSES_TESTS_OPERATORS_WORLD_H_

#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "group.h"
#include "host/a2a_gemm.h"
#include "host/exchange.h"
#include "host/gemm_a2a.h"

namespace jax_ulysses::testing {

using Floats = std::vector<float>;

// Small whole numbers: sums of products are exact in float, so results are compared with ==.
inline Floats Numbers(size_t count, uint32_t seed) {
  Floats values(count);
  uint32_t state = seed * 2654435761u + 1;
  for (float& v : values) {
    state = state * 1664525u + 1013904223u;
    v = static_cast<float>(static_cast<int>(state >> 24) % 9 - 4);
  }
  return values;
}

// One problem: heads per segment over P ranks; everything in float.
struct Problem {
  HeadExchange exchange;
  int64_t batch = 1;
  int64_t depth = 1;  // D

  int64_t ranks() const { return exchange.num_ranks; }
  int64_t tokens() const { return exchange.local_tokens; }
  int64_t length() const { return ranks() * tokens(); }
  int64_t columns() const { return exchange.fused_columns(); }

  host::Shape shape() const {
    host::Shape shape;
    shape.exchange = exchange;
    shape.batch = batch;
    shape.element_bytes = 4;
    return shape;
  }
  // Rows [B, T] of `rank` out of a global [B, S, width] array.
  Floats SequenceShard(const Floats& global, int64_t width, int64_t rank) const {
    Floats shard;
    for (int64_t b = 0; b < batch; ++b) {
      for (int64_t t = 0; t < tokens(); ++t) {
        const int64_t row = b * length() + exchange.tokens().GlobalRow(rank, t);
        shard.insert(shard.end(), global.begin() + row * width, global.begin() + (row + 1) * width);
      }
    }
    return shard;
  }
  // Columns of segment `seg` that `rank` holds, of a global [B, S, C] array.
  Floats HeadShard(const Floats& global, int64_t seg, int64_t rank) const {
    Floats shard;
    const int64_t begin = exchange.fused_block_begin(seg, rank);
    for (int64_t row = 0; row < batch * length(); ++row) {
      const auto from = global.begin() + row * columns() + begin;
      shard.insert(shard.end(), from, from + exchange.segment_columns(seg));
    }
    return shard;
  }
};

inline Floats Multiply(const Floats& a, const Floats& b, int64_t rows, int64_t depth,
                       int64_t cols) {
  Floats out(static_cast<size_t>(rows * cols));
  for (int64_t m = 0; m < rows; ++m) {
    for (int64_t n = 0; n < cols; ++n) {
      double sum = 0;
      for (int64_t k = 0; k < depth; ++k) {
        sum += static_cast<double>(a[static_cast<size_t>(m * depth + k)]) *
               b[static_cast<size_t>(k * cols + n)];
      }
      out[static_cast<size_t>(m * cols + n)] = static_cast<float>(sum);
    }
  }
  return out;
}

inline GroupConfig Config(int64_t session, int64_t ranks, int64_t deadline_ms) {
  GroupConfig config;
  config.session = session;
  config.num_ranks = static_cast<int32_t>(ranks);
  for (int32_t r = 0; r < config.num_ranks; ++r) config.members.push_back({r, 0, r});
  config.slot_bytes = 1 << 20;
  config.deadline_ms = deadline_ms;
  config.start_epoch = 0xfffffffcu;
  return config;
}

// Runs `body(rank, handle)` on a thread for every rank of the session.
inline std::vector<host::CallStatus> OnAllRanks(
    int64_t session, int64_t ranks,
    const std::function<host::CallStatus(int, const RankHandle&)>& body) {
  std::vector<host::CallStatus> status(static_cast<size_t>(ranks));
  std::vector<RankHandle> handles;
  for (int32_t r = 0; r < ranks; ++r) handles.push_back(FindRank(session, r));
  std::vector<std::thread> threads;
  for (int r = 0; r < ranks; ++r) {
    threads.emplace_back(
        [&, r] { status[static_cast<size_t>(r)] = body(r, handles[static_cast<size_t>(r)]); });
  }
  for (std::thread& thread : threads) thread.join();
  return status;
}

}  // namespace jax_ulysses::testing

#endif  // JAX_ULYSSES_TESTS_OPERATORS_WORLD_H_
