// SPDX-License-Identifier: Apache-2.0
// The whole test framework: JU_CHECK counts failures, JU_TEST_MAIN_END() is the exit status.
#ifndef JAX_ULYSSES_TESTS_CHECK_H_
#define JAX_ULYSSES_TESTS_CHECK_H_

#include <atomic>
#include <cstdio>
#include <cstdlib>

namespace jax_ulysses::testing {

inline std::atomic<long> g_checks{0};
inline std::atomic<long> g_failures{0};

inline bool Report(bool ok, const char* what, const char* file, int line) {
  g_checks.fetch_add(1, std::memory_order_relaxed);
  if (ok) return true;
  // The first few say enough; thousands would hide them.
  if (g_failures.fetch_add(1) < 20) std::fprintf(stderr, "%s:%d: failed: %s\n", file, line, what);
  return false;
}

// Scale of the long tests: JAX_ULYSSES_TEST_SCALE=10 runs ten times the epochs.
inline long Scaled(long base) {
  const char* text = std::getenv("JAX_ULYSSES_TEST_SCALE");
  const double scale = text != nullptr ? std::atof(text) : 1.0;
  const long scaled = static_cast<long>(static_cast<double>(base) * scale);
  return scaled < 1 ? 1 : scaled;
}

inline int Finish(const char* name) {
  const long checks = g_checks.load();
  const long failures = g_failures.load();
  std::printf("%s: %ld checks, %ld failed\n", name, checks, failures);
  return failures == 0 && checks > 0 ? 0 : 1;
}

}  // namespace jax_ulysses::testing

#define JU_CHECK(condition) \
  ::jax_ulysses::testing::Report((condition), #condition, __FILE__, __LINE__)

#endif  // JAX_ULYSSES_TESTS_CHECK_H_
