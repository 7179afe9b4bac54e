// SPDX-License-Identifier: Apache-2.0
// Groups: for each session (a mesh and an axis) the lines of ranks that exchange with each other.
// A handler finds its line and rank from (session, device ordinal).
#ifndef JAX_ULYSSES_FFI_GROUP_H_
#define JAX_ULYSSES_FFI_GROUP_H_

#include <memory>
#include <string>
#include <vector>

#include "line.h"

namespace jax_ulysses {

// Runs `job` on a thread of its own when it is the turn of this call, and what it returns after
// that, when the rank is free again. Does not block.
void Submit(const RankHandle& handle, const CallKey& key, CallOrder::Job job);

// Marks a line as failed and ends its calls, with `text` on every rank.
void CloseLine(const std::shared_ptr<Line>& line, const std::string& text);

struct GroupInfo {
  GroupConfig config;
  int32_t num_lines = 0;
  int64_t heap_bytes = 0;
  std::vector<std::string> closed;  // text of each line, empty while it works
  int64_t calls = 0;                // of all lines
};

// Makes groups of another platform than "cpu" possible.
void RegisterPlatform(const std::string& platform, HeapFactory make_heap);
std::vector<std::string> Platforms();

// A group comes into being in two steps, between which processes tell each other their records, and
// goes in two, between which they wait for each other. Calls are possible from the end of Connect
// to the beginning of Close.
// All throw std::invalid_argument (wrong arguments, unknown session), UnavailableError or
// std::runtime_error.
std::vector<HeapRecord> PrepareGroup(const GroupConfig& config);
void ConnectGroup(int64_t session, const std::vector<HeapRecord>& records);
// From now on calls return this error. What has been launched is not touched.
void FailGroup(int64_t session, const std::string& text);
void CloseGroup(int64_t session);
void DestroyGroup(int64_t session);  // closes it if need be
// Both steps at once, where all ranks are in this process.
void CreateGroup(const GroupConfig& config);

GroupInfo GetGroupInfo(int64_t session);
void InjectFault(int64_t session, int32_t line, int32_t rank, const std::string& kind,
                 int64_t value);
// `run`: the execution that asks, 0 if it is not known. One that has met the end of an earlier
// group of this session is refused: its calls on other ranks ended with that.
RankHandle FindRank(int64_t session, int32_t device_ordinal, int64_t run = 0);

}  // namespace jax_ulysses

#endif  // JAX_ULYSSES_FFI_GROUP_H_
