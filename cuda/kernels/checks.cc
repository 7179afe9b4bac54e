// SPDX-License-Identifier: Apache-2.0
#include "kernels/checks.h"

#include <cstdint>
#include <initializer_list>
#include <limits>

#include "jax_ulysses/exchange/pull.h"
#include "jax_ulysses/exchange/push.h"

namespace jax_ulysses {
namespace {

constexpr int64_t kElementBytes = 2;
// TMA and bulk copies take 16 bytes at a time.
constexpr int64_t kColumnMultiple = 16 / kElementBytes;
constexpr int64_t kMaxElements = std::numeric_limits<int32_t>::max();

Status Unsupported(const std::string& text) { return {Status::Code::kUnsupported, text}; }
Status Invalid(const std::string& text) { return {Status::Code::kInvalid, text}; }

bool Aligned(std::initializer_list<const void*> pointers) {
  for (const void* p : pointers) {
    if (reinterpret_cast<uintptr_t>(p) % 16 != 0) return false;
  }
  return true;
}

Status CheckShapes(const FusedCall& call, int64_t other, const char* other_name) {
  const HeadExchange& ex = call.exchange;
  if (ex.Check() != LayoutError::kNone) {
    return Invalid("the heads and tokens do not divide among the ranks (layout error " +
                   std::to_string(static_cast<int>(ex.Check())) + ")");
  }
  if (call.batch < 1 || ex.local_tokens < 1 || other < 1) {
    return Invalid("batch, tokens and " + std::string(other_name) + " must be at least 1");
  }
  if (ex.num_segments > kMaxFusedSegments) {
    return Unsupported("at most " + std::to_string(kMaxFusedSegments) + " segments, this call has " +
                       std::to_string(ex.num_segments));
  }
  for (int64_t seg = 0; seg < ex.num_segments; ++seg) {
    if (ex.segment_columns(seg) % kColumnMultiple != 0) {
      return Unsupported("a rank's columns of a segment must be a multiple of " +
                         std::to_string(kColumnMultiple) + ", segment " + std::to_string(seg) +
                         " has " + std::to_string(ex.segment_columns(seg)));
    }
  }
  if (other % kColumnMultiple != 0) {
    return Unsupported(std::string(other_name) + " must be a multiple of " +
                       std::to_string(kColumnMultiple) + ", it is " + std::to_string(other));
  }
  const int64_t all_rows = call.batch * ex.local_tokens * ex.num_ranks;
  if (all_rows > kMaxElements / 2 || ex.fused_columns() > kMaxElements / 2 ||
      other > kMaxElements / 2) {
    return Unsupported("a dimension is larger than 2^30");
  }
  return {};
}

Status CheckHeap(const FusedCall& call, int64_t slot_bytes, int64_t flags) {
  const HeapLayout& layout = call.info.layout;
  if (layout.num_ranks != call.exchange.num_ranks) {
    return Invalid("the group has " + std::to_string(layout.num_ranks) + " ranks, the call " +
                   std::to_string(call.exchange.num_ranks));
  }
  if (layout.num_slots != 2) {
    return Unsupported("the CUDA kernels need a group with 2 slots, it has " +
                       std::to_string(layout.num_slots));
  }
  if (layout.slot_bytes < slot_bytes) {
    return Unsupported("needs " + std::to_string(slot_bytes) + " bytes per slot, the group has " +
                       std::to_string(layout.slot_bytes) +
                       ": call jax_ulysses.finalize() and then jax_ulysses.initialize() with a "
                       "larger workspace_bytes");
  }
  if (layout.flags_per_source < flags) {
    return Unsupported("needs " + std::to_string(flags) + " flags per source, the group has " +
                       std::to_string(layout.flags_per_source));
  }
  return {};
}

Geometry GeometryOf(const FusedCall& call) {
  return MakeGeometry(call.exchange, call.info.rank, call.batch);
}

}  // namespace

int64_t SlotBytes(const GemmA2aCall& call) {
  const Geometry g = GeometryOf(call);
  return MadeBlockOffset(g, g.num_segments, 0, kElementBytes);
}

int64_t SlotBytes(const A2aGemmCall& call) {
  const Geometry g = GeometryOf(call);
  return SourceBlockOffset(g, g.num_segments, 0, kElementBytes);
}

Status CheckCall(const GemmA2aCall& call, int32_t tile_rows, int32_t tile_columns) {
  Status status = CheckShapes(call, call.depth, "D");
  if (!status.ok()) return status;
  const Geometry g = GeometryOf(call);
  const TileOrder order = TileOrder::Make(g, tile_rows, tile_columns);
  status = CheckHeap(call, SlotBytes(call), order.num_flags());
  if (!status.ok()) return status;
  if (!Aligned({call.x, call.w, call.out[0], call.out[1], call.out[2], call.out[3]})) {
    return Unsupported("operands and results must be aligned to 16 bytes");
  }
  return {};
}

Status CheckCall(const A2aGemmCall& call, int32_t /*tile_rows*/, int32_t /*tile_columns*/) {
  Status status = CheckShapes(call, call.width, "D");
  if (!status.ok()) return status;
  const Geometry g = GeometryOf(call);
  for (int seg = 0; seg < g.num_segments; ++seg) {
    if (call.gathered != nullptr && g.replicated(seg)) {
      return Unsupported("the gathered operand of replicated heads is not built by this kernel");
    }
  }
  status = CheckHeap(call, SlotBytes(call), CeilDiv(g.rows, kPieceRows));
  if (!status.ok()) return status;
  if (!Aligned({call.parts[0], call.parts[1], call.parts[2], call.parts[3], call.w, call.y,
                call.gathered})) {
    return Unsupported("operands and results must be aligned to 16 bytes");
  }
  return {};
}

}  // namespace jax_ulysses
