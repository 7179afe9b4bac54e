// SPDX-License-Identifier: Apache-2.0
// The two fused operators with a GPU a rank, in one process, over their real links: values, many
// launches with late ranks, and the negative controls. On one GPU data mostly arrives before its
// flag whatever a kernel does; here both travel. Exit code 1 if a line fails.
// Usage: devices_test [launches] [GPUs]
#include "controls.cuh"
#include "test_entries.h"

namespace jax_ulysses::testing {
namespace {

// Every launch against the reference bit by bit. Rank 0 is up to 0.3 ms late in one run.
template <class Fixture>
void StressDevices(const KernelEntry<typename Fixture::Call>& entry, const char* op, int launches) {
  using Call = typename Fixture::Call;
  for (const bool zigzag : {false, true}) {
    Fixture f(StressShape(g_devices, Fixture::kPush, zigzag), entry);
    const bool good = MakeReference(f);
    std::mt19937 random(7);
    const auto bad = StressStreams(f, launches, [&](Call& call, int rank, int) {
      const uint32_t longest = zigzag && rank == 0 ? 300000 : 30000;
      call.hooks.start_delay_ns = random() % 3 == 0 ? random() % longest : 0;
    });
    Line(good && bad == 0, op,
         f.shape().Text() + ", " + std::to_string(launches) + " calls with late ranks: wrong " +
             std::to_string(bad));
  }
}

template <class Fixture>
void ControlDevices(const KernelEntry<typename Fixture::Call>& entry, const char* op) {
  const Shape small = StressShape(g_devices, Fixture::kPush, false);
  Shape big = small;
  big.tokens = 2048, big.head_dim = 256;
  // Late ranks, slow copies, and as fast as the links go.
  const std::vector<Variant> variants = {
      {small, 0, 300000, 0}, {small, 0, 300000, 3000}, {big, 0, 0, 0}};
  Controls<Fixture> controls(entry, op, variants, 30);
  auto run = [&](const auto& list) {
    for (const Control& control : list) controls.Run(control);
  };
  run(kNothing);
  run(kCommonControls);
  run(kRingControls);
  if (Fixture::kPush) run(kBulkWriteControls);
  run(kBulkReadControls);
  if (Fixture::kPush) {
    run(kHandOffControls);
  } else {
    run(kLinkHandOffControls);
  }
}

int Main(int argc, char** argv) {
  const int launches = argc > 1 ? std::atoi(argv[1]) : 1000;
  int devices = 0;
  CK(cudaGetDeviceCount(&devices));
  if (argc > 2) devices = std::min(devices, std::atoi(argv[2]));
  if (devices < 2) {
    std::printf("devices_test needs two GPUs, and CUDA_MODULE_LOADING=EAGER\n");
    return 2;
  }
  SpreadOver(devices);
  using A2a = A2aGemmFixture<__nv_bfloat16>;
  using Ga = GemmA2aFixture<__nv_bfloat16>;
  StressDevices<A2a>(A2aGemmEntries()[0], "a2a_gemm", launches);
  StressDevices<Ga>(GemmA2aEntries()[0], "gemm_a2a", launches);
  ControlDevices<A2a>(A2aGemmEntries()[0], "a2a_gemm");
  ControlDevices<Ga>(GemmA2aEntries()[0], "gemm_a2a");
  std::printf("devices_test, %d GPUs: %d failed\n", devices, g_failures);
  return g_failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace jax_ulysses::testing

int main(int argc, char** argv) { return jax_ulysses::testing::Main(argc, argv); }
