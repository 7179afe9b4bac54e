// SPDX-License-Identifier: Apache-2.0
#include "call_order.h"

#include <utility>

#include "jax_ulysses/base.h"

namespace jax_ulysses {

static_assert(kMaxRanks <= 64, "a rank is a bit of a word");

CallOrder::CallOrder(int num_ranks) : num_ranks_(num_ranks) {}

bool CallOrder::Arrive(int rank, const CallKey& key, Job job) {
  const uint64_t bit = uint64_t{1} << rank;
  std::lock_guard<std::mutex> lock(mutex_);
  Entry* found = nullptr;
  for (Entry& entry : entries_) {
    if (entry.key == key && (entry.arrived & bit) == 0) {
      found = &entry;
      break;
    }
  }
  if (found == nullptr) {
    entries_.push_back({key, 0, 0, std::vector<Job>(static_cast<size_t>(num_ranks_))});
    found = &entries_.back();
  }
  found->arrived |= bit;
  found->jobs[static_cast<size_t>(rank)] = std::move(job);
  return !ended_;
}

CallOrder::Job CallOrder::Take(int rank, bool any_order) {
  const uint64_t bit = uint64_t{1} << rank;
  std::lock_guard<std::mutex> lock(mutex_);
  if ((busy_ & bit) != 0) return {};
  for (Entry& entry : entries_) {
    if ((entry.taken & bit) != 0) continue;
    if ((entry.arrived & bit) == 0) {
      if (any_order) continue;
      return {};
    }
    entry.taken |= bit;
    busy_ |= bit;
    return std::move(entry.jobs[static_cast<size_t>(rank)]);
  }
  return {};
}

void CallOrder::Finish(int rank) {
  const uint64_t all = num_ranks_ == 64 ? ~uint64_t{0} : (uint64_t{1} << num_ranks_) - 1;
  std::lock_guard<std::mutex> lock(mutex_);
  busy_ &= ~(uint64_t{1} << rank);
  while (!entries_.empty() && entries_.front().taken == all) entries_.pop_front();
}

std::vector<int64_t> CallOrder::End() {
  std::lock_guard<std::mutex> lock(mutex_);
  ended_ = true;
  std::vector<int64_t> runs;
  for (const Entry& entry : entries_) runs.push_back(entry.key.run);
  return runs;
}

}  // namespace jax_ulysses
