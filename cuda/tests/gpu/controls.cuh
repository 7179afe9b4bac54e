// SPDX-License-Identifier: Apache-2.0
// Negative controls: the same traffic with and without one edge. It must go wrong without, by the
// test's own means or by those of the adversary (test_hooks.h), and never with.
#ifndef JAX_ULYSSES_TESTS_GPU_CONTROLS_CUH_
#define JAX_ULYSSES_TESTS_GPU_CONTROLS_CUH_

#include "faults.cuh"

namespace jax_ulysses::testing {

// How the traffic of a control runs.
struct Variant {
  Shape shape;
  float ns_per_byte = 0;       // of the link
  uint32_t max_delay_ns = 0;   // by which ranks are late
  uint32_t copy_delay_ns = 0;  // of rank 0, before every chunk
};

enum class Seen { kNever, kAlone, kByAdversary };

struct Control {
  const char* name;
  uint32_t edge;
  Seen expected = Seen::kNever;  // kNever: printed, but nothing depends on it
  // One slot and a launch a rank: with two slots the data that ranks wait for implies the credit.
  bool one_slot = false;
};

inline constexpr Control kNothing[] = {{"nothing", kEdgeNone, Seen::kNever},
                                       {"nothing, one slot", kEdgeNone, Seen::kNever, true}};
inline constexpr Control kCommonControls[] = {
    {"tile wait", kEdgeTileWait, Seen::kAlone},
    {"credit wait, one slot", kEdgeCreditWait, Seen::kAlone, true},
    {"tile release", kEdgeTileRelease, Seen::kByAdversary},
    {"done release, one slot", kEdgeDoneRelease, Seen::kByAdversary, true}};
// Of those who have a copy ring,
inline constexpr Control kRingControls[] = {{"ring", kEdgeRing, Seen::kByAdversary}};
// (or move 1 KB at a time, which is read before the adversary can overwrite it: the same code)
inline constexpr Control kShortRingControls[] = {{"ring", kEdgeRing, Seen::kNever}};
// who write slots with bulk copies (gemm_a2a stores from registers),
inline constexpr Control kBulkWriteControls[] = {
    {"full wait -> .read", kEdgeBulkComplete, Seen::kByAdversary}};
// who read them so, past every cache but L2,
inline constexpr Control kBulkReadControls[] = {{"acquire fence", kEdgeAcquire, Seen::kNever},
                                                {"proxy fence", kEdgeProxyFence, Seen::kNever}};
// with asynchronous copies of the generic proxy, which pass L1 by too,
inline constexpr Control kL2ReadControls[] = {{"acquire fence", kEdgeAcquire, Seen::kNever}};
// or with plain loads, where L1 may hold what was there before.
inline constexpr Control kPlainReadControls[] = {
    {"acquire fence", kEdgeAcquire, Seen::kByAdversary}};
inline constexpr Control kHandOffControls[] = {{"hand-off", kEdgeHandOff, Seen::kAlone}};
// Of gemm_a2a over real links: its publisher is at most a few tiles ahead, and small tiles are
// stored before a peer comes for them, unless the adversary holds them back.
inline constexpr Control kLinkHandOffControls[] = {{"hand-off", kEdgeHandOff, Seen::kByAdversary}};
inline constexpr Control kWatcherControls[] = {{"arrivals", kEdgeArrivals, Seen::kAlone}};
// With a gathered operand: of the tiles that are stored out of the pipeline.
inline constexpr Control kCopyControls[] = {{"tile copy", kEdgeCopyFull, Seen::kAlone},
                                            {"tile copy, read", kEdgeCopyRead, Seen::kByAdversary}};
inline constexpr Control kPlanControls[] = {{"tile plan", kEdgeTilePlan, Seen::kAlone}};
// With slots across PCIe: by nothing but distance.
inline constexpr Control kFarControls[] = {{"nothing, far slots", kEdgeNone},
                                           {"tile release, far slots", kEdgeTileRelease}};
inline constexpr Control kFarBulkControls[] = {{"full wait, far slots", kEdgeBulkComplete}};

template <class Fixture>
class Controls {
 public:
  using Call = typename Fixture::Call;
  Controls(const KernelEntry<Call>& entry, const char* op, std::vector<Variant> variants,
           int launches)
      : entry_(entry), op_(op), variants_(std::move(variants)), launches_(launches) {}

