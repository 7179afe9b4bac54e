// SPDX-License-Identifier: Apache-2.0
// The ranks along one line of the mesh: their heaps, and whether calls still work.
#ifndef JAX_ULYSSES_FFI_LINE_H_
#define JAX_ULYSSES_FFI_LINE_H_

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "call_order.h"
#include "heap.h"
#include "jax_ulysses/comm/fault.h"
#include "jax_ulysses/comm/heap_layout.h"

namespace jax_ulysses {

struct GroupConfig {
  int64_t session = 0;
  int32_t num_ranks = 0;
  std::vector<Member> members;  // devices of this process
  // Lines of the mesh. 0: the members of this process are all of them.
  int32_t num_lines = 0;
  int64_t slot_bytes = 0;
  int64_t num_slots = 2;
  int64_t deadline_ms = 30000;  // of every wait; 0 waits for ever
  std::string platform = "cpu";
  uint32_t start_epoch = 0;  // tests begin near 2^32
  int32_t sm_budget = 0;     // multiprocessors that a kernel may take; 0 takes all
  int32_t comm_ctas = 0;     // CTAs of a fused kernel that communicate; 0 lets it choose
};

// Makes the heaps of the ranks of one line that are in this process.
using HeapFactory = std::function<std::unique_ptr<SymmetricHeap>(
    const HeapLayout& layout, int64_t deadline_ms, uint32_t start_epoch,
    const std::vector<Member>& members)>;

// A fault that a test asks for. It strikes one call of one rank and is then gone.
enum class Injection { kNone, kSkip, kDelay, kThrow, kShape };
struct InjectedFault {
  Injection kind = Injection::kNone;
  int64_t value = 0;
};

// Lives as long as a call uses it, also after the group is destroyed.
class Line {
 public:
  // `members` are those of this line in this process.
  Line(const GroupConfig& config, int32_t index, const std::vector<Member>& members,
       const HeapFactory& make_heap);

  const HeapLayout& layout() const { return layout_; }
  int64_t session() const { return session_; }
  int64_t deadline_ms() const { return deadline_ms_; }
  int32_t sm_budget() const { return sm_budget_; }
  int32_t comm_ctas() const { return comm_ctas_; }
  SymmetricHeap& heap() { return *heap_; }
  CallInfo MakeCall(int rank, Operator op, uint32_t agreement) const;

  CallOrder& order() { return order_; }

  // One call at a time on each rank, also for callers that do not go through Submit.
  std::mutex& call_mutex(int rank) { return ranks_[static_cast<size_t>(rank)]->call_mutex; }

  void Inject(int rank, InjectedFault fault);
  InjectedFault TakeInjected(int rank);

  // Marks the line as failed. The first text stays; it is what every later call returns.
  std::string Close(const std::string& text);
  // Empty while the line works. Looks into the mailboxes of kernels.
  std::string closed_text();

  // The text for a fault record.
  std::string Describe(const Fault& fault) const;

  // After Close: returns when every launch that had begun before has been enqueued.
  void WaitForLaunches();
  // Calls that reached this line in this process, replays of CUDA graphs not counted.
  void CountCall() { ++calls_; }
  int64_t calls() const { return calls_; }

 private:
  struct RankState {
    std::mutex call_mutex;
    InjectedFault injected;
  };

  int64_t session_;
  int32_t index_;
  int64_t deadline_ms_;
  int32_t sm_budget_;
  int32_t comm_ctas_;
  CallOrder order_;
  HeapLayout layout_;
  std::unique_ptr<SymmetricHeap> heap_;
  std::vector<std::unique_ptr<RankState>> ranks_;
  std::mutex mutex_;
  std::string closed_text_;
  std::atomic<int64_t> calls_{0};
};

struct RankHandle {
  std::shared_ptr<Line> line;
  int32_t rank = 0;
};

const char* OperatorName(Operator op);

// The layout of every heap of a group of kernels: room for the flags of large calls, none for the
// counters of row blocks, which kernels do not use.
HeapLayout KernelLayout(int32_t num_ranks, int64_t slot_bytes, int64_t num_slots);

}  // namespace jax_ulysses

#endif  // JAX_ULYSSES_FFI_LINE_H_
