// SPDX-License-Identifier: Apache-2.0
// Operands, slots and results of more than 2^31 elements, all ranks in one launch: offsets that do
// not fit into 32 bits. Values against the oracles of the other tests. One line a case; exit code 1
// if any fails. Needs 90 GB.
#include "exchange_fixture.cuh"
#include "fixture.cuh"
#include "stress.cuh"
#include "test_entries.h"

namespace jax_ulysses::testing {
namespace {

constexpr int kTokens = 270336;  // times 8192 columns: 2^31 and 3 % more

// One of the two dimensions beside the tokens is 8192: that of the heads, or that of the model. The
// second shape has two batches, zigzag order and tiles that straddle runs of rows.
Shape WideHeads(bool push) {
  Shape s;
  s.ranks = 2, s.tokens = kTokens, s.heads = {64}, s.head_dim = 128, s.model = 64;
  s.gathered = push;
  return s;
}
Shape WideModel() {
  Shape s;
  s.ranks = 2, s.batch = 2, s.tokens = kTokens / 2 + 2, s.heads = {2}, s.head_dim = 128;
  s.model = 8192, s.zigzag = true, s.bias = true;
  return s;
}

std::string Text(const Shape& shape, const Difference& d) {
  char text[128];
  std::snprintf(text, sizeof text, "%s rel %.2e bad %llu", shape.Text().c_str(), d.relative, d.bad);
  return text;
}

template <class Fixture>
void Check(const Shape& shape, const KernelEntry<typename Fixture::Call>& entry, const char* name) {
  Fixture f(shape, entry);
  WorldLaunch<typename Fixture::Call> launch(entry, f.Calls(0),
                                             PlanFor(shape.ranks, Fixture::kPush));
  f.PoisonOutputs();
  f.heaps().PoisonSlots(nullptr);
  launch.Run(nullptr);
  CK(cudaDeviceSynchronize());
  const Difference d = f.CheckNorm();
  Line(d.relative < 4e-3 && d.bad == 0, name, Text(shape, d));
}

// A gather, exact, and a scatter of what it gathered, which gives back the input.
void CheckExchange(const Shape& shape) {
  const auto entry = TestExchangeEntry();
  ExchangeFixture f(shape, entry);
  const LaunchPlan plan = PlanFor(shape.ranks, false);
  f.PoisonOutputs();
  f.heaps().PoisonSlots(nullptr);
  WorldLaunch<ExchangeCall>(entry, f.Calls(0), plan).Run(nullptr);
  CK(cudaDeviceSynchronize());
  const Difference d = f.CheckNorm();
  Line(d.relative == 0 && d.bad == 0, "gather ", Text(shape, d));
  WorldLaunch<ExchangeCall>(entry, f.ScatterBack(), plan).Run(nullptr);
  const unsigned long long wrong = f.WrongBack();
  Line(wrong == 0, "scatter", shape.Text() + " wrong " + std::to_string(wrong));
}

int Main() {
  using A2a = A2aGemmFixture<__nv_bfloat16>;
  using Ga = GemmA2aFixture<__nv_bfloat16>;
  const auto a2a = A2aGemmEntries();
  const auto ga = GemmA2aEntries();
  for (int tile : {0, 1}) {  // 128x256 and 128x128
    Check<A2a>(WideHeads(true), a2a[tile], Name(a2a[tile], "a2a_gemm").c_str());
    Check<A2a>(WideModel(), a2a[tile], Name(a2a[tile], "a2a_gemm").c_str());
    Check<Ga>(WideHeads(false), ga[tile], Name(ga[tile], "gemm_a2a").c_str());
    Check<Ga>(WideModel(), ga[tile], Name(ga[tile], "gemm_a2a").c_str());
  }
  Shape shape = WideHeads(false);
  CheckExchange(shape);
  shape.heads = {2}, shape.head_dim = 4100;  // no whole vectors
  shape.zigzag = true;
  CheckExchange(shape);
  shape = WideModel();
  shape.zigzag = false;
  Check<PsumFixture>(shape, TestPsumEntry(), "psum");
  std::printf("huge_test: %d failed\n", g_failures);
  return g_failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace jax_ulysses::testing

int main() { return jax_ulysses::testing::Main(); }
