// SPDX-License-Identifier: Apache-2.0
// Faults of one rank: all others end in time, with NaN in their outputs and a record; and the
// negative controls of what makes them do so.
#ifndef JAX_ULYSSES_TESTS_GPU_FAULTS_CUH_
#define JAX_ULYSSES_TESTS_GPU_FAULTS_CUH_

#include <chrono>
#include <thread>

#include "stress.cuh"

namespace jax_ulysses::testing {

// Four ranks, of which some do wrong.
template <class Fixture>
class FaultWorld {
 public:
  using Call = typename Fixture::Call;
  static constexpr int kRanks = 4;
  struct Outcome {
    float ms = 0;
    bool released = false;  // it did not end by itself
    int records = 0;
    Fault fault;           // of the last record
    double nan_share = 1;  // least of the ranks that took part
  };

  FaultWorld(const Shape& shape, const KernelEntry<Call>& entry, uint64_t deadline_ms)
      : f_(shape, entry), program_ranks_(4 * kRanks) {
    f_.deadline_ns = deadline_ms * 1000000;
    good_ = MakeReference(f_);
    CK(cudaHostAlloc(&mailbox_, sizeof(FaultMailbox) * kRanks, cudaHostAllocMapped));
    const int32_t ranks[kRanks] = {0, 1, 2, 3};
    CK(cudaMemcpy(program_ranks_.get(), ranks, sizeof ranks, cudaMemcpyHostToDevice));
  }
  ~FaultWorld() { cudaFreeHost(mailbox_); }

