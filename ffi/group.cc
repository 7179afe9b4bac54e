// SPDX-License-Identifier: Apache-2.0
#include "group.h"

#include <map>
#include <sstream>
#include <stdexcept>
#include <thread>
#include <utility>

#include "jax_ulysses/comm/host_memory.h"

namespace jax_ulysses {
namespace {

constexpr const char* kRecover =
    " This group is closed: call jax_ulysses.finalize() and then jax_ulysses.initialize() to use "
    "it again.";

struct Group {
  GroupConfig config;
  std::vector<std::shared_ptr<Line>> lines;
  std::map<int32_t, RankHandle> by_device;
};

struct Registry {
  std::mutex mutex;
  std::map<int64_t, Group> groups;
};

// Never destroyed: XLA's threads may outlive static destructors.
Registry& TheRegistry() {
  static Registry* registry = new Registry;
  return *registry;
}

std::invalid_argument Wrong(const GroupConfig& config, const std::string& what) {
  return std::invalid_argument("group_create(session=" + std::to_string(config.session) +
                               "): " + what);
}

std::invalid_argument UnknownSession(int64_t session) {
  return std::invalid_argument("no group for session " + std::to_string(session) +
                               ": call jax_ulysses.initialize(mesh, axis_name) first");
}

int32_t CheckConfig(const GroupConfig& config) {
  if (config.platform != "cpu") {
    throw Wrong(config, "platform '" + config.platform + "' is not built; this build has 'cpu'");
  }
  if (config.num_ranks < 1 || config.num_ranks > kMaxRanks) {
    throw Wrong(config, "num_ranks is " + std::to_string(config.num_ranks) + ", not in [1, " +
                            std::to_string(kMaxRanks) + "]");
  }
  if (config.num_slots < 2 || (config.num_slots & (config.num_slots - 1)) != 0) {
    throw Wrong(config, "num_slots is " + std::to_string(config.num_slots) +
                            ", not a power of two of at least 2");
  }
  if (config.slot_bytes < 0) throw Wrong(config, "slot_bytes is negative");
  if (config.deadline_ms < 0) throw Wrong(config, "deadline_ms is negative");
  const size_t per_line = static_cast<size_t>(config.num_ranks);
  if (config.members.empty() || config.members.size() % per_line != 0) {
    throw Wrong(config, std::to_string(config.members.size()) + " members do not form lines of " +
                            std::to_string(config.num_ranks));
  }
  const int32_t lines = static_cast<int32_t>(config.members.size() / per_line);
  std::map<std::pair<int32_t, int32_t>, int> places;
  std::map<int32_t, int> devices;
  for (const Member& m : config.members) {
    if (m.line < 0 || m.line >= lines || m.rank < 0 || m.rank >= config.num_ranks) {
      throw Wrong(config, "member (device " + std::to_string(m.device_ordinal) + ", line " +
                              std::to_string(m.line) + ", rank " + std::to_string(m.rank) +
                              ") is outside " + std::to_string(lines) + " lines of " +
                              std::to_string(config.num_ranks) + " ranks");
    }
    if (++places[{m.line, m.rank}] > 1) {
      throw Wrong(config, "line " + std::to_string(m.line) + " has rank " + std::to_string(m.rank) +
                              " twice");
    }
    if (++devices[m.device_ordinal] > 1) {
      throw Wrong(config, "device " + std::to_string(m.device_ordinal) + " appears twice");
    }
  }
  return lines;
}

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
    case Operator::kNone:
      break;
  }
  return "jax_ulysses";
}

