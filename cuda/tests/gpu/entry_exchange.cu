// SPDX-License-Identifier: Apache-2.0
// Test builds of the exchange and of psum.
#include "kernels/sm90_exchange.cuh"

namespace jax_ulysses {

KernelEntry<ExchangeCall> TestExchangeEntry() {
  return MakeExchangeEntry<true, ExchangeParams, ExchangeCall>(&BuildExchange);
}
KernelEntry<PsumCall> TestPsumEntry() {
  return MakeExchangeEntry<true, PsumParams, PsumCall>(&BuildPsum);
}

}  // namespace jax_ulysses
