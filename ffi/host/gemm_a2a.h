// SPDX-License-Identifier: Apache-2.0
// GEMM -> all-to-all on CPU threads, with the structure of the fused kernel.
#ifndef JAX_ULYSSES_FFI_HOST_GEMM_A2A_H_
#define JAX_ULYSSES_FFI_HOST_GEMM_A2A_H_

#include "blocks.h"
#include "call.h"
#include "numeric.h"

namespace jax_ulysses::host {

struct GemmA2aArgs {
  Shape shape;
  ElementType type = ElementType::kF32;
  int64_t depth = 0;           // D
  const void* x = nullptr;     // [B, T, D]
  const void* w = nullptr;     // [D, C], or [C, D] when w_transposed
  const void* bias = nullptr;  // [C] or null
  bool w_transposed = false;
  void* out[kMaxSegments] = {};  // per segment [B, S, local heads, H]
  uint32_t agreement = 0;
};

CallStatus RunGemmA2a(const RankHandle& handle, GemmA2aArgs args);

}  // namespace jax_ulysses::host

#endif  // JAX_ULYSSES_FFI_HOST_GEMM_A2A_H_
