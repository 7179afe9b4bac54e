// SPDX-License-Identifier: Apache-2.0
// bf16 and f16 conversions, for every value of 16 bits and every rounding between neighbours.
#include "host/numeric.h"

#include <cmath>

#include "check.h"
#include "host/gemm.h"

namespace jax_ulysses::host {
namespace {

// Exact value of a 16-bit pattern by the definition of the format.
template <class T>
double Definition(uint32_t bits) {
  constexpr int mantissa = std::is_same_v<T, F16> ? 10 : 7;
  constexpr int bias = std::is_same_v<T, F16> ? 15 : 127;
  const int exponent = static_cast<int>(bits >> mantissa) & (2 * bias + 1);
  const double fraction = static_cast<double>(bits & ((1u << mantissa) - 1)) / (1 << mantissa);
  const double magnitude =
      exponent == 0 ? std::ldexp(fraction, 1 - bias) : std::ldexp(1 + fraction, exponent - bias);
  return (bits & 0x8000u) != 0 ? -magnitude : magnitude;
}

template <class T>
void CheckAllValues(uint32_t infinity) {
  for (uint32_t bits = 0; bits < 0x10000u; ++bits) {
    const T value = {static_cast<uint16_t>(bits)};
    const float wide = Widen(value);
    if ((bits & 0x7fffu) > infinity) {
      JU_CHECK(std::isnan(wide) && std::isnan(Widen(Narrow<T>(wide))));
      continue;
    }
    JU_CHECK(Narrow<T>(wide).bits == bits);
    if ((bits & 0x7fffu) == infinity) {
      JU_CHECK(std::isinf(wide));
      continue;
    }
    JU_CHECK(static_cast<double>(wide) == Definition<T>(bits));
    if ((bits & 0x7fffu) + 1 == infinity) continue;
    // Half way to the next value goes to the even one; a step to either side, to the nearer one.
    const float next = Widen(T{static_cast<uint16_t>(bits + 1)});
    const float middle = wide + (next - wide) / 2;
    JU_CHECK(Narrow<T>(middle).bits == (bits % 2 == 0 ? bits : bits + 1));
    JU_CHECK(Narrow<T>(std::nextafterf(middle, wide)).bits == bits);
    JU_CHECK(Narrow<T>(std::nextafterf(middle, next)).bits == bits + 1);
  }
}

// What a failed call leaves in its outputs.
template <class T>
void CheckFillNan(ElementType type) {
  T values[3] = {Narrow<T>(1), Narrow<T>(2), Narrow<T>(3)};
  FillNan(type, values, 2);
  JU_CHECK(std::isnan(Widen(values[0])) && std::isnan(Widen(values[1])));
  JU_CHECK(Widen(values[2]) == 3);
}

// Sums in ascending k whatever the blocking: equal to the plain loop, bit for bit.
void CheckGemmOrder() {
  const int64_t rows = 3, depth = 301, cols = 517;
  std::vector<float> a(static_cast<size_t>(rows * depth)), w(static_cast<size_t>(depth * cols));
  for (size_t i = 0; i < a.size(); ++i) a[i] = std::sin(static_cast<float>(i));
  for (size_t i = 0; i < w.size(); ++i) w[i] = std::cos(static_cast<float>(i));
  std::vector<float> transposed(w.size());
  for (int64_t k = 0; k < depth; ++k) {
    for (int64_t n = 0; n < cols; ++n) transposed[n * depth + k] = w[k * cols + n];
  }
  std::vector<float> plain(static_cast<size_t>(rows * cols), 0.f), one = plain, two = plain;
  for (int64_t m = 0; m < rows; ++m) {
    for (int64_t n = 0; n < cols; ++n) {
      for (int64_t k = 0; k < depth; ++k) {
        plain[m * cols + n] += a[m * depth + k] * w[k * cols + n];
      }
    }
  }
  Gemm<float> gemm;
  gemm.Accumulate(one.data(), cols, a.data(), depth, rows, depth, {w.data(), depth, cols, false}, 0,
                  0, cols);
  // In two calls, from the transposed weight, in pieces of columns.
  for (int64_t n = 0; n < cols; n += 100) {
    for (int64_t k = 0; k < depth; k += 200) {
      gemm.Accumulate(two.data() + n, cols, a.data() + k, depth, rows,
                      std::min<int64_t>(200, depth - k), {transposed.data(), depth, cols, true}, k,
                      n, std::min<int64_t>(100, cols - n));
    }
  }
  JU_CHECK(one == plain);
  JU_CHECK(two == plain);
}

}  // namespace
}  // namespace jax_ulysses::host

int main() {
  jax_ulysses::host::CheckAllValues<jax_ulysses::host::Bf16>(0x7f80u);
  jax_ulysses::host::CheckAllValues<jax_ulysses::host::F16>(0x7c00u);
  jax_ulysses::host::CheckFillNan<float>(jax_ulysses::host::ElementType::kF32);
  jax_ulysses::host::CheckFillNan<double>(jax_ulysses::host::ElementType::kF64);
  jax_ulysses::host::CheckFillNan<jax_ulysses::host::Bf16>(jax_ulysses::host::ElementType::kBf16);
  jax_ulysses::host::CheckFillNan<jax_ulysses::host::F16>(jax_ulysses::host::ElementType::kF16);
  jax_ulysses::host::CheckGemmOrder();
  return jax_ulysses::testing::Finish("numeric_test");
}
