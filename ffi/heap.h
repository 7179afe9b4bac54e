// SPDX-License-Identifier: Apache-2.0
// Where the heaps of a line live and how ranks reach each other's. One implementation a platform;
// the rest of the library sees only addresses.
#ifndef JAX_ULYSSES_FFI_HEAP_H_
#define JAX_ULYSSES_FFI_HEAP_H_

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "jax_ulysses/comm/rank_protocol.h"
#include "jax_ulysses/exchange/fault_mailbox.h"

namespace jax_ulysses {

// This mesh or machine cannot do it, and another implementation has to: no fault of the arguments.
class UnavailableError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// One device of a session: rank `rank` of line `line`.
struct Member {
  int32_t device_ordinal = 0;
  int32_t line = 0;
  int32_t rank = 0;
};

// How to reach the heap of one rank, from its own process or from another on the same host. Plain
// data: it travels through a key-value store.
struct HeapRecord {
  char host[40] = {};     // boot id of the machine
  char process[40] = {};  // random, of one process
  Member member;
  int32_t pid = 0;
  uint64_t address = 0;  // in that process
  unsigned char ipc_handle[64] = {};
  HeapLayout layout;
  int64_t deadline_ms = 0;
};

// The heaps of the ranks of one line. Life: constructor (allocates those of this process), Connect,
// calls, Interrupt, Disconnect, destructor (frees). Between Disconnect and the destructor all
// processes of the line must have disconnected.
class SymmetricHeap {
 public:
  virtual ~SymmetricHeap() = default;

  // Records of the ranks of this process. Empty where no other process can join.
  virtual std::vector<HeapRecord> Export() const { return {}; }
  // Makes all ranks' heaps reachable; `records` are those of the whole line. Throws
  // UnavailableError or std::runtime_error, both with the ranks or devices in question.
  virtual void Connect(const std::vector<HeapRecord>& /*records*/) {}

  // Base addresses of all ranks' heaps as `rank`, a rank of this process, sees them.
  virtual PeerTable Peers(int rank) const = 0;

  // Where the kernels of `rank` leave a fault, as they see it; null without kernels.
  virtual FaultMailbox* mailbox(int /*rank*/) const { return nullptr; }
  // The fault that kernels of any rank of this process have left; kind kNone if there is none.
  virtual Fault PollFault() const { return {}; }

  // Ends running calls, or waits for their end where every wait has a deadline.
  virtual void Interrupt() = 0;
  // Gives the heaps of other processes back.
  virtual void Disconnect() {}
};

// All ranks are threads of this process. Pages are committed when they are first touched, so an
// idle slot costs address space only. Throws std::runtime_error when the memory is refused.
std::unique_ptr<SymmetricHeap> MakeHostHeap(const HeapLayout& layout, uint32_t start_epoch);

}  // namespace jax_ulysses

#endif  // JAX_ULYSSES_FFI_HEAP_H_
