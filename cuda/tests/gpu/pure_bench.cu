// SPDX-License-Identifier: Apache-2.0
// The GEMM inside the fused kernels, with communication off and all SMs, against CUTLASS's own
// kernel for Hopper (128x256x64, cluster 2x1, cooperative, persistent). Shapes are those of one
// rank of a group. All variants of a shape in random order; one JSON line a variant. Usage:
// pure_bench [rounds] [substring of the geometry]
#include "bench_util.cuh"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/device/gemm_universal_adapter.h"
#include "cutlass/gemm/kernel/gemm_universal.hpp"
#include "fixture.cuh"
#include "test_entries.h"

namespace jax_ulysses::testing {
namespace {

// What CUTLASS's builders give for these arguments, with A and B row-major.
class StockGemm {
 public:
  StockGemm(int m, int n, int k, int swizzle) : a_(2ll * m * k), b_(2ll * n * k), d_(2ll * m * n) {
    RandomFill<<<kGrid, kBlock>>>(reinterpret_cast<__nv_bfloat16*>(a_.get()), int64_t{m} * k, 1,
                                  1.0f);
    RandomFill<<<kGrid, kBlock>>>(reinterpret_cast<__nv_bfloat16*>(b_.get()), int64_t{n} * k, 2,
                                  1.0f);
    typename Gemm::Arguments args{
        cutlass::gemm::GemmUniversalMode::kGemm,
        {m, n, k, 1},
        {reinterpret_cast<Element*>(a_.get()),
         {k, cute::_1{}, 0},
         reinterpret_cast<Element*>(b_.get()),
         {cute::_1{}, n, 0}},
        {{}, nullptr, {}, reinterpret_cast<Element*>(d_.get()), {n, cute::_1{}, 0}}};
    args.scheduler.max_swizzle_size = swizzle;
    workspace_ = Buffer(std::max<int64_t>(Gemm::get_workspace_size(args), 16));
    if (gemm_.initialize(args, workspace_.get()) != cutlass::Status::kSuccess) std::abort();
  }
  void Run() {
    if (gemm_.run() != cutlass::Status::kSuccess) std::abort();
  }

 private:
  using Element = cutlass::bfloat16_t;
  using Row = cutlass::layout::RowMajor;
  using Tile = cute::Shape<cute::_128, cute::_256, cute::_64>;
  using Cluster = cute::Shape<cute::_2, cute::_1, cute::_1>;
  using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster,
      cutlass::epilogue::collective::EpilogueTileAuto, float, float, void, Row, 8, Element, Row, 8,
      cutlass::epilogue::TmaWarpSpecializedCooperative>::CollectiveOp;
  using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Element, Row, 8, Element, Row, 8, float,
      Tile, Cluster,
      cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(
          sizeof(typename Epilogue::SharedStorage))>,
      cutlass::gemm::KernelTmaWarpSpecializedCooperative>::CollectiveOp;
  using Gemm = cutlass::gemm::device::GemmUniversalAdapter<cutlass::gemm::kernel::GemmUniversal<
      cute::Shape<int, int, int, int>, Mainloop, Epilogue, cutlass::gemm::PersistentScheduler>>;

  Buffer a_, b_, d_, workspace_;
  Gemm gemm_;
};

template <class Fixture>
void Bench(const GeometryCase& c, int ranks, int sequence, int rounds) {
  using Call = typename Fixture::Call;
  const Shape s = ShapeOf(c, ranks, sequence, Fixture::kPush);
  if (s.Exchange().Check() != LayoutError::kNone) return;
  const int rows = static_cast<int>(s.rows());
  const int fused = static_cast<int>(s.Exchange().fused_columns());
  const int n = Fixture::kPush ? s.model : fused;
  const int k = Fixture::kPush ? fused : s.model;
  std::vector<std::unique_ptr<Fixture>> fixtures;
  std::vector<std::unique_ptr<RankLaunches<Call>>> launches;
  std::vector<std::unique_ptr<StockGemm>> stock;
  std::vector<std::string> names;
  std::vector<std::function<void()>> runs;
  for (const auto& entry : TestEntries<Call>()) {
    if (entry.type != ElementType::kBf16 || entry.transposed) continue;
    fixtures.push_back(std::make_unique<Fixture>(s, entry));
    LaunchPlan plan;
    plan.ctas = plan.comm_ctas = NumSms() / entry.cluster * entry.cluster;
    std::vector<Call> calls = fixtures.back()->Calls(0, false);
    calls.resize(1);
    launches.push_back(std::make_unique<RankLaunches<Call>>(entry, calls, plan));
    names.push_back(std::to_string(entry.tile_rows) + "x" + std::to_string(entry.tile_columns));
    runs.push_back([launch = launches.back().get()] { launch->Run(0, nullptr); });
  }
  for (int swizzle : {1, 4}) {
    stock.push_back(std::make_unique<StockGemm>(rows, n, k, swizzle));
    names.push_back("cutlass-swizzle" + std::to_string(swizzle));
    runs.push_back([gemm = stock.back().get()] { gemm->Run(); });
  }
  const std::vector<std::vector<float>> times = TimeInterleaved(runs, rounds);
  for (size_t i = 0; i < names.size(); ++i) {
    const double us = Percentile(times[i], 0.5);
    std::printf(
        "{\"op\":\"%s\",\"geometry\":\"%s\",\"sequence\":%d,\"ranks\":%d,\"rows\":%d,\"n\":%d,"
        "\"k\":%d,\"kernel\":\"%s\",\"us\":%.1f,\"us_p10\":%.1f,\"us_p90\":%.1f,\"tflops\":%.0f}\n",
        Fixture::kPush ? "a2a_gemm" : "gemm_a2a", c.name, sequence, ranks, rows, n, k,
        names[i].c_str(), us, Percentile(times[i], 0.1), Percentile(times[i], 0.9),
        2.0 * rows * n * k / us * 1e-6);
  }
  std::fflush(stdout);
}

int Main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 30;
  const std::string filter = argc > 2 ? argv[2] : "";
  for (const GeometryCase& c : kGeometries) {
    if (std::string(c.name).find(filter) == std::string::npos) continue;
    for (int sequence : {1024, 4096, 16384, 65536}) {
      for (int ranks : {2, 4, 8}) {
        // The operands of one rank; those of all lie on this device.
        if (int64_t{sequence} * c.model > int64_t{1} << 28) continue;
        Bench<A2aGemmFixture<__nv_bfloat16>>(c, ranks, sequence, rounds);
        Bench<GemmA2aFixture<__nv_bfloat16>>(c, ranks, sequence, rounds);
      }
    }
  }
  return 0;
}

}  // namespace
}  // namespace jax_ulysses::testing

int main(int argc, char** argv) { return jax_ulysses::testing::Main(argc, argv); }
