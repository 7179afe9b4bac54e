// SPDX-License-Identifier: Apache-2.0
// All-to-all -> GEMM on CPU threads, with the structure of the fused kernel.
#ifndef JAX_ULYSSES_FFI_HOST_A2A_GEMM_H_
#define JAX_ULYSSES_FFI_HOST_A2A_GEMM_H_

#include "blocks.h"
#include "call.h"
#include "numeric.h"

namespace jax_ulysses::host {

struct A2aGemmArgs {
  Shape shape;
  ElementType type = ElementType::kF32;
  int64_t width = 0;                     // D
  const char* parts[kMaxSegments] = {};  // per segment [B, S, local heads, H]
  const void* w = nullptr;               // [C, D], or [D, C] when w_transposed
  const void* bias = nullptr;            // [D] or null
  bool w_transposed = false;
  void* y = nullptr;  // [B, T, D]
  void* g = nullptr;  // [B, T, C], or null if it is not wanted
  uint32_t agreement = 0;
};

CallStatus RunA2aGemm(const RankHandle& handle, A2aGemmArgs args);

}  // namespace jax_ulysses::host

#endif  // JAX_ULYSSES_FFI_HOST_A2A_GEMM_H_
