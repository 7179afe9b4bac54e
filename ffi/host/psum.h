// SPDX-License-Identifier: Apache-2.0
// Sum over the ranks of a vector, on CPU threads.
#ifndef JAX_ULYSSES_FFI_HOST_PSUM_H_
#define JAX_ULYSSES_FFI_HOST_PSUM_H_

#include "call.h"
#include "numeric.h"

namespace jax_ulysses::host {

// One vector, or as much of one as the slots hold: every rank's copy lies in each slot.
struct PsumArgs {
  ElementType type = ElementType::kF32;
  int64_t count = 0;
  int64_t element_bytes = 4;
  const char* in = nullptr;
  char* out = nullptr;  // not `in`
  uint32_t agreement = 0;

  int64_t bytes() const { return count * element_bytes; }
  int64_t stride() const { return RoundUp(bytes(), 16); }  // of a rank's copy in a slot
};

// Elements that one call can sum. A multiple of 16 bytes, so that later parts stay aligned; 0 where
// the slots are too small for any.
inline int64_t PsumCapacity(const HeapLayout& layout, int64_t element_bytes) {
  return layout.slot_bytes / layout.num_ranks / 16 * 16 / element_bytes;
}

CallStatus RunPsum(const RankHandle& handle, const PsumArgs& args);

}  // namespace jax_ulysses::host

#endif  // JAX_ULYSSES_FFI_HOST_PSUM_H_
