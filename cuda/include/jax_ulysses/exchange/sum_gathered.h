// SPDX-License-Identifier: Apache-2.0
// The gathered operand where ranks share a head: the communication warps of all-to-all -> GEMM add
// up what the ranks of a block hold.
#ifndef JAX_ULYSSES_EXCHANGE_SUM_GATHERED_H_
#define JAX_ULYSSES_EXCHANGE_SUM_GATHERED_H_

#include "jax_ulysses/exchange/push.h"

namespace jax_ulysses {

// How many pieces of a rank, a power of two, are waited for and added up at a time: a wait takes
// about 1.2 us, however much it is for. As many as leave every worker several items, of `blocks`
// blocks of `pieces` pieces, and at most 64 rows, which is a tile at least.
JU_HD constexpr int32_t JoinedPieces(int32_t pieces, int32_t blocks, int32_t workers) {
  constexpr int32_t kItemsEach = 4;
  constexpr int32_t kMost = 64 / kPieceRows;
  int32_t join = 1;
  while (2 * join <= kMost && blocks * (pieces / (2 * join)) >= kItemsEach * workers) join *= 2;
  return join;
}

}  // namespace jax_ulysses

#if defined(__CUDACC__)
#include "jax_ulysses/exchange/sum_vectors.h"

namespace jax_ulysses {

// What `source` holds of this rank's rows from `row` on: its block in the own slot or, if it is
// this rank, the input. An item does not straddle runs where the own block is read in place.
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

// One warp: every worker-th item of every block that several ranks hold.
template <bool kTest, SumType kType, class Protocol>
JU_D void SumGathered(const PushArgs& args, Protocol& protocol, const TestHooks& hooks,
                      char* scratch, int32_t worker, int32_t workers) {
  const Geometry& g = args.geometry;
  const int32_t pieces = static_cast<int32_t>(CeilDiv(g.rows, kPieceRows));
  for (int seg = 0; seg < g.num_segments; ++seg) {
    if (!g.replicated(seg)) continue;
    const int32_t copies = g.replicas[seg];
    const int32_t row_bytes = g.columns[seg] * args.element_bytes;
    const int32_t join = JoinedPieces(pieces, g.num_blocks(seg), workers);
    const int32_t items = static_cast<int32_t>(CeilDiv(pieces, join));  // of a block
    for (int32_t i = worker; i < items * g.num_blocks(seg); i += workers) {
      const int32_t first = i / items * copies;
      const int32_t begin = i % items * join * kPieceRows;
      const int32_t end = min(begin + join * kPieceRows, g.rows);
      for (int32_t r = first; r < first + copies; ++r) {
        if (r == g.rank && args.own_in_place) continue;
        if (!WaitPiecesWarp<kTest>(protocol, hooks, r, begin, end)) return;
      }
      const int32_t pitch = g.fused_columns * args.element_bytes;
      char* out = args.gathered + static_cast<int64_t>(begin) * pitch +
                  static_cast<int64_t>(g.block_begin(seg, first)) * args.element_bytes;
      SumVectors<kType>(scratch, out, pitch, end - begin, row_bytes, copies, [&](int32_t r) {
        return SourceRows(args, protocol, seg, first + r, begin);
      });
    }
  }
}

}  // namespace jax_ulysses
#endif  // __CUDACC__

#endif  // JAX_ULYSSES_EXCHANGE_SUM_GATHERED_H_
