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

Status CheckExchange(const HeadExchange& ex, int64_t batch) {
  if (ex.Check() != LayoutError::kNone) {
    return Invalid("the heads and tokens do not divide among the ranks (layout error " +
                   std::to_string(static_cast<int>(ex.Check())) + ")");
  }
  if (batch < 1 || ex.local_tokens < 1) return Invalid("batch and tokens must be at least 1");
  if (ex.num_segments > kMaxFusedSegments) {
    return Unsupported("at most " + std::to_string(kMaxFusedSegments) +
                       " segments, this call has " + std::to_string(ex.num_segments));
  }
  if (batch * ex.local_tokens * ex.num_ranks > kMaxElements / 2 ||
      ex.fused_columns() > kMaxElements / 2) {
    return Unsupported("a dimension is larger than 2^30");
  }
  return {};
}

Status CheckShapes(const FusedCall& call, int64_t other, const char* other_name) {
  const HeadExchange& ex = call.exchange;
  const Status status = CheckExchange(ex, call.batch);
  if (!status.ok()) return status;
  for (int64_t seg = 0; seg < ex.num_segments; ++seg) {
    if (ex.segment_columns(seg) % kColumnMultiple != 0) {
      return Unsupported("a rank's columns of a segment must be a multiple of " +
                         std::to_string(kColumnMultiple) + ", segment " + std::to_string(seg) +
                         " has " + std::to_string(ex.segment_columns(seg)));
    }
  }
  if (other < 1 || other > kMaxElements / 2 || other % kColumnMultiple != 0) {
    return Unsupported(std::string(other_name) + " must be a positive multiple of " +
                       std::to_string(kColumnMultiple) + ", it is " + std::to_string(other));
  }
  return {};
}

Status CheckHeap(const HeapLayout& layout, int64_t ranks, int64_t slot_bytes, int64_t flags) {
  if (layout.num_ranks != ranks) {
    return Invalid("the group has " + std::to_string(layout.num_ranks) + " ranks, the call " +
                   std::to_string(ranks));
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

template <class Call>
Geometry GeometryOf(const Call& call) {
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

int64_t SlotBytes(const ExchangeCall& call) {
  const Geometry g = GeometryOf(call);
  return SourceBlockOffset(g, g.num_segments, 0, static_cast<int32_t>(call.element_bytes));
}

int64_t SlotBytes(const PsumCall& call) {
  return call.info.layout.num_ranks *
         RoundUp(call.count * (call.type == SumType::kF32 ? 4 : 2), 16);
}

Status CheckCall(const GemmA2aCall& call, int32_t tile_rows, int32_t tile_columns) {
  Status status = CheckShapes(call, call.depth, "D");
  if (!status.ok()) return status;
  const Geometry g = GeometryOf(call);
  // Flags do not depend on how tiles are put together.
  const int32_t block_columns = BlockColumns(g, call.w_transposed, tile_columns);
  const TileOrder order = TileOrder::Make(g, tile_rows, block_columns, block_columns, 1);
  status = CheckHeap(call.info.layout, call.exchange.num_ranks, SlotBytes(call), order.num_flags());
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
  status = CheckHeap(call.info.layout, call.exchange.num_ranks, SlotBytes(call),
                     CeilDiv(g.rows, kPieceRows));
  if (!status.ok()) return status;
  if (!Aligned({call.parts[0], call.parts[1], call.parts[2], call.parts[3], call.w, call.y,
                call.gathered})) {
    return Unsupported("operands and results must be aligned to 16 bytes");
  }
  return {};
}

Status CheckCall(const ExchangeCall& call) {
  Status status = CheckExchange(call.exchange, call.batch);
  if (!status.ok()) return status;
  if (call.element_bytes < 1 || call.element_bytes > 16 ||
      call.exchange.fused_columns() * call.element_bytes > kMaxElements) {
    return Unsupported("elements of " + std::to_string(call.element_bytes) + " bytes");
  }
  const int64_t size = call.sum_replicas == SumType::kF32 ? 4 : 2;
  if (call.sum_replicas != SumType::kNone && (!call.gather || call.element_bytes != size)) {
    return Invalid("replicas are summed in a gather of elements of " + std::to_string(size) +
                   " bytes");
  }
  const Geometry g = GeometryOf(call);
  return CheckHeap(call.info.layout, call.exchange.num_ranks, SlotBytes(call),
                   CeilDiv(g.rows, kPieceRows));
}

Status CheckCall(const PsumCall& call) {
  if (call.count < 1 || call.type == SumType::kNone) return Invalid("nothing to sum");
  if (call.in == call.out && call.in != nullptr) return Invalid("psum does not work in place");
  // The pieces grow until the flags suffice.
  return CheckHeap(call.info.layout, call.info.layout.num_ranks, SlotBytes(call), 1);
}

}  // namespace jax_ulysses