  void Run(const Control& control) {
    const int alone = Count(control, false), adversary = Count(control, true);
    bool ok = true;
    if (control.edge == kEdgeNone) ok = alone == 0 && adversary == 0;
    if (control.expected == Seen::kAlone) ok = alone > 0;
    if (control.expected == Seen::kByAdversary) ok = adversary > 0;
    char text[160];
    const int runs = static_cast<int>(variants_.size());
    std::snprintf(text, sizeof text, "without %-26s caught in %d of %d runs, adversary %d of %d",
                  control.name, alone, runs, adversary, runs);
    Line(ok, op_, text);
  }

 private:
  // Runs in which something was wrong.
  int Count(const Control& control, bool adversary) {
    int caught = 0;
    for (size_t i = 0; i < variants_.size(); ++i) {
      const Variant& v = variants_[i];
      Shape shape = v.shape;
      if (control.one_slot) shape.slots = 1;
      Fixture f(shape, entry_);
      f.deadline_ns = 100000000;
      if (!MakeReference(f)) Line(false, op_, "reference of a negative control");
      auto change = [&](Call& call, int rank) {
        call.hooks.removed_edges = control.edge;
        call.hooks.adversary = adversary;
        call.hooks.ns_per_byte = v.ns_per_byte;
        if (rank == 0) call.hooks.copy_delay_ns = v.copy_delay_ns;
        if (adversary) call.hooks.epilogue_delay_ns = 10000;
      };
      // Old bytes can only be read where data comes late.
      const uint32_t delay = adversary ? 300000 : v.max_delay_ns;
      const auto seed = static_cast<unsigned>(i + 10);
      unsigned long long bad = 0;
      if (control.one_slot || g_devices > 1) {
        std::mt19937 random(seed);
        bad = StressStreams(f, launches_, [&](Call& call, int rank, int) {
          change(call, rank);
          if (control.one_slot) {
            // A reader that is late by more than a call of the others takes.
            if (rank == 0) call.hooks.read_delay_ns = 300000;
          } else if (delay > 0 && random() % 2 == 0) {
            call.hooks.start_delay_ns = random() % delay;
          }
        });
      } else {
        bad = Stress(f, launches_, seed, delay, change, false);
      }
      caught += bad != 0;
    }
    return caught;
  }

  KernelEntry<Call> entry_;
  const char* op_;
  std::vector<Variant> variants_;
  int launches_;
};

// `small` comes over a slow link, with late ranks and with slow copies; `big` as fast as it goes.
inline std::vector<Variant> Variants(Shape small, const Shape& big) {
  std::vector<Variant> variants;
  small.ranks = 4;
  variants.push_back({small, 0.2f, 300000, 0});
  small.ranks = 2;
  variants.push_back({small, 0, 300000, 3000});
  variants.push_back({big, 0, 0, 0});
  return variants;
}

template <class Fixture, class... Lists>
void NegativeControls(const KernelEntry<typename Fixture::Call>& entry, const char* op,
                      const std::vector<Variant>& variants, int launches, const Lists&... lists) {
  Controls<Fixture> controls(entry, op, variants, launches);
  auto run = [&](const auto& list) {
    for (const Control& control : list) controls.Run(control);
  };
  run(kNothing);
  run(kCommonControls);
  (run(lists), ...);
  FaultControls<Fixture>(variants[0].shape, entry, op);
}

// `big` at full rate, with slots across PCIe: ranks and amounts vary.
template <class Fixture>
void FarControls(const KernelEntry<typename Fixture::Call>& entry, const char* op, Shape big,
                 int launches, bool bulk) {
  big.far = true;
  Shape two = big, long_one = big;
  two.ranks = 2;
  long_one.tokens *= 2;
  Controls<Fixture> controls(entry, op, {{big}, {two}, {long_one}}, launches);
  for (const Control& control : kFarControls) controls.Run(control);
  for (const Control& control : kFarBulkControls) {
    if (bulk) controls.Run(control);
  }
}

}  // namespace jax_ulysses::testing

#endif  // JAX_ULYSSES_TESTS_GPU_CONTROLS_CUH_
