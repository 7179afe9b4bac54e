// SPDX-License-Identifier: Apache-2.0
// Element types of the CPU handlers: storage, accumulator, conversions (round to nearest even).
#ifndef JAX_ULYSSES_FFI_HOST_NUMERIC_H_
#define JAX_ULYSSES_FFI_HOST_NUMERIC_H_

#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

namespace jax_ulysses::host {

struct Bf16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};

inline uint32_t BitsOf(float v) {
  uint32_t bits;
  std::memcpy(&bits, &v, sizeof bits);
  return bits;
}
inline float FromBits(uint32_t bits) {
  float v;
  std::memcpy(&v, &bits, sizeof v);
  return v;
}

inline float Widen(Bf16 v) { return FromBits(static_cast<uint32_t>(v.bits) << 16); }
inline float Widen(F16 v) {
  const uint32_t sign = static_cast<uint32_t>(v.bits & 0x8000u) << 16;
  const uint32_t magnitude = v.bits & 0x7fffu;
  if (magnitude >= 0x7c00u) return FromBits(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
  if (magnitude >= 0x0400u) return FromBits(sign | ((magnitude << 13) + 0x38000000u));
  // Subnormal: an exact multiple of 2^-24.
  const float value = static_cast<float>(magnitude) * 0x1p-24f;
  return FromBits(sign | BitsOf(value));
}
inline float Widen(float v) { return v; }
inline double Widen(double v) { return v; }

template <class T>
T Narrow(std::conditional_t<std::is_same_v<T, double>, double, float> v);

template <>
inline float Narrow<float>(float v) {
  return v;
}
template <>
inline double Narrow<double>(double v) {
  return v;
}
template <>
inline Bf16 Narrow<Bf16>(float v) {
  const uint32_t bits = BitsOf(v);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>(bits >> 16 | 0x40u)};
  return {static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)};
}
template <>
inline F16 Narrow<F16>(float v) {
  const uint32_t bits = BitsOf(v);
  const uint32_t sign = bits >> 16 & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return {static_cast<uint16_t>(sign | 0x7e00u)};
  // 65520 and above round to infinity.
  if (magnitude >= 0x477ff000u) return {static_cast<uint16_t>(sign | 0x7c00u)};
  if (magnitude >= 0x38800000u) {
    const uint32_t rounded = magnitude + 0xfffu + (magnitude >> 13 & 1u);
    return {static_cast<uint16_t>(sign | (rounded - 0x38000000u) >> 13)};
  }
  // Subnormal or zero: adding 0.5 puts the result's last bit at the float's last bit.
  const float shifted = FromBits(magnitude) + 0.5f;
  return {static_cast<uint16_t>(sign | (BitsOf(shifted) - 0x3f000000u))};
}

// Accumulator of a storage type: double for double, else float.
template <class T>
using Accumulator = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <class T>
T QuietNan() {
  return Narrow<T>(std::numeric_limits<Accumulator<T>>::quiet_NaN());
}

// What the handlers need to know about a dtype at run time.
enum class ElementType { kF32, kF64, kBf16, kF16, kOther };

template <class F>
auto DispatchFloat(ElementType type, F&& f) {
  switch (type) {
    case ElementType::kF64:
      return f(double{});
    case ElementType::kBf16:
      return f(Bf16{});
    case ElementType::kF16:
      return f(F16{});
    case ElementType::kF32:
    case ElementType::kOther:
      break;
  }
  return f(float{});
}

inline void FillNan(ElementType type, void* data, int64_t count) {
  if (type == ElementType::kOther) return;
  DispatchFloat(type, [&](auto tag) {
    using T = decltype(tag);
    T* out = static_cast<T*>(data);
    for (int64_t i = 0; i < count; ++i) out[i] = QuietNan<T>();
  });
}

}  // namespace jax_ulysses::host

#endif  // JAX_ULYSSES_FFI_HOST_NUMERIC_H_
