// SPDX-License-Identifier: Apache-2.0
// The epilogue: accumulator + bias in fp32, one rounding, and stores from registers. It needs no
// shared memory, which the communication ring gets instead, no barrier, and the columns of a tile
// may go to different places.
//
// The accumulators of a quad of lanes hold, of one row, two neighbours in each of four groups of 8
// columns. The quad transposes them, so that a lane has a whole group: 16 bytes, and the quad 64
// bytes in a row.
#ifndef JAX_ULYSSES_GEMM_STORE_TILE_H_
#define JAX_ULYSSES_GEMM_STORE_TILE_H_

#include "cute/tensor.hpp"
#include "cutlass/numeric_conversion.h"
#include "jax_ulysses/base.h"
#include "jax_ulysses/exchange/geometry.h"
#include "jax_ulysses/ptx/async.h"

namespace jax_ulysses {

// Where the rows of a tile go, from its first row and some column on.
template <class Element>
struct TileOutput {
  Element* data;
  const Element* bias;  // of the first column, or null
  int32_t pitch;        // elements from row to row
  int32_t rows;         // that exist from here on
  int32_t columns;      // likewise; a multiple of 8
};

// out[k] of lane q of a quad = in[q] of lane k.
JU_D void TransposeQuad(uint32_t (&v)[4]) {
  const bool odd = threadIdx.x % 2 != 0;
  const bool upper = threadIdx.x % 4 >= 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint32_t got = __shfl_xor_sync(~0u, odd ? v[i] : v[i + 1], 1);
    (odd ? v[i] : v[i + 1]) = got;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t got = __shfl_xor_sync(~0u, upper ? v[i] : v[i + 2], 2);
    (upper ? v[i] : v[i + 2]) = got;
  }
}

// Rows of an MMA of a warp group: 16 a warp.
inline constexpr int kMmaRows = 64;

// Stores columns [kBegin, kBegin + kColumns) of a tile. `thread` counts through the team that made
// it, as the MMA does, so that warp w has rows [16 w, 16 w + 16) and, if there are more rows than
// the team has MMAs, those kMmaRows below them. Whole warps.
template <int kBegin, int kColumns, class Element, class Accumulator>
JU_D void StoreColumns(const Accumulator& accumulator, const TileOutput<Element>& out, int thread) {
  static_assert(kColumns % 32 == 0);
  constexpr int kMmaValues = decltype(cute::size<0>(accumulator))::value;
  constexpr int kMmas = decltype(cute::size(accumulator))::value / kMmaValues;
  const int quad_lane = thread % 4;
  const int32_t first_row = thread / 32 * 16 + thread % 32 / 4;
  Element* const data = out.data + static_cast<int64_t>(first_row) * out.pitch + quad_lane * 8;
  cutlass::NumericArrayConverter<Element, float, 2> convert;
#pragma unroll
  for (int group = 0; group < kColumns / 32; ++group) {
    float bias[4][2] = {};
    if (out.bias != nullptr) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int32_t column = group * 32 + j * 8 + quad_lane * 2;
        if (column < out.columns) {
          bias[j][0] = static_cast<float>(out.bias[column]);
          bias[j][1] = static_cast<float>(out.bias[column + 1]);
        }
      }
    }
#pragma unroll
    for (int below = 0; below < 2 * kMmas; ++below) {
      // In groups of 8 columns: 2 columns of a row, then the same 8 rows below.
      const int mma = below / 2, half = below % 2;
      const int32_t row = mma * kMmaRows + half * 8;
      uint32_t packed[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int at = mma * kMmaValues + (kBegin / 8 + group * 4 + j) * 4 + half * 2;
        cutlass::Array<float, 2> sum;
        sum[0] = accumulator(at) + bias[j][0];
        sum[1] = accumulator(at + 1) + bias[j][1];
        const cutlass::Array<Element, 2> rounded = convert(sum);
        packed[j] = reinterpret_cast<const uint32_t&>(rounded);
      }
      TransposeQuad(packed);
      if (first_row + row < out.rows && group * 32 + quad_lane * 8 < out.columns) {
        *reinterpret_cast<uint4*>(data + static_cast<int64_t>(row) * out.pitch + group * 32) =
            make_uint4(packed[0], packed[1], packed[2], packed[3]);
      }
    }
  }
}

}  // namespace jax_ulysses

#endif  // JAX_ULYSSES_GEMM_STORE_TILE_H_
