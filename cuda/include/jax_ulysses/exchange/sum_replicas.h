// SPDX-License-Identifier: Apache-2.0
// Gather of replicated heads with their sum, from the slot.
#ifndef JAX_ULYSSES_EXCHANGE_SUM_REPLICAS_H_
#define JAX_ULYSSES_EXCHANGE_SUM_REPLICAS_H_

#include "jax_ulysses/exchange/exchange.h"
#include "jax_ulysses/exchange/sum_vectors.h"

namespace jax_ulysses {

template <bool kTest, class Protocol>
JU_D void SumReplicas(const ExchangeArgs& args, Protocol& protocol, const TestHooks& hooks,
                      char* scratch, int32_t worker, int32_t workers) {
  const Geometry& g = args.geometry;
  const int32_t pieces = args.order().num_pieces;
  for (int seg = 0; seg < g.num_segments; ++seg) {
    if (!args.Summed(seg)) continue;
    const int32_t copies = g.replicas[seg];
    const int32_t row_bytes = args.row_bytes(seg);
    for (int32_t i = worker; i < pieces * g.num_blocks(seg); i += workers) {
      const int32_t first = i / pieces * copies;
      const int32_t begin = i % pieces * args.piece_rows;
      const int32_t end = args.piece_end(begin);
      for (int32_t r = 0; r < copies; ++r) {
        TouchPiece<kTest>(args, protocol, hooks, first + r, begin, end);
      }
      if (!WaitPieceWarp<kTest>(protocol, hooks, first, copies, i % pieces)) return;
      SumRows(args.sum_replicas, args.bulk, scratch,
              args.out[seg] + args.SequenceOffset(seg, begin, first), args.pitch(seg), end - begin,
              row_bytes, copies, [&](int32_t r) {
                return protocol.Slot(g.rank) +
                       SourceBlockOffset(g, seg, first + r, args.element_bytes) +
                       static_cast<int64_t>(begin) * row_bytes;
              });
    }
  }
}

}  // namespace jax_ulysses

#endif  // JAX_ULYSSES_EXCHANGE_SUM_REPLICAS_H_