  Fixture& fixture() { return f_; }
  bool good() const { return good_; }
  const int32_t* program_rank(int rank) const {
    return reinterpret_cast<const int32_t*>(program_ranks_.get()) + rank;
  }
  std::vector<Call> Calls(int set = 0) const {
    auto calls = f_.Calls(set);
    for (int r = 0; r < kRanks; ++r) {
      calls[r].mailbox = mailbox_ + r;
      calls[r].info.program_rank = program_rank(r);
    }
    return calls;
  }
  // One launch. If it has not ended after `patience_ms`, the host raises the abort word.
  Outcome Run(const std::vector<Call>& calls, int patience_ms) {
    std::memset(mailbox_, 0, sizeof(FaultMailbox) * kRanks);
    f_.PoisonOutputs();
    // What is left in the slots must not be NaN by itself.
    for (int r = 0; r < kRanks; ++r) {
      CK(cudaMemset(f_.heaps().Slot(r, 0), 0,
                    f_.heaps().layout().num_slots * f_.heaps().layout().slot_stride()));
    }
    WorldLaunch<Call> launch(f_.entry(), calls, PlanFor(kRanks, Fixture::kPush));
    CK(cudaDeviceSynchronize());
    cudaEvent_t end;
    CK(cudaEventCreateWithFlags(&end, cudaEventDisableTiming));
    const auto start = std::chrono::steady_clock::now();
    auto ms = [&] {
      return std::chrono::duration<float, std::milli>(std::chrono::steady_clock::now() - start)
          .count();
    };
    launch.Run(nullptr);
    CK(cudaEventRecord(end));
    while (cudaEventQuery(end) == cudaErrorNotReady && ms() < patience_ms) {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    Outcome outcome;
    outcome.released = cudaEventQuery(end) == cudaErrorNotReady;
    if (outcome.released) f_.heaps().RaiseAbort();
    CK(cudaDeviceSynchronize());
    outcome.ms = ms();
    for (int r = 0; r < kRanks; ++r) {
      if (calls[r].hooks.absent) continue;
      outcome.nan_share = std::min(outcome.nan_share, f_.NanShare(r));
      if (mailbox_[r].ready != 1 || mailbox_[r].words[0] == 0) continue;
      ++outcome.records;
      const uint32_t* words = mailbox_[r].words;
      outcome.fault.kind = static_cast<FaultKind>(words[0]);
      outcome.fault.rank = static_cast<int32_t>(words[1]);
      outcome.fault.peer = static_cast<int32_t>(words[2]);
      outcome.fault.detail = words[6];
    }
    CK(cudaEventDestroy(end));
    return outcome;
  }

 private:
  Fixture f_;
  Buffer program_ranks_;
  FaultMailbox* mailbox_ = nullptr;
  bool good_ = false;
};

template <class Fixture>
void Faults(const Shape& shape, const KernelEntry<typename Fixture::Call>& entry, const char* op) {
  for (const std::string kind : {"absent", "late", "call", "both", "rank"}) {
    FaultWorld<Fixture> world(shape, entry, 20);
    auto calls = world.Calls();
    if (kind == "absent") calls[1].hooks.absent = 1;
    if (kind == "late") calls[1].hooks.start_delay_ns = 60000000;
    if (kind == "call" || kind == "both") calls[1].info.agreement ^= 1;
    if (kind == "both") calls[2].hooks.absent = 1;
    // The program takes rank 1 for rank 3.
    if (kind == "rank") calls[1].info.program_rank = world.program_rank(3);
    const auto met = world.Run(calls, 1000);
    const int present = kind == "absent" || kind == "both" ? 3 : 4;
    bool ok = world.good() && !met.released && met.ms < 120 && met.nan_share == 1.0 &&
              met.records == present;
    if (kind == "call") {
      ok = ok && met.fault.kind == FaultKind::kDisagreement;
    } else if (kind == "both") {
      // Known at once, though a peer is still waited for.
      ok = ok && met.fault.kind == FaultKind::kDisagreement && met.ms < 15;
    } else if (kind == "rank") {
      ok = ok && met.fault.kind == FaultKind::kRankMismatch && met.fault.rank == 1 &&
           met.fault.detail == 3 && met.ms < 15;
    } else {
      ok = ok && met.fault.kind < FaultKind::kDisagreement && met.fault.peer == 1;
    }
    // The group stays unusable: at once, and with NaN, whatever the outputs held.
    const auto next = world.Run(world.Calls(1), 1000);
    ok = ok && !next.released && next.ms < 15 && next.nan_share == 1.0 && next.records == 4;
    // Until the control words are prepared again.
    Fixture& f = world.fixture();
    f.heaps().Reset(7);
    WorldLaunch<typename Fixture::Call> again(entry, world.Calls(), PlanFor(4, Fixture::kPush));
    f.PoisonOutputs();
    again.Run(nullptr);
    f.CompareReference(1.0f);
    const auto bad = f.TakeBad();
    char text[200];
    std::snprintf(text, sizeof text,
                  "fault %-6s: ended after %.1f ms (deadline 20), %d records, kind %u, next call "
                  "%.2f ms, after reset wrong %llu",
                  kind.c_str(), met.ms, met.records, static_cast<unsigned>(met.fault.kind), next.ms,
                  bad);
    Line(ok && bad == 0, op, text);
  }
}

// Without the edge, and only without it, something about a fault goes wrong.
template <class Fixture>
void FaultControls(const Shape& shape, const KernelEntry<typename Fixture::Call>& entry,
                   const char* op) {
  using World = FaultWorld<Fixture>;
  using Call = typename Fixture::Call;
  using Outcome = typename World::Outcome;
  auto control = [&](const char* name, uint32_t edge, uint64_t deadline_ms, auto provoke,
                     auto wrong) {
    Outcome outcome[2];
    bool seen[2];
    for (int removed = 0; removed < 2; ++removed) {
      World world(shape, entry, deadline_ms);
      auto calls = world.Calls();
      for (Call& call : calls) call.hooks.removed_edges = removed ? edge : kEdgeNone;
      provoke(world, calls);
      outcome[removed] = world.Run(calls, 400);
      seen[removed] = !world.good() || wrong(outcome[removed]);
    }
    char text[200];
    std::snprintf(
        text, sizeof text, "without %-26s %s (%.1f ms, kind %u%s; complete %.1f ms, kind %u%s)",
        name, seen[1] ? "caught" : "NOT CAUGHT", outcome[1].ms,
        static_cast<unsigned>(outcome[1].fault.kind), outcome[1].released ? ", hung" : "",
        outcome[0].ms, static_cast<unsigned>(outcome[0].fault.kind), seen[0] ? ", WRONG" : "");
    Line(seen[1] && !seen[0], op, text);
  };
  control(
      "entry check", kEdgeEntryWait, 20,
      [](World&, std::vector<Call>& calls) { calls[1].info.agreement ^= 1; },
      [](const Outcome& o) { return o.fault.kind != FaultKind::kDisagreement || o.records != 4; });
  // Rank 2 raises the abort at once, rank 1 never comes: the others need not wait for it.
  control(
      "abort check", kEdgeAbortCheck, 100,
      [](World& world, std::vector<Call>& calls) {
        calls[1].hooks.absent = 1;
        calls[2].info.program_rank = world.program_rank(0);
      },
      [](const Outcome& o) { return o.ms > 90 || o.released; });
  control(
      "deadline", kEdgeDeadline, 20,
      [](World&, std::vector<Call>& calls) { calls[1].hooks.absent = 1; },
      [](const Outcome& o) { return o.released; });
}

}  // namespace jax_ulysses::testing

#endif  // JAX_ULYSSES_TESTS_GPU_FAULTS_CUH_
