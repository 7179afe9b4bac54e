// SPDX-License-Identifier: Apache-2.0
// The extension module: groups, and the handlers as capsules. Nothing here needs XLA at run time.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <tuple>

#include "group.h"
#include "handlers.h"
#include "question.h"
#if defined(JAX_ULYSSES_HAS_CUDA)
#include "cuda/calls.h"
#include "cuda/cuda_heap.h"
#endif

namespace nb = nanobind;

namespace jax_ulysses {
namespace {

nb::capsule Capsule(XLA_FFI_Handler* handler) {
  return nb::capsule(reinterpret_cast<void*>(handler));
}

nb::dict Registrations(const std::string& platform) {
  nb::dict targets;
  if (platform == "cpu") {
    targets["jax_ulysses.exchange.v1"] = Capsule(JaxUlyssesHostExchange);
    targets["jax_ulysses.gemm_a2a.v1"] = Capsule(JaxUlyssesHostGemmA2a);
    targets["jax_ulysses.a2a_gemm.v1"] = Capsule(JaxUlyssesHostA2aGemm);
    targets["jax_ulysses.psum.v1"] = Capsule(JaxUlyssesHostPsum);
  }
#if defined(JAX_ULYSSES_HAS_CUDA)
  if (platform == "cuda") {
    targets["jax_ulysses.exchange.v1"] = Capsule(JaxUlyssesCudaExchange);
    targets["jax_ulysses.gemm_a2a.v1"] = Capsule(JaxUlyssesCudaGemmA2a);
    targets["jax_ulysses.a2a_gemm.v1"] = Capsule(JaxUlyssesCudaA2aGemm);
    targets["jax_ulysses.psum.v1"] = Capsule(JaxUlyssesCudaPsum);
  }
#endif
  return targets;
}

using Members = std::vector<std::tuple<int32_t, int32_t, int32_t>>;

GroupConfig MakeConfig(int64_t session, int32_t num_ranks, const Members& members,
                       int64_t slot_bytes, int64_t num_slots, int64_t deadline_ms,
                       const std::string& platform, uint32_t start_epoch, int32_t num_lines,
                       int32_t sm_budget, int32_t comm_ctas) {
  GroupConfig config;
  config.session = session;
  config.num_ranks = num_ranks;
  for (const auto& [device, line, rank] : members) config.members.push_back({device, line, rank});
  config.num_lines = num_lines;
  config.slot_bytes = slot_bytes;
  config.num_slots = num_slots;
  config.deadline_ms = deadline_ms;
  config.platform = platform;
  config.start_epoch = start_epoch;
  config.sm_budget = sm_budget;
  config.comm_ctas = comm_ctas;
  return config;
}

void GroupCreate(int64_t session, int32_t num_ranks, const Members& members, int64_t slot_bytes,
                 int64_t num_slots, int64_t deadline_ms, const std::string& platform,
                 uint32_t start_epoch, int32_t sm_budget) {
  CreateGroup(MakeConfig(session, num_ranks, members, slot_bytes, num_slots, deadline_ms, platform,
                         start_epoch, 0, sm_budget, 0));
}

// Records of one process as bytes. Another build of the library may lay them out otherwise.
constexpr char kMagic[] = "jax_ulysses heap records 1";

nb::bytes GroupPrepare(int64_t session, int32_t num_ranks, const Members& members,
                       int64_t slot_bytes, int64_t num_slots, int64_t deadline_ms,
                       const std::string& platform, uint32_t start_epoch, int32_t num_lines,
                       int32_t sm_budget, int32_t comm_ctas) {
  std::vector<HeapRecord> records;
  {
    const nb::gil_scoped_release unlocked;
    records =
        PrepareGroup(MakeConfig(session, num_ranks, members, slot_bytes, num_slots, deadline_ms,
                                platform, start_epoch, num_lines, sm_budget, comm_ctas));
  }
  std::string bytes(kMagic, sizeof(kMagic));
  bytes.append(reinterpret_cast<const char*>(records.data()), records.size() * sizeof(HeapRecord));
  return nb::bytes(bytes.data(), bytes.size());
}

void GroupConnect(int64_t session, const std::vector<nb::bytes>& blobs) {
  std::vector<HeapRecord> records;
  for (const nb::bytes& blob : blobs) {
    const size_t size = blob.size();
    if (size < sizeof(kMagic) || std::memcmp(blob.c_str(), kMagic, sizeof(kMagic)) != 0 ||
        (size - sizeof(kMagic)) % sizeof(HeapRecord) != 0) {
      throw std::invalid_argument("group_connect: not records of this version of jax_ulysses");
    }
    const size_t before = records.size();
    records.resize(before + (size - sizeof(kMagic)) / sizeof(HeapRecord));
    std::memcpy(static_cast<void*>(records.data() + before), blob.c_str() + sizeof(kMagic),
                size - sizeof(kMagic));
  }
  const nb::gil_scoped_release unlocked;
  ConnectGroup(session, records);
}

nb::object CanImplement(const std::string& dataflow, const std::vector<int64_t>& heads,
                        int64_t head_dim, int64_t num_ranks, int64_t token_order, int64_t batch,
                        int64_t local_tokens, int64_t width, const std::string& dtype,
                        int64_t element_bytes, bool w_transposed, bool want_gathered,
                        int64_t slot_bytes, int64_t num_slots, int64_t sm_budget) {
  Question question;
  question.dataflow = dataflow;
  question.heads = heads;
  question.head_dim = head_dim;
  question.num_ranks = num_ranks;
  question.token_order = token_order;
  question.batch = batch;
  question.local_tokens = local_tokens;
  question.width = width;
  question.dtype = dtype;
  question.element_bytes = element_bytes;
  question.w_transposed = w_transposed;
  question.want_gathered = want_gathered;
  question.slot_bytes = slot_bytes;
  question.num_slots = num_slots;
  question.sm_budget = sm_budget;
#if defined(JAX_ULYSSES_HAS_CUDA)
  const std::string reason = cuda::WhyNot(question);
#else
  const std::string reason = "this build contains no CUDA kernels";
#endif
  return reason.empty() ? nb::none() : nb::object(nb::str(reason.c_str()));
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
  out["sm_budget"] = info.config.sm_budget;
  out["calls"] = info.calls;
  return out;
}

nb::dict BuildInfo() {
  nb::dict out;
  out["ffi_api_version"] = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  out["compiler"] = __VERSION__;
  nb::list platforms;
  for (const std::string& name : Platforms()) platforms.append(name);
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
#if defined(JAX_ULYSSES_HAS_CUDA)
  jax_ulysses::RegisterPlatform("cuda", jax_ulysses::cuda::MakeHeap);
#endif
  nb::register_exception_translator([](const std::exception_ptr& error, void*) {
    try {
      std::rethrow_exception(error);
    } catch (const jax_ulysses::UnavailableError& unavailable) {
      PyErr_SetString(PyExc_NotImplementedError, unavailable.what());
    }
  });
  // What may wait for a device or for other ranks lets other Python threads run.
  using Unlocked = nb::call_guard<nb::gil_scoped_release>;
  m.def("group_create", &jax_ulysses::GroupCreate, "session"_a, "num_ranks"_a, "members"_a,
        "slot_bytes"_a, "num_slots"_a = 2, "deadline_ms"_a = 30000, "platform"_a = "cpu",
        "start_epoch"_a = 0, "sm_budget"_a = 0, Unlocked(),
        "Create the lines of one session; members are (device_ordinal, line, rank).\n\n"
        "Raises ValueError for wrong arguments, NotImplementedError where this machine cannot, and "
        "RuntimeError when memory is refused.");
  m.def("group_prepare", &jax_ulysses::GroupPrepare, "session"_a, "num_ranks"_a, "members"_a,
        "slot_bytes"_a, "num_slots"_a = 2, "deadline_ms"_a = 30000, "platform"_a = "cpu",
        "start_epoch"_a = 0, "num_lines"_a = 0, "sm_budget"_a = 0, "comm_ctas"_a = 0,
        "The first half of group_create, where lines span processes: members are those of this "
        "process. Returns what group_connect needs in every process.");
  m.def("group_connect", &jax_ulysses::GroupConnect, "session"_a, "records"_a,
        "The second half: takes what group_prepare returned in each process.");
  m.def("group_fail", &jax_ulysses::FailGroup, "session"_a, "text"_a, Unlocked(),
        "Calls of this process return this error from now on. What has been launched goes on.");
  m.def("group_close", &jax_ulysses::CloseGroup, "session"_a, Unlocked(),
        "The first half of group_destroy: ends calls and unmaps other processes' heaps.");
  m.def("group_destroy", &jax_ulysses::DestroyGroup, "session"_a, Unlocked(),
        "Free a session. Calls that are running end with an error.");
  m.def("group_info", &jax_ulysses::GroupInfoDict, "session"_a,
        "What a session was created with, its heap size, calls so far, and the error text of each "
        "line.");
  m.def("inject_fault", &jax_ulysses::InjectFault, "session"_a, "line"_a, "rank"_a, "kind"_a,
        "value"_a = 0,
        "Make the next call of one rank fail, for tests: skip, delay_ms, throw, shape, none.");
  m.def("can_implement", &jax_ulysses::CanImplement, "dataflow"_a, "heads"_a, "head_dim"_a,
        "num_ranks"_a, "token_order"_a, "batch"_a, "local_tokens"_a, "width"_a, "dtype"_a,
        "element_bytes"_a, "w_transposed"_a, "want_gathered"_a, "slot_bytes"_a, "num_slots"_a,
        "sm_budget"_a, "None, or why the CUDA kernels cannot run a call of these shapes.");
#if defined(JAX_ULYSSES_HAS_CUDA)
  m.def("device_memory", &jax_ulysses::cuda::DeviceMemoryInfo, "device"_a, Unlocked(),
        "Free and total bytes of a CUDA device.");
  m.def("device_uuid", &jax_ulysses::cuda::DeviceUuid, "device"_a, Unlocked(),
        "What tells a physical device from all others, in any process.");
#endif
  m.def("registrations", &jax_ulysses::Registrations, "platform"_a = "cpu",
        "FFI target name -> capsule of its handler.");
  m.def("build_info", &jax_ulysses::BuildInfo, "How this module was built.");
}
