// SPDX-License-Identifier: Apache-2.0
// Fused against pure and separate on rig B (all ranks in one launch): geometries, sequences and
// numbers of ranks of jax_ulysses/data/shapes.json, each with the tile that the heuristic takes for
// it. Medians, one JSON line a variant. Usage: fused_bench [rounds] [substring of the geometry]
// [operator, or both] [eager or graph] [forward or backward]
//
// Backward is what carries cotangents of activations: of the projection of queries, keys and
// values, all-to-all -> GEMM with the gathered cotangent as a second result; of the output
// projection, GEMM -> all-to-all. The weight is read as it lies there, [N,K].
#include <cstring>

#include "bench_util.cuh"
#include "fixture.cuh"
#include "test_entries.h"

namespace jax_ulysses {
KernelEntry<ExchangeCall> TestExchangeEntry();

namespace testing {
namespace {

// GB/s of one NVLink 4 direction as measured with bulk copies; a rank gets its share of SMs.
constexpr double kLinkGbps = 360;
constexpr int kSequences[] = {1024, 4096, 16384, 65536};
constexpr int kRanks[] = {2, 4, 8};
// Elements of the largest operand: what keeps the inputs, heaps and outputs of all ranks on a card.
constexpr int64_t kMaxElements = int64_t{1} << 30;

struct Variant {
  const char* name;
  bool gemm;         // runs the kernel under test
  bool communicate;  // fused
  bool exchange;  // runs the separate exchange: before a GEMM that consumes, after one that makes
  bool throttled;
};
constexpr Variant kVariants[] = {{"pure", true, false, false, false},
                                 {"fused", true, true, false, false},
                                 {"fused-throttled", true, true, false, true},
                                 {"separate", true, false, true, false},
                                 {"separate-throttled", true, false, true, true},
                                 {"exchange", false, false, true, false}};

// The exchange that the fused kernel does inside, as a launch of its own.
class SeparateExchange {
 public:
  SeparateExchange(const Shape& shape, bool gather, double ns_per_byte)
      : heaps_(shape.ranks, SlotBytes(Probe(shape))), link_(8 * kMaxRanks) {
    const HeadExchange ex = shape.Exchange();
    CK(cudaMemset(link_.get(), 0, 8 * kMaxRanks));
    std::vector<ExchangeCall> calls(static_cast<size_t>(shape.ranks), Probe(shape));
    for (int r = 0; r < shape.ranks; ++r) {
      ExchangeCall& call = calls[static_cast<size_t>(r)];
      call.info = heaps_.Info(r, gather ? Operator::kGather : Operator::kScatter, 9, 5000000000ull);
      call.gather = gather;
      if (gather) call.sum_replicas = SumType::kBf16;
      call.hooks.ns_per_byte = static_cast<float>(ns_per_byte);
      call.hooks.link = reinterpret_cast<unsigned long long*>(link_.get()) + r;
      for (size_t seg = 0; seg < shape.heads.size(); ++seg) {
        const int64_t sequence = shape.rows() * ex.heads[seg] * ex.head_dim * 2;
        const int64_t head = shape.rows() * ex.num_ranks * ex.segment_columns(seg) * 2;
        buffers_.emplace_back(gather ? head : sequence);
        call.in[seg] = buffers_.back().get();
        buffers_.emplace_back(gather ? sequence : head);
        call.out[seg] = buffers_.back().get();
      }
    }
    launch_.emplace_back(TestExchangeEntry(), calls, PlanFor(shape.ranks, false));
  }
  void Run(cudaStream_t stream) const { launch_[0].Run(stream); }

