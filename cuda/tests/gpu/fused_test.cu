// SPDX-License-Identifier: Apache-2.0
// The two fused operators, all ranks in one launch (rig B). One line a case; exit code 1 if any
// fails. Usage: fused_test check|stress|graph|streams|faults|negative|small [count]
#include <cstring>
#include <functional>
#include <random>

#include "fixture.cuh"
#include "test_entries.h"

namespace jax_ulysses::testing {
namespace {

int g_failures = 0;

void Line(bool ok, const char* what, const std::string& text) {
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

// fp32 oracle, unfused GEMM bit by bit, twice in a row (both slots).
template <class Fixture>
void Check(const Shape& shape, const KernelEntry<typename Fixture::Call>& entry, const char* op) {
  Fixture f(shape, entry);
  using Launch = WorldLaunch<typename Fixture::Call>;
  const LaunchPlan plan = PlanFor(shape.ranks, Fixture::kPush);
  Launch fused(entry, f.Calls(0), plan);
  Launch unfused(entry, f.Calls(0, false), plan);
  Difference worst;
  for (int i = 0; i < 3; ++i) {
    f.PoisonOutputs();
    f.heaps().PoisonSlots(nullptr);
    fused.Run(nullptr);
    CK(cudaDeviceSynchronize());
    const Difference d = f.CheckNorm();
    worst.relative = std::max(worst.relative, d.relative);
    worst.bad += d.bad;
  }
  bool epochs = true;
  for (int r = 0; r < shape.ranks; ++r) {
    epochs = epochs && f.heaps().Word(r, f.heaps().layout().epoch()) == 0xfffffff3u &&
             f.heaps().Word(r, f.heaps().layout().abort()) == 0;
  }
  f.SaveReference();
  f.PoisonOutputs();
  f.heaps().PoisonSlots(nullptr);
  f.PrepareUnfused();
  unfused.Run(nullptr);
  f.CompleteUnfused();
  CK(cudaDeviceSynchronize());
  unsigned long long exact = 0;
  if (!shape.gathered) {
    f.CompareReference(1.0f);
    exact = f.TakeBad();
  }
  char text[256];
  std::snprintf(text, sizeof text, "%-62s rel %.2e bad %llu unfused-diff %llu%s",
                shape.Text().c_str(), worst.relative, worst.bad, exact,
                epochs ? "" : " EPOCH WRONG");
  Line(worst.relative < 4e-3 && worst.bad == 0 && exact == 0 && epochs, Name(entry, op).c_str(),
       text);
}

std::vector<Shape> GemmA2aShapes() {
  std::vector<Shape> shapes;
  auto add = [&](int p, int b, int t, std::vector<int> heads, int h, int d, bool zigzag = false,
                 bool bias = false) {
    Shape s;
    s.ranks = p, s.batch = b, s.tokens = t, s.heads = std::move(heads), s.head_dim = h;
    s.model = d, s.zigzag = zigzag, s.bias = bias;
    shapes.push_back(s);
  };
  for (int p : {2, 4, 8}) {
    add(p, 1, 512, {16, 8, 8}, 128, 1024);
    add(p, 2, 256, {16, 8, 8}, 128, 512, false, true);       // bias, tiles follow runs
    add(p, 2, 256, {16, 8, 8}, 64, 512, true, true);         // zigzag, tiles follow runs
    add(p, 1, 1000, {8, 8}, 80, 264, true, true);            // zigzag, tails everywhere
    add(p, 2, 130, {8, 8, 8}, 96, 200, false, true);         // rows straddle batches
    add(p, 3, 6, {16}, 64, 64, true);                        // tiny
    add(p, 1, 1, {8}, 128, 128);                             // one token
  }
  add(8, 1, 512, {16, 4, 4}, 128, 1024, false, true);  // replicas
  add(4, 2, 150, {8, 2, 2}, 64, 320, true, true);
  add(8, 1, 300, {8, 1, 1}, 128, 512, false, true);
  add(4, 1, 2048, {32, 8, 8}, 128, 4096);
  return shapes;
}

std::vector<Shape> A2aGemmShapes() {
  std::vector<Shape> shapes;
  auto add = [&](int p, int b, int t, std::vector<int> heads, int h, int d, bool zigzag = false,
                 bool bias = false, bool gathered = false) {
    Shape s;
    s.ranks = p, s.batch = b, s.tokens = t, s.heads = std::move(heads), s.head_dim = h;
    s.model = d, s.zigzag = zigzag, s.bias = bias, s.gathered = gathered;
    shapes.push_back(s);
  };
  for (int p : {2, 4, 8}) {
    add(p, 1, 512, {16}, 128, 1024);
    add(p, 2, 256, {16}, 128, 512, false, true, true);
    add(p, 2, 256, {16}, 64, 512, true, true, true);
    add(p, 1, 1000, {8}, 80, 264, true, true);
    add(p, 2, 130, {8}, 96, 200, false, true, true);
    add(p, 1, 512, {16, 8, 8}, 128, 1024, false, false, true);  // backward of QKV
    add(p, 3, 6, {16}, 64, 64, true);
    add(p, 1, 1, {8}, 128, 128);
  }
  add(8, 1, 512, {16, 4, 4}, 128, 1024);  // replicas: more K blocks over the same rows of w
  add(4, 2, 150, {8, 2, 2}, 64, 320, true, true);
  add(4, 1, 2048, {32}, 128, 4096);
  return shapes;
}

template <template <class> class Fixture, class Call>
void CheckAll(const std::vector<KernelEntry<Call>>& entries, const std::vector<Shape>& shapes,
              const char* op) {
  for (const auto& entry : entries) {
    for (const Shape& shape : shapes) {
      if (entry.type == ElementType::kBf16) {
        Check<Fixture<__nv_bfloat16>>(shape, entry, op);
      } else {
        Check<Fixture<__half>>(shape, entry, op);
      }
    }
  }
}

Shape StressShape(int ranks, bool push, bool zigzag) {
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

template <class Fixture>
void GraphReplays(const KernelEntry<typename Fixture::Call>& entry, const char* op) {
  Fixture f(StressShape(4, Fixture::kPush, false), entry);
  const bool good = MakeReference(f);
  const LaunchPlan plan = PlanFor(4, Fixture::kPush);
  WorldLaunch<typename Fixture::Call> a(entry, f.Calls(0), plan), b(entry, f.Calls(1), plan);
  cudaStream_t stream;
  CK(cudaStreamCreate(&stream));
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  CK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  f.PoisonOutputs(stream);
  a.Run(stream);
  f.CompareReference(kScales[0], stream);
  f.PoisonOutputs(stream);
  b.Run(stream);
  f.CompareReference(kScales[1], stream);
  f.PoisonOutputs(stream);
  a.Run(stream);
  f.CompareReference(kScales[0], stream);
  CK(cudaStreamEndCapture(stream, &graph));
  CK(cudaGraphInstantiate(&exec, graph, 0));
  for (int i = 0; i < 100; ++i) {
    CK(cudaGraphLaunch(exec, stream));
    if (i % 7 == 3) {
      b.Run(stream);
      f.CompareReference(kScales[1], stream);
    }
  }
  CK(cudaStreamSynchronize(stream));
  const auto bad = f.TakeBad();
  Line(good && bad == 0, op,
       "100 graph replays of 3 calls, eager in between: wrong " + std::to_string(bad));
  CK(cudaGraphExecDestroy(exec));
  CK(cudaGraphDestroy(graph));
  CK(cudaStreamDestroy(stream));
}

// A fault in one rank: all others end in time, with NaN outputs and a record.
template <class Fixture>
void Faults(const KernelEntry<typename Fixture::Call>& entry, const char* op) {
  using Call = typename Fixture::Call;
  const int ranks = 4;
  FaultMailbox* mailbox;
  CK(cudaHostAlloc(&mailbox, sizeof(FaultMailbox) * ranks, cudaHostAllocMapped));
  for (const char* kind : {"absent", "late", "shape"}) {
    Fixture f(StressShape(ranks, Fixture::kPush, false), entry);
    f.deadline_ns = 20000000;  // 20 ms
    const bool good = MakeReference(f);
    std::memset(mailbox, 0, sizeof(FaultMailbox) * ranks);
    auto calls = f.Calls(0);
    for (int r = 0; r < ranks; ++r) calls[r].mailbox = mailbox + r;
    if (kind[0] == 'a') calls[1].hooks.absent = 1;
    if (kind[0] == 'l') calls[1].hooks.start_delay_ns = 60000000;
    if (kind[0] == 's') calls[1].info.agreement ^= 1;
    const LaunchPlan plan = PlanFor(ranks, Fixture::kPush);
    WorldLaunch<Call> faulty(entry, calls, plan);
    for (int r = 0; r < ranks; ++r) calls[r].hooks = f.Calls(0)[r].hooks;
    WorldLaunch<Call> next(entry, calls, plan);
    cudaEvent_t begin, end;
    CK(cudaEventCreate(&begin));
    CK(cudaEventCreate(&end));
    f.PoisonOutputs();
    for (int r = 0; r < ranks; ++r) CK(cudaMemset(f.heaps().Slot(r, 0), 0, 1 << 20));
    CK(cudaEventRecord(begin));
    faulty.Run(nullptr);
    CK(cudaEventRecord(end));
    CK(cudaDeviceSynchronize());
    float ms;
    CK(cudaEventElapsedTime(&ms, begin, end));
    bool ok = good && ms < 120;
    int records = 0;
    FaultKind seen = FaultKind::kNone;
    for (int r = 0; r < ranks; ++r) {
      if (kind[0] == 'a' && r == 1) continue;
      ok = ok && f.NanShare(r) == 1.0;
      ok = ok && mailbox[r].ready == 1 && mailbox[r].words[0] != 0;
      records += mailbox[r].ready == 1;
      seen = static_cast<FaultKind>(mailbox[r].words[0]);
      if (kind[0] != 's') ok = ok && mailbox[r].words[2] == 1;
    }
    if (kind[0] == 's') ok = ok && seen == FaultKind::kDisagreement;
    // The group stays unusable: at once, and with NaN, whatever the outputs held.
    for (int r = 0; r < ranks; ++r) CK(cudaMemset(f.heaps().Slot(r, 1), 0, 1 << 20));
    CK(cudaEventRecord(begin));
    next.Run(nullptr);
    CK(cudaEventRecord(end));
    CK(cudaDeviceSynchronize());
    float next_ms;
    CK(cudaEventElapsedTime(&next_ms, begin, end));
    for (int r = 0; r < ranks; ++r) ok = ok && f.NanShare(r) == 1.0;
    ok = ok && next_ms < 15;
    // Until the control words are prepared again.
    f.heaps().Reset(7);
    for (int r = 0; r < ranks; ++r) calls[r].info.agreement = 0x1234;
    WorldLaunch<Call> again(entry, calls, plan);
    f.PoisonOutputs();
    again.Run(nullptr);
    f.CompareReference(1.0f);
    const auto bad = f.TakeBad();
    char text[200];
    std::snprintf(text, sizeof text,
                  "fault %-6s: ended after %.1f ms (deadline 20), %d records, kind %u, next call "
                  "%.2f ms, after reset wrong %llu",
                  kind, ms, records, static_cast<unsigned>(seen), next_ms, bad);
    Line(ok && bad == 0, op, text);
    CK(cudaEventDestroy(begin));
    CK(cudaEventDestroy(end));
  }
  CK(cudaFreeHost(mailbox));
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

int Main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "check";
  const int count = argc > 2 ? std::atoi(argv[2]) : 0;
  const auto a2a = A2aGemmEntries();
  const auto ga = GemmA2aEntries();
  using A2a = A2aGemmFixture<__nv_bfloat16>;
  using Ga = GemmA2aFixture<__nv_bfloat16>;
  if (what == "check") {
    CheckAll<A2aGemmFixture>(a2a, A2aGemmShapes(), "a2a_gemm");
    CheckAll<GemmA2aFixture>(ga, GemmA2aShapes(), "gemm_a2a");
  } else if (what == "small") {  // under compute-sanitizer
    Shape s = StressShape(2, true, true);
    s.tokens = 140;
    s.gathered = true;
    Check<A2a>(s, a2a[0], "a2a_gemm");
    s = StressShape(4, false, false);
    s.tokens = 130;
    s.heads = {4, 2, 2};
    Check<Ga>(s, ga[0], "gemm_a2a");
  } else if (what == "stress") {
    StressAll<A2a>(a2a[0], "a2a_gemm", count > 0 ? count : 1000);
    StressAll<Ga>(ga[0], "gemm_a2a", count > 0 ? count : 1000);
  } else if (what == "graph") {
    GraphReplays<A2a>(a2a[0], "a2a_gemm");
    GraphReplays<Ga>(ga[0], "gemm_a2a");
  } else if (what == "streams") {
    Streams<A2a>(a2a[0], "a2a_gemm", count > 0 ? count : 300);
    Streams<Ga>(ga[0], "gemm_a2a", count > 0 ? count : 300);
  } else if (what == "faults") {
    Faults<A2a>(a2a[0], "a2a_gemm");
    Faults<Ga>(ga[0], "gemm_a2a");
  } else if (what == "negative") {
    Negative<A2a>(a2a[0], "a2a_gemm", count > 0 ? count : 60);
    Negative<Ga>(ga[0], "gemm_a2a", count > 0 ? count : 60);
  } else {
    std::printf("unknown: %s\n", what.c_str());
    return 2;
  }
  std::printf("fused_test %s: %d failed\n", what.c_str(), g_failures);
  return g_failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace jax_ulysses::testing

int main(int argc, char** argv) { return jax_ulysses::testing::Main(argc, argv); }
