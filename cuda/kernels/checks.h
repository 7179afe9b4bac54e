// SPDX-License-Identifier: Apache-2.0
// What a call must satisfy, apart from which kernels are compiled.
#ifndef JAX_ULYSSES_KERNELS_CHECKS_H_
#define JAX_ULYSSES_KERNELS_CHECKS_H_

#include "jax_ulysses/launch.h"

namespace jax_ulysses {

// `tile_rows` and `tile_columns` are those of the kernel that would run.
Status CheckCall(const GemmA2aCall& call, int32_t tile_rows, int32_t tile_columns);
Status CheckCall(const A2aGemmCall& call, int32_t tile_rows, int32_t tile_columns);
Status CheckCall(const ExchangeCall& call);
Status CheckCall(const PsumCall& call);

}  // namespace jax_ulysses

#endif  // JAX_ULYSSES_KERNELS_CHECKS_H_
