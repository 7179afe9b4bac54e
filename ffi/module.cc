// SPDX-License-Identifier: Apache-2.0
// The extension module: groups, and the handlers as capsules. Nothing here needs XLA at run time.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>

#include "group.h"
#include "handlers.h"

namespace nb = nanobind;

namespace jax_ulysses {
namespace {

nb::dict Registrations() {
  auto capsule = [](XLA_FFI_Handler* handler) {
    return nb::capsule(reinterpret_cast<void*>(handler));
  };
  nb::dict targets;
  targets["jax_ulysses.exchange.v1"] = capsule(JaxUlyssesHostExchange);
  targets["jax_ulysses.gemm_a2a.v1"] = capsule(JaxUlyssesHostGemmA2a);
  targets["jax_ulysses.a2a_gemm.v1"] = capsule(JaxUlyssesHostA2aGemm);
  return targets;
}

void GroupCreate(int64_t session, int32_t num_ranks,
                 const std::vector<std::tuple<int32_t, int32_t, int32_t>>& members,
                 int64_t slot_bytes, int64_t num_slots, int64_t deadline_ms,
                 const std::string& platform, uint32_t start_epoch) {
  GroupConfig config;
  config.session = session;
  config.num_ranks = num_ranks;
  for (const auto& [device, line, rank] : members) config.members.push_back({device, line, rank});
  config.slot_bytes = slot_bytes;
  config.num_slots = num_slots;
  config.deadline_ms = deadline_ms;
  config.platform = platform;
  config.start_epoch = start_epoch;
  CreateGroup(config);
}

nb::dict GroupInfoDict(int64_t session) {
  const GroupInfo info = GetGroupInfo(session);
  nb::list members;
  for (const Member& m : info.config.members) {
    members.append(nb::make_tuple(m.device_ordinal, m.line, m.rank));
  }
  nb::list closed;
  for (const std::string& text : info.closed) closed.append(text);
  nb::dict out;
  out["session"] = info.config.session;
  out["num_ranks"] = info.config.num_ranks;
  out["num_lines"] = info.num_lines;
  out["members"] = members;
  out["slot_bytes"] = info.config.slot_bytes;
  out["num_slots"] = info.config.num_slots;
  out["deadline_ms"] = info.config.deadline_ms;
  out["platform"] = info.config.platform;
  out["heap_bytes"] = info.heap_bytes;
  out["closed"] = closed;
  return out;
}

nb::dict BuildInfo() {
  nb::dict out;
  out["ffi_api_version"] = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  out["compiler"] = __VERSION__;
  nb::list platforms;
  platforms.append("cpu");
  out["platforms"] = platforms;
  out["max_ranks"] = kMaxRanks;
  out["max_segments"] = kMaxSegments;
  return out;
}

}  // namespace
}  // namespace jax_ulysses

NB_MODULE(_targets, m) {
  using namespace nb::literals;
  m.doc() = "Peer groups and XLA FFI handlers of jax_ulysses.";
  m.def("group_create", &jax_ulysses::GroupCreate, "session"_a, "num_ranks"_a, "members"_a,
        "slot_bytes"_a, "num_slots"_a = 2, "deadline_ms"_a = 30000, "platform"_a = "cpu",
        "start_epoch"_a = 0,
        "Create the lines of one session; members are (device_ordinal, line, rank).\n\n"
        "Raises ValueError for wrong arguments and RuntimeError when memory is refused.");
  m.def("group_destroy", &jax_ulysses::DestroyGroup, "session"_a,
        "Free a session. Calls that are running end with an error.");
  m.def("group_info", &jax_ulysses::GroupInfoDict, "session"_a,
        "What a session was created with, its heap size, and the error text of each line.");
  m.def("inject_fault", &jax_ulysses::InjectFault, "session"_a, "line"_a, "rank"_a, "kind"_a,
        "value"_a = 0,
        "Make the next call of one rank fail, for tests: skip, delay_ms, throw, shape, none.");
  m.def("registrations", &jax_ulysses::Registrations,
        "FFI target name -> capsule of its CPU handler.");
  m.def("build_info", &jax_ulysses::BuildInfo, "How this module was built.");
}
