// SPDX-License-Identifier: Apache-2.0
// Sums of what several ranks hold: in rank order, in fp32, rounded once. All kernels that add use
// these, so all give the same bits.
#ifndef JAX_ULYSSES_EXCHANGE_SUM_VECTORS_H_
#define JAX_ULYSSES_EXCHANGE_SUM_VECTORS_H_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "jax_ulysses/launch.h"
#include "jax_ulysses/ptx/async.h"

namespace jax_ulysses {

template <SumType kType>
struct SumElement {
  static constexpr int kBytes = 2;
  JU_D static float Load(const char* p) {
    const uint16_t bits = *reinterpret_cast<const uint16_t*>(p);
    if constexpr (kType == SumType::kBf16) return __bfloat162float(__ushort_as_bfloat16(bits));
    return __half2float(__ushort_as_half(bits));
  }
  JU_D static void Store(char* p, float v) {
    *reinterpret_cast<uint16_t*>(p) = kType == SumType::kBf16
                                          ? __bfloat16_as_ushort(__float2bfloat16(v))
                                          : __half_as_ushort(__float2half(v));
  }
};
template <>
struct SumElement<SumType::kF32> {
  static constexpr int kBytes = 4;
  JU_D static float Load(const char* p) { return *reinterpret_cast<const float*>(p); }
  JU_D static void Store(char* p, float v) { *reinterpret_cast<float*>(p) = v; }
};

// Sixteen bytes of elements.
template <SumType kType>
struct WideSum {
  static constexpr int kElements = 16 / SumElement<kType>::kBytes;
  float sum[kElements] = {};

  JU_D void Add(const uint4& bits) {
    const char* p = reinterpret_cast<const char*>(&bits);
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      sum[i] += SumElement<kType>::Load(p + i * SumElement<kType>::kBytes);
    }
  }
  JU_D uint4 Round() const {
    uint4 bits;
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      SumElement<kType>::Store(reinterpret_cast<char*>(&bits) + i * SumElement<kType>::kBytes,
                               sum[i]);
    }
    return bits;
  }
};

// Shared memory of a warp that adds: what its lanes have under way. A load takes about a
// microsecond beside a GEMM, and registers would hold only a few.
inline constexpr int32_t kSumScratchBytes = 32 << 10;
static_assert(kSumScratchBytes / 16 / 32 >= kMaxRanks);

// One warp: rows of `row_bytes` bytes, which lie `pitch` apart in `out`, become the sums of those
// that source(0), source(1), ... to `copies` hold one after the other. Sizes and addresses are
// multiples of 16 bytes.
template <SumType kType, class Source>
JU_D void SumVectors(char* scratch, char* out, int32_t pitch, int32_t rows, int32_t row_bytes,
                     int32_t copies, Source&& source) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x % 32);
  const int32_t vectors = row_bytes / 16;
  const int32_t count = rows * vectors;
  // Vectors of 32 lanes that are added up at a time. A lane reads only what it has copied itself.
  const int32_t batch = kSumScratchBytes / 16 / copies / 32 * 32;
  uint4* mine = reinterpret_cast<uint4*>(scratch) + lane;
  for (int32_t begin = 0; begin < count; begin += batch) {
    const int32_t size = min(batch, count - begin);
#pragma unroll 1
    for (int32_t r = 0; r < copies; ++r) {
      const uint4* from = reinterpret_cast<const uint4*>(source(r)) + begin + lane;
#pragma unroll 1
      for (int32_t v = 0; lane + v < size; v += 32) {
        ptx::CopyAsync16(mine + r * batch + v, from + v);
      }
    }
    ptx::CopyWaitAll();
#pragma unroll 1
    for (int32_t v = 0; lane + v < size; v += 32) {
      WideSum<kType> sum;
#pragma unroll 1
      for (int32_t r = 0; r < copies; ++r) sum.Add(mine[r * batch + v]);
      const int32_t at = begin + lane + v;
      const int32_t row = at / vectors;
      reinterpret_cast<uint4*>(out + row * pitch)[at - row * vectors] = sum.Round();
    }
  }
}

// The same, element by element, for sizes and addresses of any kind.
template <SumType kType, class Source>
JU_D void SumElements(char* out, int32_t pitch, int32_t rows, int32_t row_bytes, int32_t copies,
                      Source&& source) {
  constexpr int kBytes = SumElement<kType>::kBytes;
  const int32_t columns = row_bytes / kBytes;
  for (int32_t i = static_cast<int32_t>(threadIdx.x % 32); i < rows * columns; i += 32) {
    float sum = 0;
    for (int32_t r = 0; r < copies; ++r) sum += SumElement<kType>::Load(source(r) + i * kBytes);
    const int32_t row = i / columns;
    SumElement<kType>::Store(out + row * pitch + (i - row * columns) * kBytes, sum);
  }
}

// One of the two, for a type that is known at run time.
template <class Source>
JU_D void SumRows(SumType type, bool aligned, char* scratch, char* out, int32_t pitch, int32_t rows,
                  int32_t row_bytes, int32_t copies, Source&& source) {
  auto sum = [&](auto t) {
    if (aligned) {
      SumVectors<t.value>(scratch, out, pitch, rows, row_bytes, copies, source);
    } else {
      SumElements<t.value>(out, pitch, rows, row_bytes, copies, source);
    }
  };
  if (type == SumType::kF32) {
    sum(std::integral_constant<SumType, SumType::kF32>{});
  } else if (type == SumType::kBf16) {
    sum(std::integral_constant<SumType, SumType::kBf16>{});
  } else {
    sum(std::integral_constant<SumType, SumType::kF16>{});
  }
}

}  // namespace jax_ulysses

#endif  // JAX_ULYSSES_EXCHANGE_SUM_VECTORS_H_
