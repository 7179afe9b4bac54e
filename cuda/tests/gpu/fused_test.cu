// SPDX-License-Identifier: Apache-2.0
// The two fused operators, all ranks in one launch (rig B). One line a case; exit code 1 if any
// fails. Usage: fused_test check|stress|graph|streams|faults|negative|far|small|turn [count]
#include "controls.cuh"
#include "test_entries.h"
#include "test_shapes.h"

namespace jax_ulysses::testing {
namespace {

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

// The last one loads the memory system: 16 MB a rank.
std::vector<Variant> ControlVariants(bool push) {
  const Shape small = StressShape(4, push, false);
  Shape big = small;
  big.tokens = 2048, big.head_dim = 256;
  return Variants(small, big);
}

// A CTA copies one, two or four of the 16 steps of K of a tile.
std::vector<Variant> GatheredVariants() {
  Shape s = StressShape(4, true, true);
  std::vector<Variant> variants;
  for (int model : {1024, 2048, 4096}) {
    s.model = model;
    variants.push_back({s, 0, 20000, 0});
  }
  return variants;
}

template <class Fixture>
void Negative(const KernelEntry<typename Fixture::Call>& entry, const char* op, int launches) {
  const auto variants = ControlVariants(Fixture::kPush);
  if constexpr (Fixture::kPush) {
    NegativeControls<Fixture>(entry, op, variants, launches, kRingControls, kBulkWriteControls,
                              kBulkReadControls, kHandOffControls, kWatcherControls);
  } else {
    NegativeControls<Fixture>(entry, op, variants, launches, kRingControls, kBulkReadControls,
                              kHandOffControls, kPlanControls);
  }
}

// The kernels of the stress tests: 128x256, and 128x128 with its two teams of consumers.
template <class Call>
std::vector<KernelEntry<Call>> Stressed() {
  const auto entries = TestEntries<Call>();
  return {entries[0], entries[1]};
}

// Whether values are right. Without the edge "turn" they are not, or the kernel never ends, because
// the teams take each other's stages: so it is a program of its own, which must fail
// (tools/gpu_test.sh).
template <class Fixture>
bool GoodTurns(const KernelEntry<typename Fixture::Call>& entry, uint32_t removed) {
  // Several tiles a CTA, and more steps of K than the pipeline has stages.
  Shape shape = StressShape(2, Fixture::kPush, false);
  shape.tokens = 2048, shape.model = 4096;
  Fixture f(shape, entry);
  std::vector<typename Fixture::Call> calls = f.Calls(0);
  for (auto& call : calls) call.hooks.removed_edges = removed;
  WorldLaunch<typename Fixture::Call> launch(entry, calls, PlanFor(shape.ranks, Fixture::kPush));
  f.PoisonOutputs();
  launch.Run(nullptr);
  CK(cudaDeviceSynchronize());
  const Difference d = f.CheckNorm();
  return d.relative < 4e-3 && d.bad == 0;
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
    // With two CTAs a rank each makes several tiles, of more steps of K than the pipeline has
    // stages; else one.
    g_most_ctas = count;
    Shape s = StressShape(2, true, true);
    s.tokens = 140;
    if (count > 0) s.model = 512;
    for (const auto& e : Stressed<A2aGemmCall>()) Check<A2a>(s, e, "a2a_gemm");
    s = StressShape(4, false, false);
    s.tokens = 130;
    s.heads = {4, 2, 2};
    if (count > 0) s.heads = {8, 4, 4}, s.model = 512;
    for (const auto& e : Stressed<GemmA2aCall>()) Check<Ga>(s, e, "gemm_a2a");
  } else if (what == "stress") {
    const int epochs = count > 0 ? count : 1000;
    for (const auto& e : Stressed<A2aGemmCall>()) {
      StressAll<A2a>(e, Name(e, "a2a_gemm").c_str(), epochs);
    }
    for (const auto& e : Stressed<GemmA2aCall>()) {
      StressAll<Ga>(e, Name(e, "gemm_a2a").c_str(), epochs);
    }
  } else if (what == "graph") {
    for (const auto& e : Stressed<A2aGemmCall>()) {
      GraphReplays<A2a>(e, Name(e, "a2a_gemm").c_str());
    }
    for (const auto& e : Stressed<GemmA2aCall>()) {
      GraphReplays<Ga>(e, Name(e, "gemm_a2a").c_str());
    }
  } else if (what == "streams") {
    Streams<A2a>(a2a[0], "a2a_gemm", count > 0 ? count : 300);
    Streams<Ga>(ga[0], "gemm_a2a", count > 0 ? count : 300);
  } else if (what == "faults") {
    Faults<A2a>(StressShape(4, true, false), a2a[0], "a2a_gemm");
    Faults<Ga>(StressShape(4, false, false), ga[0], "gemm_a2a");
  } else if (what == "negative") {
    const int launches = count > 0 ? count : 30;
    Negative<A2a>(a2a[0], "a2a_gemm", launches);
    Negative<Ga>(ga[0], "gemm_a2a", launches);
    Controls<A2a> copies(a2a[0], "a2a_gemm", GatheredVariants(), launches);
    for (const Control& control : kNothing) copies.Run(control);
    for (const Control& control : kCopyControls) copies.Run(control);
    const std::string name = Name(ga[1], "gemm_a2a");
    Controls<Ga> teams(ga[1], name.c_str(), ControlVariants(false), launches);
    for (const Control& control : kHandOffControls) teams.Run(control);
    for (const Control& control : kPlanControls) teams.Run(control);
  } else if (what == "turn") {
    // Both with the edge; with the argument 1 or 2 one of them without it.
    const uint32_t removed = count == 0 ? kEdgeNone : kEdgeTurn;
    if (count != 2)
      Line(GoodTurns<A2a>(a2a[1], removed), Name(a2a[1], "a2a_gemm").c_str(), "turns");
    if (count != 1) Line(GoodTurns<Ga>(ga[1], removed), Name(ga[1], "gemm_a2a").c_str(), "turns");
  } else if (what == "far") {
    const int launches = count > 0 ? count : 30;
    FarControls<A2a>(a2a[0], "a2a_gemm", ControlVariants(true).back().shape, launches, true);
    FarControls<Ga>(ga[0], "gemm_a2a", ControlVariants(false).back().shape, launches, false);
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
