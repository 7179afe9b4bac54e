// SPDX-License-Identifier: Apache-2.0
// The plain exchange on CPU threads, both directions, any element type.
#ifndef JAX_ULYSSES_FFI_HOST_EXCHANGE_H_
#define JAX_ULYSSES_FFI_HOST_EXCHANGE_H_

#include "blocks.h"
#include "call.h"
#include "numeric.h"

namespace jax_ulysses::host {

struct ExchangeArgs {
  Shape shape;
  ElementType type = ElementType::kOther;
  bool gather = false;
  // Gather only: the copies of a replicated head are summed; otherwise the first one is taken.
  bool sum_replicas = false;
  // Per segment: sequence shard [B, T, M, H] and head shard [B, S, local heads, H]; scatter reads
  // the first and writes the second, gather the reverse.
  const char* in[kMaxSegments] = {};
  char* out[kMaxSegments] = {};
  uint32_t agreement = 0;
};

CallStatus RunExchange(const RankHandle& handle, ExchangeArgs args);

}  // namespace jax_ulysses::host

#endif  // JAX_ULYSSES_FFI_HOST_EXCHANGE_H_
