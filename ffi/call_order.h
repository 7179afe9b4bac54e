// SPDX-License-Identifier: Apache-2.0
// One order of calls for all ranks of a line.
//
// XLA:CPU starts calls that do not depend on each other in an order that differs from device to
// device, also relative to its own collectives. A handler that blocked its thread could therefore
// deadlock against another rank that blocks in the other call (or in an all-reduce). So handlers
// never block: they submit the call and return a future, and this class decides when it runs. The
// first rank that brings a call puts it at the end of the order; every other rank runs its calls in
// that order, holding back one that came early until those before it are here and done.
#ifndef JAX_ULYSSES_FFI_CALL_ORDER_H_
#define JAX_ULYSSES_FFI_CALL_ORDER_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <vector>

namespace jax_ulysses {

// What identifies a call on all ranks: the execution of the program, and the place in it. A place
// inside a loop comes again and again; its n-th time on one rank is the n-th time on the others.
struct CallKey {
  int64_t run = 0;
  const void* site = nullptr;

  bool operator==(const CallKey& other) const { return run == other.run && site == other.site; }
};

class CallOrder {
 public:
  // Runs the call and returns what is to be done when the rank is free for the next one.
  using Job = std::function<std::function<void()>()>;

  explicit CallOrder(int num_ranks);

  // False after End: the call can still be taken, but nobody waits for its run any more.
  bool Arrive(int rank, const CallKey& key, Job job);

  // Takes the call that `rank` may run now, if it is here and the rank is idle. With `any_order`
  // (the line is closed, calls only report that) the first one that is here.
  Job Take(int rank, bool any_order);

  // `rank` has run the call that it took last.
  void Finish(int rank);

  // The group ends. Returns the runs of calls that have not begun on all ranks.
  std::vector<int64_t> End();

 private:
  struct Entry {
    CallKey key;
    uint64_t arrived = 0;  // one bit a rank
    uint64_t taken = 0;
    std::vector<Job> jobs;
  };

  std::mutex mutex_;
  const int num_ranks_;
  std::deque<Entry> entries_;
  uint64_t busy_ = 0;
  bool ended_ = false;
};

}  // namespace jax_ulysses

#endif  // JAX_ULYSSES_FFI_CALL_ORDER_H_
