// SPDX-License-Identifier: Apache-2.0
// Fused against pure GEMM on rig B. All variants of a case run interleaved in random order (a card
// throttles within 50 ms of load, so a fixed order biases every comparison); medians are reported,
// one JSON line a variant. Usage: fused_bench [rounds] [substring of the case] [all]
#include <cstring>
#include <random>

#include "fixture.cuh"
#include "test_entries.h"

namespace jax_ulysses {
KernelEntry<ExchangeCall> TestExchangeEntry();

namespace testing {
namespace {

// GB/s of one NVLink 4 direction as measured with bulk copies; a rank gets its share of SMs.
constexpr double kLinkGbps = 360;

struct GeometryCase {
  const char* name;
  int heads, kv_heads, head_dim, model, sequence;
};
constexpr GeometryCase kCases[] = {
    {"llama3_8b", 32, 8, 128, 4096, 16384},      {"llama3_8b", 32, 8, 128, 4096, 4096},
    {"qwen25_14b", 40, 8, 128, 5120, 16384},     {"wan_dit_14b", 40, 40, 128, 5120, 16384},
    {"gpt_oss_d64", 64, 8, 64, 2880, 16384},     {"qwen3_1p7b", 16, 8, 128, 2048, 16384},
    {"qwen3_235b_kv4", 64, 4, 128, 4096, 16384},
};

struct Variant {
  std::string name;
  int comm_ctas;
  bool gemm;         // runs the kernel under test
  bool communicate;  // fused
  bool exchange;  // runs the separate exchange: before a GEMM that consumes, after one that makes
  bool throttled;
  bool compute = true;
};

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

double Percentile(std::vector<float> v, double p) {
  std::sort(v.begin(), v.end());
  return v[static_cast<size_t>(p * static_cast<double>(v.size() - 1))];
}

template <class Fixture>
void Bench(const GeometryCase& c, int ranks, const KernelEntry<typename Fixture::Call>& entry,
           int rounds, bool all) {
  using Call = typename Fixture::Call;
  Shape s;
  s.ranks = ranks;
  s.tokens = c.sequence / ranks;
  s.heads = Fixture::kPush ? std::vector<int>{c.heads}
                           : std::vector<int>{c.heads, c.kv_heads, c.kv_heads};
  s.head_dim = c.head_dim;
  s.model = c.model;
  if (s.Exchange().Check() != LayoutError::kNone) return;
  Fixture f(s, entry);
  const LaunchPlan base = PlanFor(ranks, Fixture::kPush);
  std::vector<Variant> variants = {{"pure", base.comm_ctas, true, false, false, false},
                                   {"fused", base.comm_ctas, true, true, false, false},
                                   {"fused-throttled", base.comm_ctas, true, true, false, true},
                                   {"separate", base.comm_ctas, true, false, true, false},
                                   {"separate-throttled", base.comm_ctas, true, false, true, true},
                                   {"exchange", base.ctas, false, false, true, false}};
  if (Fixture::kPush) {
    variants.push_back({"push-only", base.comm_ctas, true, true, false, false, false});
    variants.push_back({"push-only", base.ctas, true, true, false, false, false});
  }
  if (all) {
    for (int share : {4, 3, 1}) {
      const int comm = std::max(1, base.ctas / share);
      if (comm == base.comm_ctas) continue;
      variants.push_back({"fused", comm, true, true, false, false});
      variants.push_back({"fused-throttled", comm, true, true, false, true});
    }
  }
  const double ns_per_byte = NumSms() / (kLinkGbps * base.ctas);
  const SeparateExchange exchange(s, Fixture::kPush, 0),
      slow_exchange(s, Fixture::kPush, ns_per_byte);
  std::vector<WorldLaunch<Call>> launches;
  for (const Variant& v : variants) {
    std::vector<Call> calls = f.Calls(0, v.communicate);
    LaunchPlan plan = base;
    plan.comm_ctas = v.comm_ctas;
    for (Call& call : calls) {
      call.compute = v.compute;
      if (v.throttled) {
        call.hooks.ns_per_byte = static_cast<float>(ns_per_byte);
      }
    }
    launches.emplace_back(entry, calls, plan);
  }
  std::vector<std::vector<float>> times(variants.size());
  cudaEvent_t begin, end;
  CK(cudaEventCreate(&begin));
  CK(cudaEventCreate(&end));
  std::mt19937 random(1);
  std::vector<size_t> order(variants.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  for (int round = -3; round < rounds; ++round) {
    std::shuffle(order.begin(), order.end(), random);
    for (size_t i : order) {
      CK(cudaEventRecord(begin));
      const Variant& v = variants[i];
      const SeparateExchange& ex = v.throttled ? slow_exchange : exchange;
      if (v.exchange && (Fixture::kPush || !v.gemm)) ex.Run(nullptr);
      if (v.gemm) launches[i].Run(nullptr);
      if (v.exchange && !Fixture::kPush && v.gemm) ex.Run(nullptr);
      CK(cudaEventRecord(end));
      CK(cudaEventSynchronize(end));
      float ms;
      CK(cudaEventElapsedTime(&ms, begin, end));
      if (round >= 0) times[i].push_back(ms * 1000);
    }
  }
  const double flops = 2.0 * ranks * static_cast<double>(s.rows()) *
                       static_cast<double>(s.Exchange().fused_columns()) * s.model;
  const double pure = Percentile(times[0], 0.5);
  for (size_t i = 0; i < variants.size(); ++i) {
    const double us = Percentile(times[i], 0.5);
    std::printf(
        "{\"op\":\"%s\",\"geometry\":\"%s\",\"sequence\":%d,\"ranks\":%d,\"rows\":%d,"
        "\"columns\":%d,\"model\":%d,\"tile\":\"%dx%d\",\"w\":\"%s\",\"variant\":\"%s\","
        "\"ctas\":%d,\"comm_ctas\":%d,\"us\":%.1f,\"us_p10\":%.1f,\"us_p90\":%.1f,"
        "\"tflops\":%.0f,\"over_pure\":%.3f}\n",
        Fixture::kPush ? "a2a_gemm" : "gemm_a2a", c.name, c.sequence, ranks,
        static_cast<int>(s.rows()), static_cast<int>(s.Exchange().fused_columns()), s.model,
        entry.tile_rows, entry.tile_columns, entry.transposed ? "t" : "n", variants[i].name.c_str(),
        base.ctas, variants[i].comm_ctas, us, Percentile(times[i], 0.1), Percentile(times[i], 0.9),
        flops / us * 1e-6, us / pure);
  }
  std::fflush(stdout);
  CK(cudaEventDestroy(begin));
  CK(cudaEventDestroy(end));
}

int Main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 50;
  const std::string filter = argc > 2 ? argv[2] : "";
  const bool all = argc > 3;
  for (const GeometryCase& c : kCases) {
    if (std::string(c.name).find(filter) == std::string::npos) continue;
    for (int ranks : {4, 8}) {
      for (const auto& entry : A2aGemmEntries()) {
        if (entry.type == ElementType::kBf16) {
          Bench<A2aGemmFixture<__nv_bfloat16>>(c, ranks, entry, rounds, all);
        }
      }
      for (const auto& entry : GemmA2aEntries()) {
        if (entry.type == ElementType::kBf16) {
          Bench<GemmA2aFixture<__nv_bfloat16>>(c, ranks, entry, rounds, all);
        }
      }
    }
  }
  return 0;
}

}  // namespace
}  // namespace testing
}  // namespace jax_ulysses

int main(int argc, char** argv) { return jax_ulysses::testing::Main(argc, argv); }
