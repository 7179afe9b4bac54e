// SPDX-License-Identifier: Apache-2.0
// What the benchmarks have in common: geometries (those of jax_ulysses/data/shapes.json) and
// timing. All variants of a case run interleaved in random order: a card throttles within 50 ms of
// load, so a fixed order biases every comparison.
#ifndef JAX_ULYSSES_TESTS_GPU_BENCH_UTIL_CUH_
#define JAX_ULYSSES_TESTS_GPU_BENCH_UTIL_CUH_

#include <functional>
#include <random>

#include "world.cuh"

namespace jax_ulysses::testing {

struct GeometryCase {
  const char* name;
  int heads, kv_heads, head_dim, model;
};
inline constexpr GeometryCase kGeometries[] = {
    {"qwen3_1p7b", 16, 8, 128, 2048},     {"nanbeige4_3b", 48, 8, 128, 3072},
    {"llama3_8b", 32, 8, 128, 4096},      {"qwen25_14b", 40, 8, 128, 5120},
    {"llama31_405b", 128, 8, 128, 16384}, {"qwen3_235b_kv4", 64, 4, 128, 4096},
    {"gpt_oss_d64", 64, 8, 64, 2880},     {"wan_dit_14b", 40, 40, 128, 5120},
};

// The output projection (`push`), or the fused projection of queries, keys and values.
inline Shape ShapeOf(const GeometryCase& c, int ranks, int sequence, bool push) {
  Shape s;
  s.ranks = ranks;
  s.tokens = sequence / ranks;
  s.heads = push ? std::vector<int>{c.heads} : std::vector<int>{c.heads, c.kv_heads, c.kv_heads};
  s.head_dim = c.head_dim;
  s.model = c.model;
  return s;
}

inline double Percentile(std::vector<float> v, double p) {
  std::sort(v.begin(), v.end());
  return v[static_cast<size_t>(p * static_cast<double>(v.size() - 1))];
}

// Microseconds of each of `runs`, which work on the default stream, in each of `rounds` rounds.
inline std::vector<std::vector<float>> TimeInterleaved(
    const std::vector<std::function<void()>>& runs, int rounds) {
  constexpr int kWarmUp = 3;
  std::vector<std::vector<float>> times(runs.size());
  cudaEvent_t begin, end;
  CK(cudaEventCreate(&begin));
  CK(cudaEventCreate(&end));
  std::mt19937 random(1);
  std::vector<size_t> order(runs.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  for (int round = -kWarmUp; round < rounds; ++round) {
    std::shuffle(order.begin(), order.end(), random);
    for (size_t i : order) {
      CK(cudaEventRecord(begin));
      runs[i]();
      CK(cudaEventRecord(end));
      CK(cudaEventSynchronize(end));
      float ms;
      CK(cudaEventElapsedTime(&ms, begin, end));
      if (round >= 0) times[i].push_back(ms * 1000);
    }
  }
  CK(cudaEventDestroy(begin));
  CK(cudaEventDestroy(end));
  return times;
}

}  // namespace jax_ulysses::testing

#endif  // JAX_ULYSSES_TESTS_GPU_BENCH_UTIL_CUH_
