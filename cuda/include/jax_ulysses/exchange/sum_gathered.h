// SPDX-License-Identifier: Apache-2.0
// The gathered operand where ranks share a head: the communication warps of all-to-all -> GEMM add
// up what the ranks of a block hold, in rank order and in fp32, and round once. The exchange kernel
// (SumReplicas) does the same additions, so both give the same bits.
#ifndef JAX_ULYSSES_EXCHANGE_SUM_GATHERED_H_
#define JAX_ULYSSES_EXCHANGE_SUM_GATHERED_H_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "jax_ulysses/exchange/push.h"

namespace jax_ulysses {

// Two elements of 16 bits.
template <bool kF16>
struct Pair {
  JU_D static float2 Widen(uint32_t bits) {
    if constexpr (kF16) {
      return __half22float2(*reinterpret_cast<const __half2*>(&bits));
    } else {
      return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&bits));
    }
  }
  JU_D static uint32_t Round(float2 v) {
    if constexpr (kF16) {
      const __half2 pair = __float22half2_rn(v);
      return *reinterpret_cast<const uint32_t*>(&pair);
    } else {
      const __nv_bfloat162 pair = __float22bfloat162_rn(v);
      return *reinterpret_cast<const uint32_t*>(&pair);
    }
  }
};

// What `source` holds of this rank's rows from `row` on: its block in the own slot or, if it is
// this rank, the input. A piece does not straddle runs where the own block is read in place.
template <class Protocol>
JU_D const char* SourceRows(const PushArgs& args, const Protocol& protocol, int seg, int32_t source,
                            int32_t row) {
  const Geometry& g = args.geometry;
  const int32_t row_bytes = g.columns[seg] * args.element_bytes;
  if (source == g.rank && args.own_in_place) {
    return args.parts[seg] + static_cast<int64_t>(g.HeadShardRows(g.rank, row).begin) * row_bytes;
  }
  return protocol.Slot(g.rank) + SourceBlockOffset(g, seg, source, args.element_bytes) +
         static_cast<int64_t>(row) * row_bytes;
}

// One warp: every worker-th piece of every block that several ranks hold.
template <bool kTest, bool kF16, class Protocol>
JU_D void SumGathered(const PushArgs& args, Protocol& protocol, const TestHooks& hooks,
                      int32_t worker, int32_t workers) {
  const Geometry& g = args.geometry;
  const int32_t pieces = static_cast<int32_t>(CeilDiv(g.rows, kPieceRows));
  for (int seg = 0; seg < g.num_segments; ++seg) {
    if (!g.replicated(seg)) continue;
    const int32_t copies = g.replicas[seg];
    const int32_t vectors = g.columns[seg] * args.element_bytes / 16;  // of a row
    for (int32_t i = worker; i < pieces * g.num_blocks(seg); i += workers) {
      const int32_t first = i / pieces * copies;
      const int32_t begin = i % pieces * kPieceRows;
      const int32_t end = min(begin + kPieceRows, g.rows);
      for (int32_t r = first; r < first + copies; ++r) {
        if (r == g.rank && args.own_in_place) continue;
        if (!WaitPiecesWarp<kTest>(protocol, hooks, r, begin, end)) return;
      }
      char* out = args.gathered +
                  (static_cast<int64_t>(begin) * g.fused_columns + g.block_begin(seg, first)) *
                      args.element_bytes;
      for (int32_t v = static_cast<int32_t>(threadIdx.x % 32); v < (end - begin) * vectors;
           v += 32) {
        float2 sum[4] = {};
#pragma unroll 1
        for (int32_t r = first; r < first + copies; ++r) {
          const uint4 bits =
              reinterpret_cast<const uint4*>(SourceRows(args, protocol, seg, r, begin))[v];
          const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
          for (int w = 0; w < 4; ++w) {
            const float2 value = Pair<kF16>::Widen(words[w]);
            sum[w].x += value.x;
            sum[w].y += value.y;
          }
        }
        const int32_t row = v / vectors;
        char* to = out + static_cast<int64_t>(row) * g.fused_columns * args.element_bytes;
        reinterpret_cast<uint4*>(to)[v - row * vectors] =
            make_uint4(Pair<kF16>::Round(sum[0]), Pair<kF16>::Round(sum[1]),
                       Pair<kF16>::Round(sum[2]), Pair<kF16>::Round(sum[3]));
      }
    }
  }
}

}  // namespace jax_ulysses

#endif  // JAX_ULYSSES_EXCHANGE_SUM_GATHERED_H_
