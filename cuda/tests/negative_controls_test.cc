// SPDX-License-Identifier: Apache-2.0
// Each edge of the protocol removed, one at a time: the tests must see it. Every control runs the
// same world twice, complete and without the edge, so that it is the edge that makes the
// difference. Edges that only order memory (release, acquire) are seen by ThreadSanitizer instead
// (race_control.cc), because x86 hardly ever reorders what they order.
#include "check.h"
#include "world.h"

namespace jax_ulysses::testing {
namespace {

using Misbehave = WorldOptions::Misbehave;

// `bad` must hold in some run without the edge and in no run with it. The threads decide how the
// run goes, so the run without the edge may be repeated.
template <uint32_t kEdge, class Bad>
void Control(const char* name, const WorldOptions& options, Bad&& bad) {
  const bool with = bad(World<>(options).Run());
  bool without = false;
  int runs = 0;
  for (; runs < 20 && !without; ++runs) without = bad(World<kEdge>(options).Run());
  std::printf("%-12s removed: seen after %d run(s)%s\n", name, runs, without ? "" : ", NOT SEEN");
  JU_CHECK(!with);
  JU_CHECK(without);
}

bool Wrong(const WorldResult& result) { return result.mismatches > 0; }

void DataEdges() {
  WorldOptions options;
  options.epochs = 100;
  options.late_one_in = 8;
  options.late_us = 500;
  // Without the credit a rank also overwrites entries that others still wait for.
  options.deadline_ms = 1000;
  options.traffic = Traffic::kPull;
  options.late_reader = false;
  Control<kEdgeTileWait>("tile wait", options, Wrong);
  options.traffic = Traffic::kPush;
  Control<kEdgePieceWait>("piece wait", options, Wrong);
  // With two slots every rank's next call already waits for data of all others, which they send
  // only after they have finished: the credit is then implied. One slot shows that it works.
  options.late_writer = false;
  options.late_reader = true;
  options.num_slots = 1;
  options.handshake = false;
  Control<kEdgeCreditWait>("credit", options, Wrong);
  options.traffic = Traffic::kPull;
  Control<kEdgeCreditWait>("credit, pull", options, Wrong);
}

void ExitEdge() {
  WorldOptions options;
  options.epochs = 100;
  options.late_one_in = 8;
  Control<kEdgeExitWait>("exit wait", options,
                         [](const WorldResult& result) { return result.early_exits > 0; });
}

void FailureEdges() {
  WorldOptions options;
  options.epochs = 6;
  options.misbehave = Misbehave::kOtherShape;
  Control<kEdgeEntryWait>("entry wait", options, [](const WorldResult& result) {
    return result.faults[0].kind != FaultKind::kDisagreement;
  });

  options.misbehave = Misbehave::kRaises;
  options.deadline_ms = 1500;
  Control<kEdgeAbortCheck>("abort check", options, [](const WorldResult& result) {
    int64_t longest = 0;
    for (int64_t ms : result.wait_ms) longest = longest < ms ? ms : longest;
    return longest > 1000;
  });

  options.misbehave = Misbehave::kNeverArrives;
  options.deadline_ms = 100;
  options.bad_us = 1500000;
  Control<kEdgeDeadline>("deadline", options, [](const WorldResult& result) {
    return result.faults[1].kind != FaultKind::kEntryTimeout;
  });
}

// Flags and counters compared as plain numbers would fail at the wrap: the start of a run just
// below 2^32 is itself a control for InitControlWords. Here the ready flags begin at zero.
void StartNearWrap() {
  HeapLayout layout;
  layout.num_ranks = 1;
  const auto heap = MakeHostHeap(layout, 0xffffffffu - 1);
  CallInfo call;
  call.peers = heap->Peers(0);
  call.layout = layout;
  call.deadline_ns = 1000000;
  RankProtocol<HostMemory> protocol(call);
  JU_CHECK(protocol.epoch() == 0xffffffffu);
  JU_CHECK(!protocol.WaitTile(0, 3));
  JU_CHECK(protocol.ReadFault().kind == FaultKind::kTileTimeout);
  JU_CHECK(protocol.ReadFault().tile == 3);
  const auto zeroed = MakeHostHeap(layout, 0);
  CallInfo other = call;
  other.peers = zeroed->Peers(0);
  char* epoch = other.peers.heap[0] + layout.epoch();
  HostMemory::StoreRelaxed(reinterpret_cast<uint32_t*>(epoch), 0xffffffffu - 1);
  RankProtocol<HostMemory> wrong(other);
  JU_CHECK(wrong.WaitTile(0, 3));  // a flag that nobody raised
}

}  // namespace
}  // namespace jax_ulysses::testing

int main() {
  jax_ulysses::testing::DataEdges();
  jax_ulysses::testing::ExitEdge();
  jax_ulysses::testing::FailureEdges();
  jax_ulysses::testing::StartNearWrap();
  return jax_ulysses::testing::Finish("negative_controls_test");
}
