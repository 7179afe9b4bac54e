// SPDX-License-Identifier: Apache-2.0
// The kernels that the build compiled for tests.
#ifndef JAX_ULYSSES_TESTS_GPU_TEST_ENTRIES_H_
#define JAX_ULYSSES_TESTS_GPU_TEST_ENTRIES_H_

#include <vector>

#include "kernels/entry.h"

// A build for one kernel may name another list.
#ifndef JU_TEST_KERNELS
#define JU_TEST_KERNELS "test_kernels.def"
#endif

namespace jax_ulysses {

#define JU_KERNEL(op, element, rows, columns, w) \
  KernelEntry<op##Call> Test##op##element##_##rows##x##columns##w();
#include JU_TEST_KERNELS
#undef JU_KERNEL

KernelEntry<ExchangeCall> TestExchangeEntry();
KernelEntry<PsumCall> TestPsumEntry();

namespace testing {

template <class Call>
void AddTo(std::vector<KernelEntry<Call>>& entries, const KernelEntry<Call>& entry) {
  entries.push_back(entry);
}
template <class Call, class Other>
void AddTo(std::vector<KernelEntry<Call>>&, const KernelEntry<Other>&) {}

template <class Call>
std::vector<KernelEntry<Call>> TestEntries() {
  std::vector<KernelEntry<Call>> entries;
#define JU_KERNEL(op, element, rows, columns, w) \
  AddTo(entries, Test##op##element##_##rows##x##columns##w());
#include JU_TEST_KERNELS
#undef JU_KERNEL
  return entries;
}

inline std::vector<KernelEntry<A2aGemmCall>> A2aGemmEntries() { return TestEntries<A2aGemmCall>(); }
inline std::vector<KernelEntry<GemmA2aCall>> GemmA2aEntries() { return TestEntries<GemmA2aCall>(); }

}  // namespace testing
}  // namespace jax_ulysses

#endif  // JAX_ULYSSES_TESTS_GPU_TEST_ENTRIES_H_
