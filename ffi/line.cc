// SPDX-License-Identifier: Apache-2.0
#include "line.h"

#include <sstream>
#include <utility>

namespace jax_ulysses {
namespace {

constexpr const char* kRecover =
    " This group is closed: call jax_ulysses.finalize() and then jax_ulysses.initialize() to use "
    "it again.";

}  // namespace

const char* OperatorName(Operator op) {
  switch (op) {
    case Operator::kScatter:
      return "jax_ulysses.exchange.v1 (scatter)";
    case Operator::kGather:
      return "jax_ulysses.exchange.v1 (gather)";
    case Operator::kGemmA2a:
      return "jax_ulysses.gemm_a2a.v1";
    case Operator::kA2aGemm:
      return "jax_ulysses.a2a_gemm.v1";
    case Operator::kPsum:
      return "jax_ulysses.psum.v1";
    case Operator::kNone:
      break;
  }
  return "jax_ulysses";
}

Line::Line(const GroupConfig& config, int32_t index, const std::vector<Member>& members,
           const HeapFactory& make_heap)
    : session_(config.session),
      index_(index),
      deadline_ms_(config.deadline_ms),
      sm_budget_(config.sm_budget),
      comm_ctas_(config.comm_ctas),
      order_(config.num_ranks) {
  if (config.platform == "cpu") {
    layout_.num_ranks = config.num_ranks;
    layout_.num_slots = config.num_slots;
    layout_.slot_bytes = config.slot_bytes;
  } else {
    layout_ = KernelLayout(config.num_ranks, config.slot_bytes, config.num_slots);
  }
  heap_ = make_heap(layout_, deadline_ms_, config.start_epoch, members);
  for (int i = 0; i < config.num_ranks; ++i) ranks_.push_back(std::make_unique<RankState>());
}

CallInfo Line::MakeCall(int rank, Operator op, uint32_t agreement) const {
  CallInfo call;
  call.peers = heap_->Peers(rank);
  call.layout = layout_;
  call.rank = rank;
  call.op = op;
  call.agreement = agreement;
  call.deadline_ns = static_cast<uint64_t>(deadline_ms_) * 1000000u;
  return call;
}

void Line::Inject(int rank, InjectedFault fault) {
  std::lock_guard<std::mutex> lock(mutex_);
  ranks_[static_cast<size_t>(rank)]->injected = fault;
}

InjectedFault Line::TakeInjected(int rank) {
  std::lock_guard<std::mutex> lock(mutex_);
  return std::exchange(ranks_[static_cast<size_t>(rank)]->injected, InjectedFault{});
}

std::string Line::Close(const std::string& text) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (closed_text_.empty()) closed_text_ = text + kRecover;
  return closed_text_;
}

std::string Line::closed_text() {
  const Fault fault = heap_->PollFault();
  if (fault.kind != FaultKind::kNone) return Close(Describe(fault));
  std::lock_guard<std::mutex> lock(mutex_);
  return closed_text_;
}

std::string Line::Describe(const Fault& fault) const {
  std::ostringstream text;
  text << OperatorName(fault.op) << ": rank " << fault.rank;
  switch (fault.kind) {
    case FaultKind::kCreditTimeout:
      text << " waited for rank " << fault.peer << " to finish an earlier call";
      break;
    case FaultKind::kEntryTimeout:
      text << " waited for rank " << fault.peer << " to enter the call";
      break;
    case FaultKind::kTileTimeout:
      text << " waited for tile " << fault.tile << " of rank " << fault.peer;
      break;
    case FaultKind::kPieceTimeout:
      text << " waited for row block (tile) " << fault.tile << " of rank " << fault.peer;
      break;
    case FaultKind::kExitTimeout:
      text << " waited for rank " << fault.peer << " to finish the call";
      break;
    case FaultKind::kDisagreement:
      text << " and rank " << fault.peer
           << " disagree on this call: operator, shapes, dtype, token order or order of calls "
              "differ";
      break;
    case FaultKind::kRankMismatch:
      text
          << " of the group is rank " << static_cast<int32_t>(fault.detail)
          << " in this program: the program runs on a mesh whose device order differs from the one "
             "given to initialize";
      break;
    case FaultKind::kThrown:
      text << " failed";
      break;
    case FaultKind::kClosed:
    case FaultKind::kNone:
      text << " was interrupted";
      break;
  }
  text << ", epoch " << fault.epoch;
  const bool timeout =
      fault.kind >= FaultKind::kCreditTimeout && fault.kind <= FaultKind::kExitTimeout;
  if (timeout) text << ", deadline of " << deadline_ms_ << " ms passed";
  text << " (session " << session_ << ", line " << index_ << ").";
  return text.str();
}

void Line::WaitForLaunches() {
  for (const auto& rank : ranks_) std::lock_guard<std::mutex> wait(rank->call_mutex);
}

HeapLayout KernelLayout(int32_t num_ranks, int64_t slot_bytes, int64_t num_slots) {
  HeapLayout layout;
  layout.num_ranks = num_ranks;
  layout.num_slots = num_slots;
  layout.slot_bytes = slot_bytes;
  // gemm_a2a raises one for 128 rows by 128 columns: 2^18 rows of 2^13 columns from each source.
  layout.flags_per_source = 1 << 17;
  layout.blocks_per_source = 32;
  return layout;
}

}  // namespace jax_ulysses
