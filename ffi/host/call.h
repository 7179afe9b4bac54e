// SPDX-License-Identifier: Apache-2.0
// One call of one rank on the CPU: a compute role on the calling thread and a communication role
// on a second one, as the warps of a kernel have them.
#ifndef JAX_ULYSSES_FFI_HOST_CALL_H_
#define JAX_ULYSSES_FFI_HOST_CALL_H_

#include <cstdint>
#include <functional>
#include <string>

#include "group.h"
#include "jax_ulysses/comm/host_memory.h"
#include "jax_ulysses/comm/rank_protocol.h"

namespace jax_ulysses::host {

using Protocol = RankProtocol<HostMemory>;

// Returns false when it left early because the group was aborted.
using Role = std::function<bool(Protocol&)>;

struct CallSpec {
  Operator op = Operator::kNone;
  uint32_t agreement = 0;
  int64_t slot_bytes = 0;  // what this call needs
  // Check the peers' entries before the communication role (it reads what peers wrote) or after it
  // (it only writes into slots, and need not wait for anyone to arrive).
  bool entries_first = true;
  Role compute;
  Role communicate;
};

enum class CallError {
  kNone,
  kSlotTooSmall,  // refused by all ranks alike; the group goes on
  kAborted,       // the group is closed
  kInternal,      // failed before the protocol, on all ranks alike
};

struct CallStatus {
  CallError error = CallError::kNone;
  // After an abort the same text on all ranks of the line, in this call and in later ones. The
  // outputs then hold nothing of value.
  std::string text;

  bool ok() const { return error == CallError::kNone; }
};

CallStatus RunCall(const RankHandle& handle, const CallSpec& spec);

// FNV-1a, for the agreement of ranks on what they call.
class Hash {
 public:
  Hash& Add(int64_t value) {
    for (int i = 0; i < 8; ++i) {
      state_ = (state_ ^ (static_cast<uint64_t>(value) >> (8 * i) & 0xffu)) * 1099511628211u;
    }
    return *this;
  }
  uint32_t value() const { return static_cast<uint32_t>(state_ ^ state_ >> 32); }

 private:
  uint64_t state_ = 14695981039346656037u;
};

}  // namespace jax_ulysses::host

#endif  // JAX_ULYSSES_FFI_HOST_CALL_H_
