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
};

template <class Call>
struct KernelEntry {
  ElementType type;
  bool transposed;
  TilePolicy tile;
  int32_t tile_rows;
  int32_t tile_columns;
  int32_t shared_bytes;
  int32_t params_bytes;
  const void* rank_kernel;   // (Params)
  const void* world_kernel;  // (const Params*, int32_t ctas), or null
  // Writes Params for `call` to `params`, params_bytes bytes aligned to 64. Encodes tensor maps.
  void (*build)(const Call& call, const LaunchPlan& plan, void* params);
};

inline constexpr int32_t kBlockThreads = 384;

}  // namespace jax_ulysses

#endif  // JAX_ULYSSES_KERNELS_ENTRY_H_
