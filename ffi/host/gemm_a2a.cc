// SPDX-License-Identifier: Apache-2.0
// The compute role makes tiles in schedule order: into its own slot, then published at the
// destination; its own block last, straight into the output. The communication role pulls the
// tiles that other ranks made for this one out of their slots into the output.
#include "gemm_a2a.h"

#include <algorithm>
#include <vector>

#include "gemm.h"
#include "jax_ulysses/schedule/gemm_a2a_tiles.h"

namespace jax_ulysses::host {
namespace {

constexpr int64_t kTileRows = 64;
constexpr int64_t kTileCols = 128;
constexpr int64_t kWindow = 4;

template <class T>
bool Compute(const GemmA2aArgs& args, const GemmA2aTiles& tiles, Protocol& protocol) {
  using A = Accumulator<T>;
  const Shape& shape = args.shape;
  const int64_t packed = shape.exchange.packed_columns();
  const T* x = static_cast<const T*>(args.x);
  const T* bias = static_cast<const T*>(args.bias);
  const Weight<T> w = {static_cast<const T*>(args.w), args.depth, shape.exchange.fused_columns(),
                       args.w_transposed};
  char* slot = protocol.Slot(static_cast<int>(shape.rank));
  Gemm<T> gemm;
  std::vector<A> acc;
  for (int64_t i = 0; i < tiles.num_tiles(); ++i) {
    if (protocol.Aborted()) return false;
    const GemmTile tile = tiles.Made(i);
    acc.assign(static_cast<size_t>(tile.rows * tile.cols), A{0});
    gemm.Accumulate(acc.data(), tile.cols, x + tile.row_begin * args.depth, args.depth, tile.rows,
                    args.depth, w, 0, tile.fused_begin, tile.cols);
    const bool own = tile.dest == shape.rank;
    T* block = own ? static_cast<T*>(args.out[tile.segment])
                   : reinterpret_cast<T*>(slot + shape.BlockOffset(shape.rank, tile.dest));
    const int64_t col = tile.packed_begin - shape.exchange.packed_begin(tile.segment);
    for (int64_t m = 0; m < tile.rows; ++m) {
      const int64_t row = tile.row_begin + m;
      T* out = block + (own ? shape.HeadShardRow(tile.segment, shape.rank, row) + col
                            : row * packed + tile.packed_begin);
      for (int64_t n = 0; n < tile.cols; ++n) {
        A value = acc[static_cast<size_t>(m * tile.cols + n)];
        if (bias != nullptr) value += Widen(bias[tile.fused_begin + n]);
        out[n] = Narrow<T>(value);
      }
    }
    if (!own) protocol.PublishTile(static_cast<int>(tile.dest), tile.flag);
  }
  return true;
}

bool Pull(const GemmA2aArgs& args, const GemmA2aTiles& tiles, Protocol& protocol) {
  const Shape& shape = args.shape;
  const int64_t size = shape.element_bytes;
  for (int64_t i = 0; i < tiles.num_pulls(); ++i) {
    const GemmTile tile = tiles.Pulled(i);
    const int source = static_cast<int>(tile.source);
    if (!protocol.WaitTile(source, tile.flag)) return false;
    const char* block = protocol.Slot(source) + shape.BlockOffset(tile.source, shape.rank);
    char* out = static_cast<char*>(args.out[tile.segment]);
    const int64_t col = tile.packed_begin - shape.exchange.packed_begin(tile.segment);
    for (int64_t m = 0; m < tile.rows; ++m) {
      const int64_t row = tile.row_begin + m;
      std::memcpy(out + (shape.HeadShardRow(tile.segment, tile.source, row) + col) * size,
                  block + row * shape.row_bytes() + tile.packed_begin * size,
                  static_cast<size_t>(tile.cols * size));
    }
  }
  return true;
}

}  // namespace

CallStatus RunGemmA2a(const RankHandle& handle, GemmA2aArgs args) {
  args.shape.rank = handle.rank;
  const HeadExchange& exchange = args.shape.exchange;
  const GemmA2aTiles columns(exchange, handle.rank, 1, kTileRows, kTileCols, kWindow);
  const int64_t tile_rows = FitRows(args.shape.rows(), kTileRows, columns.col_blocks(),
                                    handle.line->layout().flags_per_source);
  const GemmA2aTiles tiles(exchange, handle.rank, args.shape.batch, tile_rows, kTileCols, kWindow);
  CallSpec spec;
  spec.op = Operator::kGemmA2a;
  spec.agreement = args.agreement;
  spec.slot_bytes = args.shape.slot_bytes();
  spec.entries_first = true;
  spec.compute = [&](Protocol& protocol) {
    return DispatchFloat(args.type,
                         [&](auto tag) { return Compute<decltype(tag)>(args, tiles, protocol); });
  };
  spec.communicate = [&](Protocol& protocol) { return Pull(args, tiles, protocol); };
  return RunCall(handle, spec);
}

}  // namespace jax_ulysses::host
