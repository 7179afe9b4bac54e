// SPDX-License-Identifier: Apache-2.0
// Where the heaps of a line live and how ranks reach each other's. One implementation a platform;
// the rest of the library sees only base addresses.
#ifndef JAX_ULYSSES_FFI_HEAP_H_
#define JAX_ULYSSES_FFI_HEAP_H_

#include <memory>
#include <string>

#include "jax_ulysses/comm/rank_protocol.h"

namespace jax_ulysses {

class SymmetricHeap {
 public:
  virtual ~SymmetricHeap() = default;

  // Base addresses of all ranks' heaps as `rank` sees them.
  virtual PeerTable Peers(int rank) const = 0;
};

// All ranks are threads of this process. Pages are committed when they are first touched, so an
// idle slot costs address space only. Throws std::runtime_error when the memory is refused.
std::unique_ptr<SymmetricHeap> MakeHostHeap(const HeapLayout& layout, uint32_t start_epoch);

}  // namespace jax_ulysses

#endif  // JAX_ULYSSES_FFI_HEAP_H_
