// SPDX-License-Identifier: Apache-2.0
// The compiled kernels.
#ifndef JAX_ULYSSES_KERNELS_REGISTRY_H_
#define JAX_ULYSSES_KERNELS_REGISTRY_H_

#include <vector>

#include "kernels/entry.h"

namespace jax_ulysses {

const std::vector<KernelEntry<A2aGemmCall>>& A2aGemmRegistry();
const std::vector<KernelEntry<GemmA2aCall>>& GemmA2aRegistry();
KernelEntry<ExchangeCall> ExchangeEntry();
KernelEntry<PsumCall> PsumEntry();

}  // namespace jax_ulysses

#endif  // JAX_ULYSSES_KERNELS_REGISTRY_H_
