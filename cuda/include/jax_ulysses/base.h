// SPDX-License-Identifier: Apache-2.0
// What every header needs: the host/device marker and the limits of the library.
//
// Letters, everywhere: B batch, S global sequence, T local sequence (S / P), N query heads, K
// key/value heads, H head dimension, D model dimension, P ranks, C columns of a fused matrix.
#ifndef JAX_ULYSSES_BASE_H_
#define JAX_ULYSSES_BASE_H_

#include <cstddef>
#include <cstdint>

// Empty without nvcc, so that the same integer code is compiled for both sides.
#if defined(__CUDACC__)
#define JU_HD __host__ __device__
#else
#define JU_HD
#endif

namespace jax_ulysses {

// Ranks of one group. Bounds the peer tables that are passed by value to kernels.
inline constexpr int kMaxRanks = 64;

// Segments (Q, K, V, ...) that travel in one exchange.
inline constexpr int kMaxSegments = 8;

JU_HD constexpr int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }
JU_HD constexpr int64_t RoundUp(int64_t a, int64_t b) { return CeilDiv(a, b) * b; }
JU_HD constexpr int64_t Min(int64_t a, int64_t b) { return a < b ? a : b; }
JU_HD constexpr int64_t Max(int64_t a, int64_t b) { return a > b ? a : b; }

}  // namespace jax_ulysses

#endif  // JAX_ULYSSES_BASE_H_