 private:
  static ExchangeCall Probe(const Shape& shape) {
    ExchangeCall call;
    call.exchange = shape.Exchange();
    call.batch = shape.batch;
    call.element_bytes = 2;
    return call;
  }
  Heaps heaps_;
  Buffer link_;
  std::vector<Buffer> buffers_;
  std::vector<WorldLaunch<ExchangeCall>> launch_;
};

// The kernel that the heuristic takes, of those with w [K,N] or, if `transposed`, [N,K].
template <class Call>
KernelEntry<Call> Choose(Call call, bool transposed, int32_t ctas) {
  call.w_transposed = transposed;
  const auto entries = TestEntries<Call>();
  auto find = [&](TilePolicy policy) -> const KernelEntry<Call>* {
    for (const auto& e : entries) {
      if (e.tile == policy && e.type == ElementType::kBf16 && e.transposed == transposed) return &e;
    }
    return nullptr;
  };
  return *find(ChooseTile(ProblemOf(call), ctas, [&](TilePolicy p) { return find(p) != nullptr; }));
}

template <class Fixture>
void Bench(const GeometryCase& c, int ranks, int sequence, int rounds, bool graph, bool backward) {
  using Call = typename Fixture::Call;
  Shape s = ShapeOf(c, ranks, sequence, Fixture::kPush != backward);
  s.gathered = backward && Fixture::kPush;
  const HeadExchange ex = s.Exchange();
  if (ex.Check() != LayoutError::kNone) return;
  const int64_t rows = s.rows(), columns = ex.fused_columns();
  if (rows * ranks * columns > kMaxElements) return;
  const LaunchPlan plan = PlanFor(ranks, Fixture::kPush);
  Call probe = Fixture::Probe(s);
  if constexpr (Fixture::kPush) probe.width = s.model;
  const KernelEntry<Call> entry = Choose(probe, backward, plan.ctas);
  Fixture f(s, entry);
  const double ns_per_byte = NumSms() / (kLinkGbps * plan.ctas);
  const SeparateExchange exchange(s, Fixture::kPush, 0),
      slow_exchange(s, Fixture::kPush, ns_per_byte);
  std::vector<std::unique_ptr<WorldLaunch<Call>>> launches;
  std::vector<std::unique_ptr<CapturedRun>> graphs;
  std::vector<std::function<void()>> runs;
  for (const Variant& v : kVariants) {
    std::vector<Call> calls = f.Calls(0, v.communicate);
    for (Call& call : calls) {
      if (v.throttled) call.hooks.ns_per_byte = static_cast<float>(ns_per_byte);
    }
    launches.push_back(std::make_unique<WorldLaunch<Call>>(entry, calls, plan));
    auto enqueue = [&, launch = launches.back().get(), v](cudaStream_t stream) {
      const SeparateExchange& ex = v.throttled ? slow_exchange : exchange;
      if (v.exchange && (Fixture::kPush || !v.gemm)) ex.Run(stream);
      if (v.gemm) launch->Run(stream);
      if (v.exchange && !Fixture::kPush && v.gemm) ex.Run(stream);
    };
    if (graph) {
      graphs.push_back(std::make_unique<CapturedRun>(enqueue));
      runs.push_back([captured = graphs.back().get()] { captured->Run(nullptr); });
    } else {
      runs.push_back([enqueue] { enqueue(nullptr); });
    }
  }
  const std::vector<std::vector<float>> times = TimeInterleaved(runs, rounds);
  const double flops = 2.0 * ranks * static_cast<double>(rows * columns) * s.model;
  const double pure = Percentile(times[0], 0.5);
  for (size_t i = 0; i < runs.size(); ++i) {
    const double us = Percentile(times[i], 0.5);
    std::printf(
        "{\"op\":\"%s\",\"geometry\":\"%s\",\"sequence\":%d,\"ranks\":%d,\"rows\":%d,"
        "\"columns\":%d,\"model\":%d,\"tile\":\"%dx%d\",\"w\":\"%s\",\"variant\":\"%s\","
        "\"ctas\":%d,\"comm_ctas\":%d,\"us\":%.1f,\"us_p10\":%.1f,\"us_p90\":%.1f,"
        "\"tflops\":%.0f,\"over_pure\":%.3f,\"mode\":\"%s\"}\n",
        Fixture::kPush ? "a2a_gemm" : "gemm_a2a", c.name, sequence, ranks, static_cast<int>(rows),
        static_cast<int>(columns), s.model, entry.tile_rows, entry.tile_columns,
        backward ? "t" : "n", kVariants[i].name, plan.ctas, plan.comm_ctas, us,
        Percentile(times[i], 0.1), Percentile(times[i], 0.9), flops / us * 1e-6, us / pure,
        graph ? "graph" : "eager");
  }
  std::fflush(stdout);
}

int Main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 30;
  const std::string geometry = argc > 2 ? argv[2] : "";
  const std::string op = argc > 3 ? argv[3] : "both";
  const bool graph = argc > 4 && std::string(argv[4]) == "graph";
  const bool backward = argc > 5 && std::string(argv[5]) == "backward";
  for (const GeometryCase& c : kGeometries) {
    if (std::string(c.name).find(geometry) == std::string::npos) continue;
    for (int sequence : kSequences) {
      for (int ranks : kRanks) {
        if (op != "gemm_a2a")
          Bench<A2aGemmFixture<__nv_bfloat16>>(c, ranks, sequence, rounds, graph, backward);
        if (op != "a2a_gemm")
          Bench<GemmA2aFixture<__nv_bfloat16>>(c, ranks, sequence, rounds, graph, backward);
      }
    }
  }
  return 0;
}

}  // namespace
}  // namespace testing
}  // namespace jax_ulysses

int main(int argc, char** argv) { return jax_ulysses::testing::Main(argc, argv); }
