// SPDX-License-Identifier: Apache-2.0
// The protocol with real threads: every word right, over many epochs, late ranks, wrap-around of
// slots and epochs; and what ranks learn when one of them fails.
#include "check.h"
#include "world.h"

namespace jax_ulysses::testing {
namespace {

using Misbehave = WorldOptions::Misbehave;

constexpr long kEpochs = 10000;
#if defined(__SANITIZE_THREAD__)
constexpr long kShortEpochs = 150;
#else
constexpr long kShortEpochs = 400;
#endif

void CheckClean(const WorldOptions& options) {
  const WorldResult result = World<>(options).Run();
  JU_CHECK(result.mismatches == 0);
  JU_CHECK(result.completed_calls == options.epochs * options.num_ranks);
  for (const Fault& fault : result.faults) JU_CHECK(fault.kind == FaultKind::kNone);
  if (options.handshake) JU_CHECK(result.early_exits == 0);
}

void LongRuns() {
  for (int64_t ranks : {2, 4, 8}) {
    WorldOptions options;
    options.num_ranks = ranks;
    options.epochs = Scaled(kEpochs);
    // Passes 2^32 in the middle of the run.
    options.start_epoch = static_cast<uint32_t>(-options.epochs / 2);
    CheckClean(options);
  }
}

void LateRanks() {
  for (int64_t ranks : {1, 2, 3, 4, 8}) {
    for (int64_t slots : {1, 2, 4}) {
      for (bool handshake : {true, false}) {
        WorldOptions options;
        options.num_ranks = ranks;
        options.num_slots = slots;
        options.handshake = handshake;
        options.epochs = Scaled(kShortEpochs);
        options.start_epoch = 0xffffffffu - 20;
        options.late_one_in = 40;
        CheckClean(options);
        options.two_roles = true;
        options.epochs = Scaled(kShortEpochs / 4);
        CheckClean(options);
      }
    }
  }
}

// A rank that comes late, but before the deadline, is no fault.
void LateButInTime() {
  WorldOptions options;
  options.epochs = 10;
  options.deadline_ms = 10000;
  options.misbehave = Misbehave::kLate;
  options.bad_us = 50000;
  CheckClean(options);
}

WorldResult Faulty(Misbehave misbehave, int64_t deadline_ms, int64_t bad_us, bool handshake) {
  WorldOptions options;
  options.epochs = 20;
  options.misbehave = misbehave;
  options.bad_rank = 2;
  options.bad_us = bad_us;
  options.deadline_ms = deadline_ms;
  options.handshake = handshake;
  const WorldResult result = World<>(options).Run();
  JU_CHECK(result.mismatches == 0);
  // Nobody gets past the bad call by more than the slots allow.
  JU_CHECK(result.completed_calls <= 4 * (options.bad_call + 2));
  for (const Fault& fault : result.faults) {
    JU_CHECK(fault.kind != FaultKind::kNone);
    JU_CHECK(fault.op == Operator::kGemmA2a);
    JU_CHECK(fault.epoch >= options.bad_call + 1 && fault.epoch <= options.bad_call + 2);
  }
  return result;
}

void Faults() {
  for (bool handshake : {true, false}) {
    WorldResult never = Faulty(Misbehave::kNeverArrives, 150, 30000000, handshake);
    for (const Fault& fault : never.faults) {
      JU_CHECK(fault.kind == FaultKind::kEntryTimeout && fault.peer == 2 && fault.rank != 2);
    }
    // Too late: by then the others have left; it learns so at its first wait.
    WorldResult late = Faulty(Misbehave::kLate, 100, 1000000, handshake);
    for (const Fault& fault : late.faults) JU_CHECK(fault.kind == FaultKind::kEntryTimeout);
    // Found by comparing, long before the deadline.
    WorldResult shape = Faulty(Misbehave::kOtherShape, 20000, 0, handshake);
    for (const Fault& fault : shape.faults) {
      JU_CHECK(fault.kind == FaultKind::kDisagreement);
      JU_CHECK(fault.rank == 2 || fault.peer == 2);
    }
    for (int64_t ms : shape.wait_ms) JU_CHECK(ms < 5000);
    WorldResult raised = Faulty(Misbehave::kRaises, 20000, 10000, handshake);
    for (const Fault& fault : raised.faults) {
      JU_CHECK(fault.kind == FaultKind::kThrown && fault.rank == 2);
    }
    for (int64_t ms : raised.wait_ms) JU_CHECK(ms < 5000);
  }
  // Deadline 0 waits until it is told to stop.
  WorldResult none = Faulty(Misbehave::kNeverArrives, 0, 300000, true);
  for (const Fault& fault : none.faults) JU_CHECK(fault.kind == FaultKind::kThrown);
}

static_assert(Reached(5, 5) && Reached(6, 5) && !Reached(4, 5));
static_assert(Reached(2, 0xfffffffeu) && !Reached(0xfffffffeu, 2));

}  // namespace
}  // namespace jax_ulysses::testing

int main() {
  jax_ulysses::testing::LongRuns();
  jax_ulysses::testing::LateRanks();
  jax_ulysses::testing::LateButInTime();
  jax_ulysses::testing::Faults();
  return jax_ulysses::testing::Finish("protocol_test");
}
