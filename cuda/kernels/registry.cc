// SPDX-License-Identifier: Apache-2.0
#include "kernels/registry.h"

namespace jax_ulysses {

// Each is defined by an instantiation.
#define JU_KERNEL(op, element, rows, columns, w) \
  KernelEntry<op##Call> op##element##_##rows##x##columns##w();
#include "instantiations/kernels.def"
#undef JU_KERNEL

namespace {

template <class Call>
void AddTo(std::vector<KernelEntry<Call>>& entries, const KernelEntry<Call>& entry) {
  entries.push_back(entry);
}
template <class Call, class Other>
void AddTo(std::vector<KernelEntry<Call>>&, const KernelEntry<Other>&) {}

template <class Call>
std::vector<KernelEntry<Call>> All() {
  std::vector<KernelEntry<Call>> entries;
#define JU_KERNEL(op, element, rows, columns, w) \
  AddTo(entries, op##element##_##rows##x##columns##w());
#include "instantiations/kernels.def"
#undef JU_KERNEL
  return entries;
}

}  // namespace

const std::vector<KernelEntry<A2aGemmCall>>& A2aGemmRegistry() {
  // Never destroyed: XLA's threads may outlive static destructors.
  static const auto* entries = new std::vector(All<A2aGemmCall>());
  return *entries;
}

const std::vector<KernelEntry<GemmA2aCall>>& GemmA2aRegistry() {
  static const auto* entries = new std::vector(All<GemmA2aCall>());
  return *entries;
}

}  // namespace jax_ulysses
