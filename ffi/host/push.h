// SPDX-License-Identifier: Apache-2.0
// The communication role of everything that pushes: pieces of rows into the peers' slots.
#ifndef JAX_ULYSSES_FFI_HOST_PUSH_H_
#define JAX_ULYSSES_FFI_HOST_PUSH_H_

#include "blocks.h"
#include "call.h"
#include "jax_ulysses/schedule/a2a_gemm_pieces.h"

namespace jax_ulysses::host {

inline constexpr int64_t kBlockRows = 64;
inline constexpr int64_t kPieceRows = 16;
inline constexpr int64_t kWindowBlocks = 4;

inline A2aGemmPieces MakePieces(const Shape& shape, const HeapLayout& layout) {
  const int64_t block_rows = FitRows(shape.rows(), kBlockRows, 1, layout.blocks_per_source);
  return A2aGemmPieces(shape.exchange.num_ranks, shape.rank, shape.rows(), block_rows, kPieceRows,
                       kWindowBlocks);
}

// `pack(dest, row, out)` writes one packed row of the block for `dest`.
template <class Pack>
bool PushPieces(const Shape& shape, const A2aGemmPieces& pieces, Protocol& protocol, Pack&& pack) {
  for (int64_t i = 0; i < pieces.num_pieces(); ++i) {
    if (protocol.Aborted()) return false;
    const Piece piece = pieces.Pushed(i);
    const int dest = static_cast<int>(piece.dest);
    char* block = protocol.Slot(dest) + shape.BlockOffset(piece.dest, shape.rank);
    for (int64_t row = piece.row_begin; row < piece.row_begin + piece.rows; ++row) {
      pack(piece.dest, row, block + row * shape.row_bytes());
    }
    protocol.PublishPiece(dest, piece.block);
  }
  return true;
}

// The block of `source` in this rank's slot.
inline const char* ReceivedBlock(const Shape& shape, const Protocol& protocol, int64_t source) {
  return protocol.Slot(static_cast<int>(shape.rank)) + shape.BlockOffset(shape.rank, source);
}

inline bool WaitBlock(const A2aGemmPieces& pieces, Protocol& protocol, int64_t source,
                      int64_t block) {
  return protocol.WaitPieces(static_cast<int>(source), block,
                             static_cast<uint32_t>(pieces.pieces_in_block(block)));
}

inline void TakeBlock(const A2aGemmPieces& pieces, Protocol& protocol, int64_t source,
                      int64_t block) {
  protocol.TakePieces(static_cast<int>(source), block,
                      static_cast<uint32_t>(pieces.pieces_in_block(block)));
}

}  // namespace jax_ulysses::host

#endif  // JAX_ULYSSES_FFI_HOST_PUSH_H_
