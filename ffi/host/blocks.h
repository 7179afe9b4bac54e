// SPDX-License-Identifier: Apache-2.0
// Rows of the blocks that travel, and where they lie in XLA's buffers.
//
// A block is [B*T, packed columns], dense: in gemm_a2a it is made by its source (rows of the
// source's shard), in a2a_gemm and gather it is meant for its destination (rows of the
// destination's shard), in scatter it is again of the source's rows.
#ifndef JAX_ULYSSES_FFI_HOST_BLOCKS_H_
#define JAX_ULYSSES_FFI_HOST_BLOCKS_H_

#include <cstring>
#include <stdexcept>

#include "jax_ulysses/comm/heap_layout.h"
#include "jax_ulysses/layout/head_exchange.h"

namespace jax_ulysses::host {

// Geometry shared by the handlers. Sizes in elements unless they say bytes.
struct Shape {
  HeadExchange exchange;
  int64_t batch = 0;
  int64_t element_bytes = 0;
  int64_t rank = 0;

  int64_t rows() const { return batch * exchange.local_tokens; }
  int64_t row_bytes() const { return exchange.packed_columns() * element_bytes; }
  int64_t block_bytes() const { return rows() * row_bytes(); }
  int64_t slot_bytes() const { return (exchange.num_ranks - 1) * block_bytes(); }

  // Offset of the block that belongs to (holder of the slot, other rank).
  int64_t BlockOffset(int64_t holder, int64_t other) const {
    return RemoteBlockIndex(holder, other, exchange.num_ranks) * block_bytes();
  }

  // Element offset, in a head-sharded [B, S, local heads, H] array of segment `seg`, of the row
  // that is flattened local row `row` of `owner`.
  int64_t HeadShardRow(int64_t seg, int64_t owner, int64_t row) const {
    const TokenMap tokens = exchange.tokens();
    const int64_t b = row / exchange.local_tokens;
    const int64_t global = tokens.GlobalRow(owner, row % exchange.local_tokens);
    return (b * tokens.global_tokens() + global) * exchange.segment_columns(seg);
  }

  // Packs what `dest` needs of head-sharded inputs: its local row `row`, all segments.
  void PackHeadShardRow(const char* const* parts, int64_t dest, int64_t row, char* out) const {
    for (int64_t seg = 0; seg < exchange.num_segments; ++seg) {
      const int64_t bytes = exchange.segment_columns(seg) * element_bytes;
      std::memcpy(out, parts[seg] + HeadShardRow(seg, dest, row) * element_bytes,
                  static_cast<size_t>(bytes));
      out += bytes;
    }
  }
};

// Rows per counter or tile: `wanted`, doubled until all of `rows` fit into `capacity` flags.
inline int64_t FitRows(int64_t rows, int64_t wanted, int64_t per_row_block, int64_t capacity) {
  if (per_row_block > capacity) throw std::runtime_error("more column blocks than ready flags");
  while (CeilDiv(rows, wanted) * per_row_block > capacity) wanted *= 2;
  return wanted;
}

}  // namespace jax_ulysses::host

#endif  // JAX_ULYSSES_FFI_HOST_BLOCKS_H_
