// SPDX-License-Identifier: Apache-2.0
// The kernels that the build compiled for tests; the first of each is a bf16 one.
#ifndef JAX_ULYSSES_TESTS_GPU_TEST_ENTRIES_H_
#define JAX_ULYSSES_TESTS_GPU_TEST_ENTRIES_H_

#include <vector>

#include "kernels/entry.h"

namespace jax_ulysses {

#define JU_TEST_KERNEL(op, name) KernelEntry<op##Call> name();
#include "test_kernels.inc"
#undef JU_TEST_KERNEL

namespace testing {

inline std::vector<KernelEntry<A2aGemmCall>> A2aGemmEntries() {
  std::vector<KernelEntry<A2aGemmCall>> entries;

#define JU_TEST_KERNEL(op, name) JU_ADD_##op(name)
#define JU_ADD_A2aGemm(name) entries.push_back(name());
#define JU_ADD_GemmA2a(name)
#include "test_kernels.inc"
#undef JU_ADD_A2aGemm
#undef JU_ADD_GemmA2a
#undef JU_TEST_KERNEL
  return entries;
}

inline std::vector<KernelEntry<GemmA2aCall>> GemmA2aEntries() {
  std::vector<KernelEntry<GemmA2aCall>> entries;
#define JU_TEST_KERNEL(op, name) JU_ADD_##op(name)
#define JU_ADD_A2aGemm(name)
#define JU_ADD_GemmA2a(name) entries.push_back(name());
#include "test_kernels.inc"
#undef JU_ADD_A2aGemm
#undef JU_ADD_GemmA2a
#undef JU_TEST_KERNEL
  return entries;
}

}  // namespace testing
}  // namespace jax_ulysses

#endif  // JAX_ULYSSES_TESTS_GPU_TEST_ENTRIES_H_