Line::Line(const GroupConfig& config, int32_t index)
    : session_(config.session),
      index_(index),
      deadline_ms_(config.deadline_ms),
      order_(config.num_ranks) {
  layout_.num_ranks = config.num_ranks;
  layout_.num_slots = config.num_slots;
  layout_.slot_bytes = config.slot_bytes;
  heap_ = MakeHostHeap(layout_, config.start_epoch);
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

std::string Line::closed_text() const {
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

void Line::AbortAll() {
  const CallInfo call = MakeCall(0, Operator::kNone, 0);
  RankProtocol<HostMemory> protocol(call);
  // Only the words matter; the text was set by Close.
  protocol.Raise(FaultKind::kClosed, -1, -1);
}

namespace {

void PumpAfter(const RankHandle& handle);

// Starts the next call of a rank, if there is one.
void Pump(const RankHandle& handle) {
  Line& line = *handle.line;
  CallOrder::Job job = line.order().Take(handle.rank, !line.closed_text().empty());
  if (!job) return;
  std::thread([handle, job = std::move(job)] {
    const std::function<void()> done = job();
    handle.line->order().Finish(handle.rank);
    PumpAfter(handle);
    // Last: XLA goes on with the program inside of it, on this thread, and may block there.
    done();
  }).detach();
}

void PumpAll(const std::shared_ptr<Line>& line) {
  for (int32_t rank = 0; rank < line->layout().num_ranks; ++rank) Pump({line, rank});
}

void PumpAfter(const RankHandle& handle) {
  if (handle.line->closed_text().empty()) {
    Pump(handle);
  } else {
    // Calls that were held back for others which will never come: they now end with the error.
    PumpAll(handle.line);
  }
}

}  // namespace

void Submit(const RankHandle& handle, const CallKey& key, CallOrder::Job job) {
  handle.line->order().Arrive(handle.rank, key, std::move(job));
  Pump(handle);
}

void CreateGroup(const GroupConfig& config) {
  const int32_t num_lines = CheckConfig(config);
  Registry& registry = TheRegistry();
  std::lock_guard<std::mutex> lock(registry.mutex);
  if (registry.groups.count(config.session) != 0) {
    throw Wrong(config, "the session exists already; destroy it first");
  }
  Group group;
  group.config = config;
  for (int32_t i = 0; i < num_lines; ++i) group.lines.push_back(std::make_shared<Line>(config, i));
  for (const Member& m : config.members) {
    group.by_device[m.device_ordinal] = {group.lines[static_cast<size_t>(m.line)], m.rank};
  }
  registry.groups.emplace(config.session, std::move(group));
}

void DestroyGroup(int64_t session) {
  Group group;
  {
    Registry& registry = TheRegistry();
    std::lock_guard<std::mutex> lock(registry.mutex);
    auto found = registry.groups.find(session);
    if (found == registry.groups.end()) throw UnknownSession(session);
    group = std::move(found->second);
    registry.groups.erase(found);
  }
  for (const auto& line : group.lines) {
    line->Close("the group of session " + std::to_string(session) +
                " was destroyed while a call was running.");
    line->AbortAll();
    PumpAll(line);
  }
}

GroupInfo GetGroupInfo(int64_t session) {
  Registry& registry = TheRegistry();
  std::lock_guard<std::mutex> lock(registry.mutex);
  auto found = registry.groups.find(session);
  if (found == registry.groups.end()) throw UnknownSession(session);
  const Group& group = found->second;
  GroupInfo info;
  info.config = group.config;
  info.num_lines = static_cast<int32_t>(group.lines.size());
  info.heap_bytes = group.lines.front()->layout().heap_bytes();
  for (const auto& line : group.lines) info.closed.push_back(line->closed_text());
  return info;
}

void InjectFault(int64_t session, int32_t line, int32_t rank, const std::string& kind,
                 int64_t value) {
  static const std::map<std::string, Injection> kinds = {{"skip", Injection::kSkip},
                                                         {"delay_ms", Injection::kDelay},
                                                         {"throw", Injection::kThrow},
                                                         {"shape", Injection::kShape},
                                                         {"none", Injection::kNone}};
  const auto found_kind = kinds.find(kind);
  if (found_kind == kinds.end()) {
    throw std::invalid_argument("inject_fault: kind '" + kind +
                                "' is not one of skip, delay_ms, throw, shape, none");
  }
  Registry& registry = TheRegistry();
  std::lock_guard<std::mutex> lock(registry.mutex);
  auto found = registry.groups.find(session);
  if (found == registry.groups.end()) throw UnknownSession(session);
  const Group& group = found->second;
  if (line < 0 || line >= static_cast<int32_t>(group.lines.size()) || rank < 0 ||
      rank >= group.config.num_ranks) {
    throw std::invalid_argument("inject_fault: no rank " + std::to_string(rank) + " on line " +
                                std::to_string(line));
  }
  group.lines[static_cast<size_t>(line)]->Inject(rank, {found_kind->second, value});
}

RankHandle FindRank(int64_t session, int32_t device_ordinal) {
  Registry& registry = TheRegistry();
  std::lock_guard<std::mutex> lock(registry.mutex);
  auto found = registry.groups.find(session);
  if (found == registry.groups.end()) throw UnknownSession(session);
  auto handle = found->second.by_device.find(device_ordinal);
  if (handle == found->second.by_device.end()) {
    throw std::invalid_argument("device " + std::to_string(device_ordinal) +
                                " is no member of the group of session " + std::to_string(session) +
                                ": call jax_ulysses.initialize() with the mesh that is used");
  }
  return handle->second;
}

}  // namespace jax_ulysses
