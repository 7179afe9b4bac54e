// SPDX-License-Identifier: Apache-2.0
// Many launches with changing inputs and delays: for the stress tests and the negative controls.
#ifndef JAX_ULYSSES_TESTS_GPU_STRESS_CUH_
#define JAX_ULYSSES_TESTS_GPU_STRESS_CUH_

#include <functional>
#include <random>

#include "fixture.cuh"

namespace jax_ulysses::testing {

inline int g_failures = 0;

inline void Line(bool ok, const char* what, const std::string& text) {
  std::printf("%s %s %s\n", ok ? "ok  " : "FAIL", what, text.c_str());
  std::fflush(stdout);
  g_failures += !ok;
}

template <class Entry>
std::string Name(const Entry& e, const char* op) {
  char text[96];
  std::snprintf(text, sizeof text, "%s %s %s %dx%d", op,
                e.type == ElementType::kBf16 ? "bf16" : "f16 ", e.transposed ? "t" : "n",
                e.tile_rows, e.tile_columns);
  return text;
}

inline Shape StressShape(int ranks, bool push, bool zigzag) {
  Shape s;
  s.ranks = ranks;
  s.tokens = 512;
  s.heads = push ? std::vector<int>{16} : std::vector<int>{16, 8, 8};
  s.head_dim = 64;
  s.zigzag = zigzag;
  // Six column blocks and more, each of which copies some of the steps of K.
  s.gathered = push && zigzag;
  s.model = s.gathered ? 1536 : 256;
  return s;
}

// Launches with one of three input sets and random delays of whole ranks; counts wrong elements.
// `change` edits the calls: removed edges, rates, other delays.
template <class Fixture>
unsigned long long Stress(Fixture& f, int launches, unsigned seed, uint32_t max_delay_ns,
                          const std::function<void(typename Fixture::Call&, int)>& change,
                          bool poison) {
  using Call = typename Fixture::Call;
  const int ranks = f.shape().ranks;
  const LaunchPlan plan = PlanFor(ranks, Fixture::kPush);
  std::mt19937 random(seed);
  constexpr int kVariants = 6;
  std::vector<WorldLaunch<Call>> worlds;
  for (int v = 0; v < kVariants; ++v) {
    std::vector<Call> calls = f.Calls(v % kSets);
    for (int r = 0; r < ranks; ++r) {
      // About half of the ranks come late, by different amounts.
      if (max_delay_ns > 0 && random() % 2 == 0) {
        calls[r].hooks.start_delay_ns = random() % max_delay_ns;
      }
      change(calls[r], r);
    }
    worlds.emplace_back(f.entry(), calls, plan);
  }
  f.TakeBad();
  for (int i = 0; i < launches; ++i) {
    const int v = i % kVariants;
    if (poison) f.PoisonOutputs();
    worlds[v].Run(nullptr);
    f.CompareReference(kScales[v % kSets]);
  }
  CK(cudaDeviceSynchronize());
  return f.TakeBad();
}

// The reference of a stress run: one quiet launch, checked against fp32.
template <class Fixture>
bool MakeReference(Fixture& f) {
  const LaunchPlan plan = PlanFor(f.shape().ranks, Fixture::kPush);
  f.PoisonOutputs();
  SyncDevices();
  if (g_devices > 1) {
    const RankLaunches<typename Fixture::Call> quiet(f.entry(), f.Calls(0), plan);
    for (int r = 0; r < f.shape().ranks; ++r) {
      UseRank(r);
      quiet.Run(r, nullptr);
    }
    SyncDevices();
  } else {
    WorldLaunch<typename Fixture::Call> quiet(f.entry(), f.Calls(0), plan);
    quiet.Run(nullptr);
    CK(cudaDeviceSynchronize());
  }
  const Difference d = f.CheckNorm();
  f.SaveReference();
  // Also loads CompareExact: a kernel must not be loaded while others spin.
  f.CompareReference(1.0f);
  return d.relative < 4e-3 && d.bad == 0 && f.TakeBad() == 0;
}

template <class Fixture>
void StressAll(const KernelEntry<typename Fixture::Call>& entry, const char* op, int launches) {
  for (int ranks : {2, 4, 8}) {
    for (bool zigzag : {false, true}) {
      Fixture f(StressShape(ranks, Fixture::kPush, zigzag), entry);
      const bool good = MakeReference(f);
      const float slow = 1.0f / 10.0f;  // ns per byte: 10 GB/s a rank
      auto none = [](typename Fixture::Call&, int) {};
      auto link = [&](typename Fixture::Call& call, int) { call.hooks.ns_per_byte = slow; };
      const auto free_bad = Stress(f, launches, 1, 20000, none, true);
      const auto slow_bad = Stress(f, launches / 4, 2, 50000, link, true);
      Line(good && free_bad + slow_bad == 0, op,
           "stress " + f.shape().Text() + " launches " + std::to_string(launches) + "+" +
               std::to_string(launches / 4) + " (slow link): wrong " + std::to_string(free_bad) +
               " " + std::to_string(slow_bad));
    }
  }
}

// Every rank is a launch of its own, on its own stream and, if there are several, its own device:
// parameters by value, and ranks that drift apart over calls as far as the slots let them.
template <class Fixture>
unsigned long long StressStreams(
    Fixture& f, int launches,
    const std::function<void(typename Fixture::Call&, int rank, int launch)>& change) {
  const auto& entry = f.entry();
  const int ranks = f.shape().ranks;
  const LaunchPlan plan = PlanFor(ranks, Fixture::kPush);
  std::vector<cudaStream_t> streams(static_cast<size_t>(ranks));
  for (int r = 0; r < ranks; ++r) {
    UseRank(r);
    CK(cudaFuncSetAttribute(entry.rank_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                            entry.shared_bytes));
    CK(cudaStreamCreateWithFlags(&streams[static_cast<size_t>(r)], cudaStreamNonBlocking));
  }
  void* params = nullptr;
  if (posix_memalign(&params, 1024, static_cast<size_t>(entry.params_bytes)) != 0) std::abort();
  UseRank(0);
  f.TakeBad();
  SyncDevices();
  for (int i = 0; i < launches; ++i) {
    auto calls = f.Calls(i % kSets);
    for (int r = 0; r < ranks; ++r) {
      change(calls[r], r, i);
      entry.build(calls[r], plan, params);
      void* args[] = {params};
      UseRank(r);
      CK(cudaLaunchKernel(entry.rank_kernel, dim3(plan.ctas), dim3(entry.threads), args,
                          static_cast<size_t>(entry.shared_bytes), streams[r]));
      f.CompareReference(kScales[i % kSets], streams[r], r);
    }
  }
  SyncDevices();
  for (auto& stream : streams) CK(cudaStreamDestroy(stream));
  std::free(params);
  return f.TakeBad();
}

template <class Fixture>
void Streams(const KernelEntry<typename Fixture::Call>& entry, const char* op, int launches) {
  for (int ranks : {2, 4, 8}) {
    Fixture f(StressShape(ranks, Fixture::kPush, false), entry);
    const bool good = MakeReference(f);
    std::mt19937 random(5);
    const auto bad =
        StressStreams(f, launches, [&](typename Fixture::Call& call, int /*rank*/, int) {
          call.hooks.start_delay_ns = random() % 3 == 0 ? random() % 100000 : 0;
        });
    Line(good && bad == 0, op,
         "one launch a rank, " + f.shape().Text() + ", " + std::to_string(launches) +
             " calls: wrong " + std::to_string(bad));
  }
}

}  // namespace jax_ulysses::testing

#endif  // JAX_ULYSSES_TESTS_GPU_STRESS_CUH_
