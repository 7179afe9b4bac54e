// SPDX-License-Identifier: Apache-2.0
#include "cuda/records.h"

#include <unistd.h>

#include <cstring>
#include <fstream>
#include <random>
#include <stdexcept>

namespace jax_ulysses::cuda {
namespace {

template <size_t kSize>
void CopyText(char (&out)[kSize], const std::string& text) {
  std::strncpy(out, text.c_str(), kSize - 1);
}

std::string HostId() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string id;
  std::getline(file, id);
  if (!id.empty()) return id;
  char name[40] = {};
  (void)gethostname(name, sizeof(name) - 1);
  return name;
}

// Process ids repeat across containers of one host; this does not.
const std::string& ProcessId() {
  static const std::string id = [] {
    std::random_device random;
    std::string text;
    for (int i = 0; i < 4; ++i) text += std::to_string(random() % 1000000000u);
    return text;
  }();
  return id;
}

}  // namespace

std::string Name(const Member& m) {
  return "rank " + std::to_string(m.rank) + " of line " + std::to_string(m.line) + " (device " +
         std::to_string(m.device_ordinal) + ")";
}

HeapRecord MakeRecord(const Member& member, const HeapLayout& layout, int64_t deadline_ms) {
  HeapRecord record;
  CopyText(record.host, HostId());
  CopyText(record.process, ProcessId());
  record.member = member;
  record.pid = static_cast<int32_t>(getpid());
  record.layout = layout;
  record.deadline_ms = deadline_ms;
  return record;
}

bool IsOwnProcess(const HeapRecord& record) { return ProcessId() == record.process; }

void CheckRecords(const std::vector<HeapRecord>& records, const HeapRecord& own) {
  const HeapLayout& layout = own.layout;
  std::vector<const HeapRecord*> by_rank(static_cast<size_t>(layout.num_ranks), nullptr);
  for (const HeapRecord& record : records) {
    const Member& m = record.member;
    if (m.rank < 0 || m.rank >= layout.num_ranks) {
      throw std::runtime_error(Name(m) + " is outside a group of " +
                               std::to_string(layout.num_ranks) + " ranks");
    }
    const HeapRecord*& place = by_rank[static_cast<size_t>(m.rank)];
    if (place != nullptr) throw std::runtime_error("two devices say that they are " + Name(m));
    place = &record;
    if (std::memcmp(&record.layout, &layout, sizeof(layout)) != 0 ||
        record.deadline_ms != own.deadline_ms) {
      throw std::runtime_error(Name(m) + " has slots of " +
                               std::to_string(record.layout.slot_bytes) +
                               " bytes and a deadline of " + std::to_string(record.deadline_ms) +
                               " ms, this process " + std::to_string(layout.slot_bytes) + " and " +
                               std::to_string(own.deadline_ms) + ": pass the same arguments");
    }
    if (std::strcmp(own.host, record.host) != 0) {
      throw UnavailableError(Name(m) + " of process " + std::to_string(record.pid) +
                             " is on another host: a group must be inside one");
    }
  }
  for (size_t rank = 0; rank < by_rank.size(); ++rank) {
    if (by_rank[rank] == nullptr) {
      throw std::runtime_error("no process has rank " + std::to_string(rank) + " of line " +
                               std::to_string(own.member.line));
    }
  }
}

}  // namespace jax_ulysses::cuda
