// SPDX-License-Identifier: Apache-2.0
// Many launches with changing inputs and delays: the stress tests and the negative controls.
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
  s.model = 256;
  s.zigzag = zigzag;
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
  WorldLaunch<typename Fixture::Call> quiet(f.entry(), f.Calls(0),
                                            PlanFor(f.shape().ranks, Fixture::kPush));
  f.PoisonOutputs();
  quiet.Run(nullptr);
  CK(cudaDeviceSynchronize());
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

// Removes one edge at a time under a slow link, late ranks and slow copies. `expected` edges must
// be caught; the others are printed for the table in docs/kernels.md.
template <class Fixture>
void Negative(const KernelEntry<typename Fixture::Call>& entry, const char* op, int launches) {
  using Call = typename Fixture::Call;
  struct Control {
    const char* name;
    uint32_t edge;
    bool expected;
  };
  const Control controls[] = {{"none", kEdgeNone, false},
                              {"tile wait", kEdgeTileWait, true},
                              {"credit wait", kEdgeCreditWait, false},
                              {"hand-off", kEdgeHandOff, true},
                              {"ring", kEdgeRing, false},
                              {"full wait -> .read", kEdgeBulkComplete, false},
                              {"proxy fence", kEdgeProxyFence, false},
                              {"acquire fence", kEdgeAcquire, false},
                              {"tile release", kEdgeTileRelease, false},
                              {"done release", kEdgeDoneRelease, false}};
  for (const Control& control : controls) {
    int caught = 0, runs = 0;
    unsigned long long total = 0;
    for (int seed = 0; seed < 6; ++seed) {
      Fixture f(StressShape(seed % 2 == 0 ? 4 : 2, Fixture::kPush, seed % 3 == 0), entry);
      f.deadline_ns = 200000000;
      if (!MakeReference(f)) Line(false, op, "reference of a negative control");
      const auto change = [&](Call& call, int rank) {
        call.hooks.removed_edges = control.edge;
        call.hooks.ns_per_byte = seed % 2 == 0 ? 0.2f : 0.0f;
        if (seed == 5 && rank == 0) call.hooks.copy_delay_ns = 3000;
      };
      const auto bad = Stress(f, launches, static_cast<unsigned>(seed + 10), 300000, change, false);
      total += bad;
      caught += bad != 0;
      ++runs;
    }
    const bool ok = control.edge == kEdgeNone ? caught == 0 : !control.expected || caught > 0;
    char text[160];
    std::snprintf(text, sizeof text, "without %-20s caught in %d of %d runs, %llu wrong elements",
                  control.name, caught, runs, total);
    Line(ok, op, text);
  }
}

// Every rank is a launch of its own, on its own stream: parameters by value, and ranks that drift
// apart over calls as far as the slots let them.
template <class Fixture>
void Streams(const KernelEntry<typename Fixture::Call>& entry, const char* op, int launches) {
  for (int ranks : {2, 4, 8}) {
    Fixture f(StressShape(ranks, Fixture::kPush, false), entry);
    const bool good = MakeReference(f);
    const LaunchPlan plan = PlanFor(ranks, Fixture::kPush);
    CK(cudaFuncSetAttribute(entry.rank_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                            entry.shared_bytes));
    std::vector<cudaStream_t> streams(static_cast<size_t>(ranks));
    for (auto& stream : streams) CK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    void* params = nullptr;
    if (posix_memalign(&params, 1024, static_cast<size_t>(entry.params_bytes)) != 0) std::abort();
    std::mt19937 random(5);
    CK(cudaDeviceSynchronize());
    for (int i = 0; i < launches; ++i) {
      auto calls = f.Calls(i % kSets);
      for (int r = 0; r < ranks; ++r) {
        calls[r].hooks.start_delay_ns = random() % 3 == 0 ? random() % 100000 : 0;
        entry.build(calls[r], plan, params);
        void* args[] = {params};
        CK(cudaLaunchKernel(entry.rank_kernel, dim3(plan.ctas), dim3(entry.threads), args,
                            static_cast<size_t>(entry.shared_bytes), streams[r]));
        f.CompareReference(kScales[i % kSets], streams[r], r);
      }
    }
    CK(cudaDeviceSynchronize());
    const auto bad = f.TakeBad();
    Line(good && bad == 0, op,
         "one launch a rank, " + f.shape().Text() + ", " + std::to_string(launches) +
             " calls: wrong " + std::to_string(bad));
    for (auto& stream : streams) CK(cudaStreamDestroy(stream));
    std::free(params);
  }
}

}  // namespace jax_ulysses::testing

#endif  // JAX_ULYSSES_TESTS_GPU_STRESS_CUH_
