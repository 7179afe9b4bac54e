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

// Lines the devices up: each tells all others, then waits for them.
inline __global__ void Rendezvous(PeerTable words, int rank, int ranks, uint32_t value) {
  const int peer = static_cast<int>(threadIdx.x);
  if (peer < ranks) {
    auto* there = reinterpret_cast<volatile uint32_t*>(words.heap[peer]) + rank * 32;
    auto* here = reinterpret_cast<volatile uint32_t*>(words.heap[rank]) + peer * 32;
    __threadfence_system();
    *there = value;
    for (int i = 0; static_cast<int32_t>(*here - value) < 0 && i < (1 << 22); ++i) {
    }
  }
}

// What the exchange is compared with: the bytes that cross the link, from as many CTAs.
inline __global__ void __launch_bounds__(1024, 1)
    PlainCopy(const uint4* from, uint4* to, int64_t count) {
  constexpr int kUnroll = 4;
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count;
       i += kUnroll * stride) {
    uint4 v[kUnroll];
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) {
      if (i + j * stride < count) v[j] = from[i + j * stride];
    }
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) {
      if (i + j * stride < count) to[i + j * stride] = v[j];
    }
  }
}

inline double Percentile(std::vector<float> v, double p) {
  std::sort(v.begin(), v.end());
  return v[static_cast<size_t>(p * static_cast<double>(v.size() - 1))];
}

// What `run` enqueues, as a CUDA graph.
class CapturedRun {
 public:
  explicit CapturedRun(const std::function<void(cudaStream_t)>& run) {
    cudaStream_t stream;
    cudaGraph_t graph;
    CK(cudaStreamCreate(&stream));
    CK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    run(stream);
    CK(cudaStreamEndCapture(stream, &graph));
    CK(cudaGraphInstantiate(&exec_, graph, 0));
    CK(cudaGraphDestroy(graph));
    CK(cudaStreamDestroy(stream));
  }
  ~CapturedRun() { CK(cudaGraphExecDestroy(exec_)); }
  CapturedRun(const CapturedRun&) = delete;
  CapturedRun& operator=(const CapturedRun&) = delete;
  void Run(cudaStream_t stream) const { CK(cudaGraphLaunch(exec_, stream)); }

 private:
  cudaGraphExec_t exec_ = nullptr;
};

// Microseconds of each of `runs`, which work on the default stream, in each of `rounds` rounds,
// after as many, but at most ten, that do not count.
inline std::vector<std::vector<float>> TimeInterleaved(
    const std::vector<std::function<void()>>& runs, int rounds) {
  const int warm_up = rounds < 10 ? rounds : 10;
  std::vector<std::vector<float>> times(runs.size());
  cudaEvent_t begin, end;
  CK(cudaEventCreate(&begin));
  CK(cudaEventCreate(&end));
  std::mt19937 random(1);
  std::vector<size_t> order(runs.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  for (int round = -warm_up; round < rounds; ++round) {
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
