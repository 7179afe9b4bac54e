// SPDX-License-Identifier: Apache-2.0
// The library as its users call it: launch.h and the production kernels, one launch a rank on a
// stream of its own, all on one GPU. Also what a launch costs on the host.
#include <chrono>

#include "fixture.cuh"

namespace jax_ulysses::testing {
namespace {

int g_failures = 0;
void Line(bool ok, const std::string& text) {
  std::printf("%s %s\n", ok ? "ok  " : "FAIL", text.c_str());
  std::fflush(stdout);
  g_failures += !ok;
}

class Streams {
 public:
  explicit Streams(int count) : streams_(static_cast<size_t>(count)) {
    for (auto& s : streams_) CK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
  }
  ~Streams() {
    for (auto& s : streams_) cudaStreamDestroy(s);
  }
  cudaStream_t operator[](int i) const { return streams_[static_cast<size_t>(i)]; }

 private:
  std::vector<cudaStream_t> streams_;
};

template <class Fixture>
void Check(const Shape& shape, ElementType type, bool transposed, TilePolicy tile, const char* op) {
  KernelEntry<typename Fixture::Call> entry;
  entry.type = type;
  entry.transposed = transposed;
  entry.tile_rows = 128;
  Fixture f(shape, entry);
  const Streams streams(shape.ranks);
  f.SaveReference();
  f.CompareReference(1.0f);  // loads what runs beside the kernels
  f.TakeBad();
  Difference worst;
  std::string problem;
  double host_us = 0;
  constexpr int kCalls = 6;
  for (int i = 0; i < kCalls; ++i) {
    f.PoisonOutputs();
    f.heaps().PoisonSlots(nullptr);
    CK(cudaDeviceSynchronize());
    auto calls = f.Calls(0);
    for (auto& call : calls) {
      call.sm_budget = NumSms() / shape.ranks;
      call.tile = tile;
      call.hooks = TestHooks();
    }
    const auto begin = std::chrono::steady_clock::now();
    for (int r = 0; r < shape.ranks; ++r) {
      const Status can = CanImplement(calls[r]);
      const Status status = can.ok() ? Launch(calls[r], streams[r]) : can;
      if (!status.ok()) problem = status.text;
    }
    const auto end = std::chrono::steady_clock::now();
    CK(cudaDeviceSynchronize());
    // The first call builds parameters; later ones find them.
    if (i > 0) {
      host_us += std::chrono::duration<double, std::micro>(end - begin).count() / shape.ranks /
                 (kCalls - 1);
    }
    const Difference d = f.CheckNorm();
    worst.relative = std::max(worst.relative, d.relative);
    worst.bad += d.bad;
  }
  char text[256];
  std::snprintf(text, sizeof text, "%s %s %s tile %d %-50s rel %.2e bad %llu host %.1f us a launch",
                op, type == ElementType::kBf16 ? "bf16" : "f16 ", transposed ? "t" : "n",
                static_cast<int>(tile), shape.Text().c_str(), worst.relative, worst.bad, host_us);
  Line(problem.empty() && worst.relative < 4e-3 && worst.bad == 0, text + (" " + problem));
}

void Refusals() {
  Shape s;
  s.heads = {16};
  A2aGemmFixture<__nv_bfloat16> f(s, KernelEntry<A2aGemmCall>{});
  auto refused = [&](const char* what, Status::Code code, auto change) {
    A2aGemmCall call = f.Calls(0)[0];
    change(call);
    const Status status = CanImplement(call);
    Line(status.code == code && !status.text.empty(), std::string(what) + ": " + status.text);
  };
  refused("odd width", Status::Code::kUnsupported, [](A2aGemmCall& c) { c.width = 12; });
  refused("odd head dim", Status::Code::kUnsupported,
          [](A2aGemmCall& c) { c.exchange.head_dim = 3; });
  refused("heads", Status::Code::kInvalid, [](A2aGemmCall& c) { c.exchange.heads[0] = 6; });
  refused("slot", Status::Code::kUnsupported, [](A2aGemmCall& c) { c.batch = 9; });
  refused("flags", Status::Code::kUnsupported,
          [](A2aGemmCall& c) { c.info.layout.flags_per_source = 3; });
  refused("ranks", Status::Code::kInvalid, [](A2aGemmCall& c) { c.info.layout.num_ranks = 8; });
  refused("alignment", Status::Code::kUnsupported,
          [](A2aGemmCall& c) { c.y = static_cast<char*>(c.y) + 2; });
}

int Main() {
  const Status prepared = Prepare();
  Line(prepared.ok(), "Prepare " + prepared.text);
  Refusals();
  for (int ranks : {1, 2, 4}) {
    for (bool transposed : {false, true}) {
      Shape a;
      a.ranks = ranks, a.tokens = 300, a.heads = {16}, a.model = 520, a.bias = true;
      a.zigzag = ranks == 4;
      Shape b = a;
      b.heads = {16, 8, 8}, b.batch = 2;
      for (TilePolicy tile : {TilePolicy::kAuto, TilePolicy::k128x256, TilePolicy::k128x128,
                              TilePolicy::k64x128, TilePolicy::k128x192}) {
        Check<A2aGemmFixture<__nv_bfloat16>>(a, ElementType::kBf16, transposed, tile, "a2a_gemm");
        // Parts of 64 columns do not divide what a CTA of a cluster loads of w [N,K], 96.
        if (transposed && tile == TilePolicy::k128x192) continue;
        Check<GemmA2aFixture<__nv_bfloat16>>(b, ElementType::kBf16, transposed, tile, "gemm_a2a");
      }
      Check<GemmA2aFixture<__nv_bfloat16>>(b, ElementType::kBf16, transposed, TilePolicy::k128x256,
                                           "gemm_a2a");
      Check<A2aGemmFixture<__half>>(a, ElementType::kF16, transposed, TilePolicy::kAuto,
                                    "a2a_gemm");
      Check<GemmA2aFixture<__half>>(b, ElementType::kF16, transposed, TilePolicy::kAuto,
                                    "gemm_a2a");
    }
  }
  std::printf("launch_test: %d failed\n", g_failures);
  return g_failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace jax_ulysses::testing

int main() { return jax_ulysses::testing::Main(); }
