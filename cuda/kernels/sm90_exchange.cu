// SPDX-License-Identifier: Apache-2.0
#include "kernels/sm90_exchange.cuh"

namespace jax_ulysses {

KernelEntry<ExchangeCall> ExchangeEntry() {
  return MakeExchangeEntry<false, ExchangeParams, ExchangeCall>(&BuildExchange);
}
KernelEntry<PsumCall> PsumEntry() {
  return MakeExchangeEntry<false, PsumParams, PsumCall>(&BuildPsum);
}

}  // namespace jax_ulysses
