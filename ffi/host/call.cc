// SPDX-License-Identifier: Apache-2.0
#include "call.h"

#include <chrono>
#include <exception>
#include <mutex>
#include <stdexcept>
#include <thread>

namespace jax_ulysses::host {
namespace {

CallStatus SlotTooSmall(const CallSpec& spec, const Line& line) {
  return {CallError::kSlotTooSmall,
          std::string(OperatorName(spec.op)) + ": needs " + std::to_string(spec.slot_bytes) +
              " bytes per slot, the group of session " + std::to_string(line.session()) + " has " +
              std::to_string(line.layout().slot_bytes) +
              ": call jax_ulysses.finalize() and then jax_ulysses.initialize() with a larger "
              "workspace_bytes"};
}

// Runs one role; an exception becomes a fault of this rank, with its text.
bool Guarded(Line& line, Protocol& protocol, const Role& role) {
  try {
    return role(protocol);
  } catch (const std::exception& error) {
    Fault fault;
    fault.kind = FaultKind::kThrown;
    fault.rank = protocol.call().rank;
    fault.op = protocol.call().op;
    fault.epoch = protocol.epoch();
    // The text first: the others look for it as soon as they see the abort word.
    line.Close(line.Describe(fault) + " " + error.what());
    protocol.Raise(FaultKind::kThrown, protocol.call().rank, -1);
    return false;
  }
}

// A rank that never arrives: it only waits for the others to notice.
CallStatus Skip(Line& line, const Protocol& protocol) {
  const auto limit = std::chrono::milliseconds(4 * line.deadline_ms() + 1000);
  const auto start = std::chrono::steady_clock::now();
  while (!protocol.Aborted() && std::chrono::steady_clock::now() - start < limit) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  if (!protocol.Aborted()) {
    return {CallError::kAborted, "injected fault: this rank did not take part in the call"};
  }
  return {CallError::kAborted, line.Close(line.Describe(protocol.ReadFault()))};
}

}  // namespace

CallStatus RunCall(const RankHandle& handle, const CallSpec& spec) {
  Line& line = *handle.line;
  std::lock_guard<std::mutex> one_call(line.call_mutex(handle.rank));
  const std::string closed = line.closed_text();
  if (!closed.empty()) return {CallError::kAborted, closed};
  // All ranks see the same shapes and slots, so all refuse, and the group stays usable.
  if (spec.slot_bytes > line.layout().slot_bytes) return SlotTooSmall(spec, line);

  const InjectedFault injected = line.TakeInjected(handle.rank);
  CallInfo call = line.MakeCall(handle.rank, spec.op, spec.agreement);
  if (injected.kind == Injection::kShape) call.agreement ^= 1;
  Protocol protocol(call);
  if (injected.kind == Injection::kSkip) return Skip(line, protocol);
  if (injected.kind == Injection::kDelay) {
    std::this_thread::sleep_for(std::chrono::milliseconds(injected.value));
  }

  const Role communicate = [&spec](Protocol& p) {
    if (spec.entries_first && !p.WaitEntries()) return false;
    if (!spec.communicate(p)) return false;
    return spec.entries_first || p.WaitEntries();
  };
  const Role compute = [&spec, &injected](Protocol& p) {
    if (injected.kind == Injection::kThrow) throw std::runtime_error("injected fault");
    return spec.compute(p);
  };
  const bool done = Guarded(line, protocol, [&](Protocol& p) {
    if (!p.WaitSlotFree()) return false;
    p.PublishEntry();
    bool communicated = false;
    Protocol copy = p;
    std::thread other([&] { communicated = Guarded(line, copy, communicate); });
    const bool computed = Guarded(line, p, compute);
    other.join();
    return computed && communicated && p.Finish(/*handshake=*/true);
  });
  if (done) return {};
  return {CallError::kAborted, line.Close(line.Describe(protocol.ReadFault()))};
}

}  // namespace jax_ulysses::host
