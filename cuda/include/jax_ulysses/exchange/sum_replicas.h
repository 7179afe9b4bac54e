// SPDX-License-Identifier: Apache-2.0
// Sums of what ranks have sent, from the slot, with plain loads: in rank order, in fp32, rounded
// once.
#ifndef JAX_ULYSSES_EXCHANGE_SUM_REPLICAS_H_
#define JAX_ULYSSES_EXCHANGE_SUM_REPLICAS_H_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "jax_ulysses/exchange/exchange.h"

namespace jax_ulysses {

JU_D float LoadAsFloat(const char* p, int64_t i, SumType type) {
  if (type == SumType::kF32) return reinterpret_cast<const float*>(p)[i];
  const uint16_t bits = reinterpret_cast<const uint16_t*>(p)[i];
  return type == SumType::kBf16 ? __bfloat162float(__ushort_as_bfloat16(bits))
                                : __half2float(__ushort_as_half(bits));
}
JU_D void StoreFloat(char* p, int64_t i, SumType type, float v) {
  if (type == SumType::kF32) {
    reinterpret_cast<float*>(p)[i] = v;
  } else if (type == SumType::kBf16) {
    reinterpret_cast<__nv_bfloat16*>(p)[i] = __float2bfloat16(v);
  } else {
    reinterpret_cast<__half*>(p)[i] = __float2half(v);
  }
}

// Gather of replicated heads with their sum.
template <bool kTest, class Protocol>
JU_D void SumReplicas(const ExchangeArgs& args, Protocol& protocol, const TestHooks& hooks,
                      int32_t worker, int32_t workers) {
  const Geometry& g = args.geometry;
  const int32_t pieces = args.order().num_pieces;
  for (int seg = 0; seg < g.num_segments; ++seg) {
    if (!args.Summed(seg)) continue;
    const int32_t copies = g.replicas[seg];
    for (int32_t i = worker; i < pieces * g.num_blocks(seg); i += workers) {
      const int32_t first = i / pieces * copies;
      const int32_t begin = i % pieces * args.piece_rows;
      const int32_t end = args.piece_end(begin);
      for (int32_t r = 0; r < copies; ++r) {
        TouchPiece<kTest>(args, protocol, hooks, first + r, begin, end);
      }
      if (!WaitPieceWarp<kTest>(protocol, hooks, first, copies, i % pieces)) return;
      const int32_t columns = g.columns[seg];
      for (int32_t e = static_cast<int32_t>(threadIdx.x % 32); e < (end - begin) * columns;
           e += 32) {
        const int32_t row = begin + e / columns, column = e % columns;
        float sum = 0;
        for (int32_t r = 0; r < copies; ++r) {
          const char* block =
              protocol.Slot(g.rank) + SourceBlockOffset(g, seg, first + r, args.element_bytes);
          sum +=
              LoadAsFloat(block, static_cast<int64_t>(row) * columns + column, args.sum_replicas);
        }
        StoreFloat(args.out[seg] + args.SequenceOffset(seg, row, first), column, args.sum_replicas,
                   sum);
      }
    }
  }
}

}  // namespace jax_ulysses

#endif  // JAX_ULYSSES_EXCHANGE_SUM_REPLICAS_H_
