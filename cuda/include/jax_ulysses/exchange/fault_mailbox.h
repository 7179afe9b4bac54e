// SPDX-License-Identifier: Apache-2.0
#ifndef JAX_ULYSSES_EXCHANGE_FAULT_MAILBOX_H_
#define JAX_ULYSSES_EXCHANGE_FAULT_MAILBOX_H_

#include "jax_ulysses/comm/heap_layout.h"

namespace jax_ulysses {

// Page-locked memory of the host that the device can write. The kernel releases `ready` (system
// scope) after the words of the Fault, in the order of the struct; a watchdog polls and acquires.
struct FaultMailbox {
  uint32_t words[kFaultWords];
  uint32_t ready;
};

}  // namespace jax_ulysses

#endif  // JAX_ULYSSES_EXCHANGE_FAULT_MAILBOX_H_
