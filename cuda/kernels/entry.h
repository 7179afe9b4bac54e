// SPDX-License-Identifier: Apache-2.0
// One compiled kernel, with its CUTLASS types erased: what the launcher needs to know of it.
#ifndef JAX_ULYSSES_KERNELS_ENTRY_H_
#define JAX_ULYSSES_KERNELS_ENTRY_H_

#include "jax_ulysses/launch.h"

namespace jax_ulysses {

// Numbers that the launcher settles for a call, the same on all ranks.
struct LaunchPlan {
  int32_t ctas = 0;
  int32_t comm_ctas = 0;
  int32_t window_rows = 0;  // of a2a_gemm; 0: WindowRows
  int32_t head_rows = 0;    // of a2a_gemm: the first rows, which all CTAs push (benchmarks)
};

template <class Call>
struct KernelEntry {
  ElementType type = ElementType::kBf16;
  bool transposed = false;
  TilePolicy tile = TilePolicy::kAuto;
  int32_t tile_rows = 0;
  int32_t tile_columns = 0;
  int32_t cluster = 1;  // CTAs that are launched together: the grid is a multiple
  int32_t threads = 0;
  int32_t shared_bytes = 0;
  int32_t params_bytes = 0;
  const void* rank_kernel = nullptr;   // (Params)
  const void* world_kernel = nullptr;  // (const Params*, int32_t ctas), or null
  // Writes Params for `call` to `params`, params_bytes bytes aligned to 64. Encodes tensor maps.
  void (*build)(const Call& call, const LaunchPlan& plan, void* params) = nullptr;
  // Changes the agreement hash in built parameters: it may differ from run to run.
  void (*set_agreement)(void* params, uint32_t agreement) = nullptr;
};

}  // namespace jax_ulysses

#endif  // JAX_ULYSSES_KERNELS_ENTRY_H_
