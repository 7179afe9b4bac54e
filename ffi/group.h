// SPDX-License-Identifier: Apache-2.0
// Groups: for each session (a mesh and an axis) the lines of ranks that exchange with each other.
// A handler finds its line and rank from (session, device ordinal).
#ifndef JAX_ULYSSES_FFI_GROUP_H_
#define JAX_ULYSSES_FFI_GROUP_H_

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "call_order.h"
#include "heap.h"
#include "jax_ulysses/comm/fault.h"
#include "jax_ulysses/comm/heap_layout.h"

namespace jax_ulysses {

// One device of a session: rank `rank` of line `line`.
struct Member {
  int32_t device_ordinal = 0;
  int32_t line = 0;
  int32_t rank = 0;
};

struct GroupConfig {
  int64_t session = 0;
  int32_t num_ranks = 0;
  std::vector<Member> members;
  int64_t slot_bytes = 0;
  int64_t num_slots = 2;
  int64_t deadline_ms = 30000;  // of every wait; 0 waits for ever
  std::string platform = "cpu";
  uint32_t start_epoch = 0;  // tests begin near 2^32
};

// A fault that a test asks for. It strikes one call of one rank and is then gone.
enum class Injection { kNone, kSkip, kDelay, kThrow, kShape };
struct InjectedFault {
  Injection kind = Injection::kNone;
  int64_t value = 0;
};

// The ranks along one line of the mesh. Lives as long as a call uses it, also after group_destroy.
class Line {
 public:
  Line(const GroupConfig& config, int32_t index);

  const HeapLayout& layout() const { return layout_; }
  int64_t session() const { return session_; }
  int64_t deadline_ms() const { return deadline_ms_; }
  CallInfo MakeCall(int rank, Operator op, uint32_t agreement) const;

  CallOrder& order() { return order_; }

  // One call at a time on each rank, also for callers that do not go through Submit.
  std::mutex& call_mutex(int rank) { return ranks_[static_cast<size_t>(rank)]->call_mutex; }

  void Inject(int rank, InjectedFault fault);
  InjectedFault TakeInjected(int rank);

  // Marks the line as failed. The first text stays; it is what every later call returns.
  std::string Close(const std::string& text);
  // Empty while the line works.
  std::string closed_text() const;

  // The text for a fault record.
  std::string Describe(const Fault& fault) const;

  // Raises the abort word at every rank, for group_destroy during a call.
  void AbortAll();

 private:
  struct RankState {
    std::mutex call_mutex;
    InjectedFault injected;
  };

  int64_t session_;
  int32_t index_;
  int64_t deadline_ms_;
  CallOrder order_;
  HeapLayout layout_;
  std::unique_ptr<SymmetricHeap> heap_;
  std::vector<std::unique_ptr<RankState>> ranks_;
  mutable std::mutex mutex_;
  std::string closed_text_;
};

struct RankHandle {
  std::shared_ptr<Line> line;
  int32_t rank = 0;
};

// Runs `job` on a thread of its own when it is the turn of this call, and what it returns after
// that, when the rank is free again. Does not block.
void Submit(const RankHandle& handle, const CallKey& key, CallOrder::Job job);

struct GroupInfo {
  GroupConfig config;
  int32_t num_lines = 0;
  int64_t heap_bytes = 0;
  std::vector<std::string> closed;  // text of each line, empty while it works
};

// All throw std::invalid_argument (wrong arguments, unknown session) or std::runtime_error.
void CreateGroup(const GroupConfig& config);
void DestroyGroup(int64_t session);
GroupInfo GetGroupInfo(int64_t session);
void InjectFault(int64_t session, int32_t line, int32_t rank, const std::string& kind,
                 int64_t value);
RankHandle FindRank(int64_t session, int32_t device_ordinal);

const char* OperatorName(Operator op);

}  // namespace jax_ulysses

#endif  // JAX_ULYSSES_FFI_GROUP_H_
