// SPDX-License-Identifier: Apache-2.0
#include "group.h"

#include <map>
#include <set>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <utility>

namespace jax_ulysses {
namespace {

struct Group {
  GroupConfig config;
  std::vector<std::shared_ptr<Line>> lines;  // null where this process has no rank
  std::map<int32_t, RankHandle> by_device;   // filled while calls are possible
  bool closed = false;
};

struct Registry {
  std::mutex mutex;
  std::map<int64_t, Group> groups;
  // By session, executions that were under way when a group of it ended. What their late ranks
  // bring to the session's next group would wait there for calls that never come.
  std::map<int64_t, std::set<int64_t>> lost_runs;
  std::map<std::string, HeapFactory> platforms = {
      {"cpu",
       [](const HeapLayout& layout, int64_t /*deadline_ms*/, uint32_t start_epoch,
          const std::vector<Member>& /*members*/) { return MakeHostHeap(layout, start_epoch); }}};

  Group& Find(int64_t session);
  void Lose(int64_t session, int64_t run);
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

Group& Registry::Find(int64_t session) {
  auto found = groups.find(session);
  if (found == groups.end()) throw UnknownSession(session);
  return found->second;
}

void Registry::Lose(int64_t session, int64_t run) {
  // Run ids grow, and executions end: the oldest may be forgotten.
  constexpr size_t kMost = 4096;
  std::set<int64_t>& runs = lost_runs[session];
  if (run != 0) runs.insert(run);
  if (runs.size() > kMost) runs.erase(runs.begin());
}

// Returns the number of lines.
int32_t CheckConfig(const GroupConfig& config, const Registry& registry) {
  if (registry.platforms.count(config.platform) == 0) {
    std::string known;
    for (const auto& [name, factory] : registry.platforms) known += " '" + name + "'";
    throw Wrong(config, "platform '" + config.platform + "' is not built; this build has" + known);
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
  if (config.num_lines < 0 || config.sm_budget < 0 || config.comm_ctas < 0) {
    throw Wrong(config, "num_lines, sm_budget or comm_ctas is negative");
  }
  const size_t per_line = static_cast<size_t>(config.num_ranks);
  const bool whole = config.num_lines == 0;
  if (config.members.empty() || (whole && config.members.size() % per_line != 0)) {
    throw Wrong(config, std::to_string(config.members.size()) + " members do not form lines of " +
                            std::to_string(config.num_ranks));
  }
  const int32_t lines =
      whole ? static_cast<int32_t>(config.members.size() / per_line) : config.num_lines;
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

namespace {

void PumpAfter(const RankHandle& handle);

void Run(const RankHandle& handle, const CallOrder::Job& job) {
  const std::function<void()> done = job();
  handle.line->order().Finish(handle.rank);
  PumpAfter(handle);
  // Last: XLA goes on with the program inside of it, on this thread, and may block there.
  done();
}

// Starts the next call of a rank, if there is one.
void Pump(const RankHandle& handle) {
  Line& line = *handle.line;
  CallOrder::Job job = line.order().Take(handle.rank, !line.closed_text().empty());
  if (!job) return;
  try {
    std::thread([handle, job] { Run(handle, job); }).detach();
  } catch (const std::system_error& error) {
    // On this thread, which is XLA's, it must not wait for others: the line ends.
    line.Close("rank " + std::to_string(handle.rank) +
               " cannot start a thread for a call: " + error.what() + ".");
    line.heap().Interrupt();
    Run(handle, job);
  }
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
  Line& line = *handle.line;
  if (!line.order().Arrive(handle.rank, key, std::move(job))) {
    Registry& registry = TheRegistry();
    std::lock_guard<std::mutex> lock(registry.mutex);
    registry.Lose(line.session(), key.run);
  }
  Pump(handle);
}

void CloseLine(const std::shared_ptr<Line>& line, const std::string& text) {
  line->Close(text);
  line->heap().Interrupt();
  PumpAll(line);
}

void RegisterPlatform(const std::string& platform, HeapFactory make_heap) {
  Registry& registry = TheRegistry();
  std::lock_guard<std::mutex> lock(registry.mutex);
  registry.platforms[platform] = std::move(make_heap);
}

std::vector<std::string> Platforms() {
  Registry& registry = TheRegistry();
  std::lock_guard<std::mutex> lock(registry.mutex);
  std::vector<std::string> names;
  for (const auto& [name, factory] : registry.platforms) names.push_back(name);
  return names;
}

std::vector<HeapRecord> PrepareGroup(const GroupConfig& config) {
  Registry& registry = TheRegistry();
  HeapFactory make_heap;
  int32_t num_lines = 0;
  {
    std::lock_guard<std::mutex> lock(registry.mutex);
    num_lines = CheckConfig(config, registry);
    if (registry.groups.count(config.session) != 0) {
      throw Wrong(config, "the session exists already; destroy it first");
    }
    registry.groups[config.session].config = config;
    make_heap = registry.platforms.at(config.platform);
  }
  // Without the lock: a device may be busy with a kernel that waits for another device, whose
  // handler wants the lock.
  std::vector<std::shared_ptr<Line>> lines(static_cast<size_t>(num_lines));
  std::vector<HeapRecord> records;
  try {
    for (int32_t i = 0; i < num_lines; ++i) {
      std::vector<Member> members;
      for (const Member& m : config.members) {
        if (m.line == i) members.push_back(m);
      }
      if (members.empty()) continue;
      auto& line = lines[static_cast<size_t>(i)];
      line = std::make_shared<Line>(config, i, members, make_heap);
      for (const HeapRecord& record : line->heap().Export()) records.push_back(record);
    }
  } catch (...) {
    std::lock_guard<std::mutex> lock(registry.mutex);
    registry.groups.erase(config.session);
    throw;
  }
  std::lock_guard<std::mutex> lock(registry.mutex);
  registry.Find(config.session).lines = std::move(lines);
  return records;
}

void ConnectGroup(int64_t session, const std::vector<HeapRecord>& records) {
  Registry& registry = TheRegistry();
  std::vector<std::shared_ptr<Line>> lines;
  {
    std::lock_guard<std::mutex> lock(registry.mutex);
    const Group& group = registry.Find(session);
    if (group.closed || !group.by_device.empty()) {
      throw std::invalid_argument("session " + std::to_string(session) +
                                  " is connected already, or closed");
    }
    lines = group.lines;
  }
  // Without the lock, as above.
  for (size_t i = 0; i < lines.size(); ++i) {
    if (lines[i] == nullptr) continue;
    std::vector<HeapRecord> of_line;
    for (const HeapRecord& record : records) {
      if (record.member.line == static_cast<int32_t>(i)) of_line.push_back(record);
    }
    lines[i]->heap().Connect(of_line);
  }
  std::lock_guard<std::mutex> lock(registry.mutex);
  Group& group = registry.Find(session);
  for (const Member& m : group.config.members) {
    group.by_device[m.device_ordinal] = {group.lines[static_cast<size_t>(m.line)], m.rank};
  }
}

void CreateGroup(const GroupConfig& config) {
  const std::vector<HeapRecord> records = PrepareGroup(config);
  try {
    ConnectGroup(config.session, records);
  } catch (...) {
    DestroyGroup(config.session);
    throw;
  }
}

void FailGroup(int64_t session, const std::string& text) {
  Registry& registry = TheRegistry();
  std::lock_guard<std::mutex> lock(registry.mutex);
  for (const auto& line : registry.Find(session).lines) {
    if (line != nullptr) line->Close(text);
  }
}

void CloseGroup(int64_t session) {
  std::vector<std::shared_ptr<Line>> lines;
  bool on_threads = false;
  {
    Registry& registry = TheRegistry();
    std::lock_guard<std::mutex> lock(registry.mutex);
    Group& group = registry.Find(session);
    if (std::exchange(group.closed, true)) return;
    group.by_device.clear();
    lines = group.lines;
    on_threads = group.config.platform == "cpu";
  }
  // Without the lock: this may wait for calls, and they for other groups.
  for (const auto& line : lines) {
    if (line == nullptr) continue;
    line->Close("the group of session " + std::to_string(session) +
                " was destroyed while a call was running.");
    if (!on_threads) line->WaitForLaunches();
    line->heap().Interrupt();
    if (on_threads) {
      const std::vector<int64_t> unfinished = line->order().End();
      PumpAll(line);
      std::lock_guard<std::mutex> lock(TheRegistry().mutex);
      for (const int64_t run : unfinished) TheRegistry().Lose(session, run);
    }
    line->heap().Disconnect();
  }
}

void DestroyGroup(int64_t session) {
  CloseGroup(session);
  Group group;
  Registry& registry = TheRegistry();
  std::lock_guard<std::mutex> lock(registry.mutex);
  group = std::move(registry.Find(session));
  registry.groups.erase(session);
}

GroupInfo GetGroupInfo(int64_t session) {
  Registry& registry = TheRegistry();
  std::lock_guard<std::mutex> lock(registry.mutex);
  const Group& group = registry.Find(session);
  GroupInfo info;
  info.config = group.config;
  info.num_lines = static_cast<int32_t>(group.lines.size());
  for (const auto& line : group.lines) {
    info.closed.push_back(line == nullptr ? "" : line->closed_text());
    if (line == nullptr) continue;
    info.heap_bytes = line->layout().heap_bytes();
    info.calls += line->calls();
  }
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
  const Group& group = registry.Find(session);
  if (line < 0 || line >= static_cast<int32_t>(group.lines.size()) || rank < 0 ||
      rank >= group.config.num_ranks || group.lines[static_cast<size_t>(line)] == nullptr) {
    throw std::invalid_argument("inject_fault: no rank " + std::to_string(rank) + " on line " +
                                std::to_string(line));
  }
  group.lines[static_cast<size_t>(line)]->Inject(rank, {found_kind->second, value});
}

RankHandle FindRank(int64_t session, int32_t device_ordinal, int64_t run) {
  Registry& registry = TheRegistry();
  std::lock_guard<std::mutex> lock(registry.mutex);
  const auto found = registry.groups.find(session);
  if (found == registry.groups.end() || found->second.closed) {
    registry.Lose(session, run);
    throw UnknownSession(session);
  }
  const Group& group = found->second;
  const auto handle = group.by_device.find(device_ordinal);
  if (handle == group.by_device.end()) {
    throw std::invalid_argument("device " + std::to_string(device_ordinal) +
                                " is no member of the group of session " + std::to_string(session) +
                                ": call jax_ulysses.initialize() with the mesh that is used");
  }
  const auto lost = registry.lost_runs.find(session);
  if (lost != registry.lost_runs.end() && lost->second.count(run) != 0) {
    throw std::invalid_argument("this execution of the program began before the group of session " +
                                std::to_string(session) +
                                " was made, and has failed on other ranks: run it again");
  }
  return handle->second;
}

}  // namespace jax_ulysses
