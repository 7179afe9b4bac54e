// SPDX-License-Identifier: Apache-2.0
// GEMM -> all-to-all: y = x @ w + bias, where the columns of y go to the ranks that own their
// heads. The epilogue stores a tile into the own slot, the publisher warp raises its flag at the
// owners, and their communication warps pull the rows into their outputs. Blocks of other ranks
// come first; the own block is stored into the output directly where rows allow.
#ifndef JAX_ULYSSES_GEMM_GEMM_A2A_H_
#define JAX_ULYSSES_GEMM_GEMM_A2A_H_

#include "jax_ulysses/exchange/output_tiles.h"
#include "jax_ulysses/exchange/pull.h"
#include "jax_ulysses/gemm/a2a_gemm.h"
#include "jax_ulysses/gemm/cta.h"

namespace jax_ulysses {

template <class C>
struct GemmA2aParams {
  using Config = C;
  RankCall call;
  PullArgs args;
  int32_t depth = 0;                          // D: columns of x
  const typename C::Element* bias = nullptr;  // of all columns, or null
  typename C::Mainloop::Params operands;
};

// A part in few registers: consumers keep it beside their accumulators.
struct PackedPart {
  uint32_t bits;  // segment, destination, empty, in place; column block
  int32_t row_block;

  JU_D PackedPart() = default;
  JU_D PackedPart(const TileOrder::Part& part, bool in_place)
      : bits(static_cast<uint32_t>(part.seg) | static_cast<uint32_t>(part.dest) << 4 |
             static_cast<uint32_t>(part.empty) << 14 | static_cast<uint32_t>(in_place) << 15 |
             static_cast<uint32_t>(part.col_block) << 16),
        row_block(part.row_block) {}
  JU_D int32_t seg() const { return static_cast<int32_t>(bits & 15); }
  JU_D int32_t dest() const { return static_cast<int32_t>(bits >> 4 & 1023); }
  JU_D bool empty() const { return (bits >> 14 & 1) != 0; }
  JU_D bool in_place() const { return (bits >> 15 & 1) != 0; }
  JU_D int32_t col_block() const { return static_cast<int32_t>(bits >> 16); }
  JU_D bool in_slot() const { return !empty() && !in_place(); }
};
static_assert(kMaxRanks <= 1024 && kMaxFusedSegments <= 16);

// Where a part of a tile is stored: the output, if it is the own block in place, or the slot.
template <class C>
JU_D TileOutput<typename C::Element> OutputOf(const GemmA2aParams<C>& p, const PullArgs& pull,
                                              char* slot, const PackedPart& packed) {
  using Element = typename C::Element;
  const Geometry& g = pull.geometry;
  const bool in_place = packed.in_place();
  struct {
    int32_t seg, dest, row_block, col_block;
  } const part = {packed.seg(), packed.dest(), packed.row_block, packed.col_block()};
  const int32_t columns = g.columns[part.seg];
  const int32_t row = part.row_block * C::kTileM;
  const int32_t column = part.col_block * kBlockColumns;
  char* const block =
      in_place ? pull.out[part.seg]
               : slot + MadeBlockOffset(g, part.seg, g.block(part.seg, part.dest), sizeof(Element));
  const int64_t first = in_place ? g.HeadShardRows(g.rank, row).begin : row;
  return {reinterpret_cast<Element*>(block) + first * columns + column,
          p.bias == nullptr ? nullptr : p.bias + g.block_begin(part.seg, part.dest) + column,
          columns, g.rows - row, columns - column};
}

template <class C>
JU_D void GemmA2aRank(const GemmA2aParams<C>& p, const RankCall& call, const PullArgs& pull,
                      int32_t cta, char* shared_bytes) {
  using Protocol = KernelProtocol<C::kTest>;
  auto& shared = *reinterpret_cast<typename C::Shared*>(shared_bytes);
  const Geometry& g = pull.geometry;
  const TileOrder& order = pull.order;
  if constexpr (C::kTest) {
    if (call.hooks.absent) return;
  }
  const WarpRole role = RoleOfWarp();
  if (role == WarpRole::kProducer && cute::elect_one_sync()) {
    C::Mainloop::prefetch_tma_descriptors(p.operands);
  }
  BeginRank<C::kTest>(call, shared.rank);
  if (threadIdx.x == 0) {
    C::Ring::Init(shared.ring);
    HandOff<C::kTest>::Init(shared.hand_off, kConsumerWarps);
    ptx::BarrierInitFence();
  }
  auto pipeline = MakePipeline<C>(shared);
  ClusterSync<C>();

  const int32_t k_tiles = static_cast<int32_t>(CeilDiv(p.depth, C::kTileK));
  const int32_t first_unit = cta / C::kCluster;
  const int32_t unit_stride = call.ctas / C::kCluster;
  const int32_t in_cluster = cta % C::kCluster;
  const bool run = !AnyAborted<C>(shared);
  // Whether a part goes straight into the output.
  auto in_place = [&](const TileOrder::Part& part) {
    return part.dest == g.rank && !PullOrder::OwnInSlot(g, part.seg, pull.own_in_place);
  };
  if (role == WarpRole::kConsumer) {
    cutlass::arch::warpgroup_reg_alloc<kConsumerRegisters>();
    Consumer<C> consumer(pipeline, shared);
    Protocol protocol(call.info);
    HandOff<C::kTest> hand_off(shared.hand_off,
                               TestHooks::Removed<C::kTest>(call.hooks, kEdgeHandOff));
    char* const slot = call.info.peers.heap[g.rank] +
                       call.info.layout.slot(call.communicate ? protocol.slot_index() : 0);
    const int thread = Consumer<C>::thread();
    bool asked = !call.communicate;
    bool credit = true;
    for (int32_t i = first_unit; run && i < order.num_units; i += unit_stride) {
      // Before the tile is made: what follows it holds up the next one.
      PackedPart parts[C::kBlocks];
      bool in_slot = false;
#pragma unroll
      for (int b = 0; b < C::kBlocks; ++b) {
        const TileOrder::Part part = order.At(g, i, in_cluster, b);
        parts[b] = PackedPart(part, in_place(part));
        in_slot = in_slot || parts[b].in_slot();
      }
      auto accumulator = Consumer<C>::MakeAccumulator();
      consumer.Accumulate(accumulator, k_tiles, p.operands);
      if constexpr (C::kTest) TestHooks::Sleep(call.hooks.epilogue_delay_ns);
      if (in_slot && !asked) {
        // Edge "credit". Without it, after an abort, no slot is touched and no flag raised.
        credit = Consumer<C>::All(WaitSlotFreeWarp(protocol));
        asked = true;
      }
      // The negative control: the flag before the data.
      const bool first = TestHooks::Adversary<C::kTest>(call.hooks) &&
                         TestHooks::Removed<C::kTest>(call.hooks, kEdgeTileRelease);
      auto give = [&](bool now) {
        if (now && call.communicate && in_slot) hand_off.Give(credit ? 0 : kNoSignal, thread < 32);
      };
      give(first);
      if (first) TestHooks::Sleep(call.hooks.epilogue_delay_ns);
      auto store = [&](auto block) {
        const PackedPart& part = parts[block.value];
        if (part.empty() || !(part.in_place() || credit)) return;
        StoreBlock<block.value>(accumulator, OutputOf(p, pull, slot, part), thread);
      };
      store(cute::_0{});
      if constexpr (C::kBlocks == 2) store(cute::_1{});
      give(!first);
    }
  } else {
    cutlass::arch::warpgroup_reg_dealloc<kProducerRegisters>();
    if (run && role == WarpRole::kProducer) {
      Producer<C> producer(pipeline, shared);
      for (int32_t i = first_unit; i < order.num_units; i += unit_stride) {
        int32_t columns[C::kBlocks];
        int32_t row = 0;
#pragma unroll
        for (int b = 0; b < C::kBlocks; ++b) {
          const TileOrder::Part part = order.At(g, i, in_cluster, b);
          row = part.row_block * C::kTileM;
          columns[b] = g.block_begin(part.seg, part.dest) + (part.col_block - b) * kBlockColumns;
        }
        producer.Load(p.operands, {g.rows, p.depth, 1}, {p.depth, g.fused_columns}, row, 0, 0,
                      columns, k_tiles);
      }
      producer.Tail();
    } else if (run && call.communicate && role == WarpRole::kCommunicator) {
      Protocol protocol(call.info);
      const CommWorker worker = CommWorker::Of(cta, call.ctas, call.comm_ctas);
      if (worker.communicates) {
        typename C::Ring ring(shared.ring, call.hooks);
        PullWork<C::kTest, Protocol> pieces(pull, protocol, call.hooks, worker.index,
                                            call.comm_ctas);
        ring.Run(pieces);
      }
    } else if (run && call.communicate && role == WarpRole::kPublisher) {
      Protocol protocol(call.info);
      HandOff<C::kTest> hand_off(shared.hand_off,
                                 TestHooks::Removed<C::kTest>(call.hooks, kEdgeHandOff));
      for (int32_t i = first_unit; i < order.num_units; i += unit_stride) {
        TileOrder::Part parts[C::kBlocks];
        bool in_slot = false;
#pragma unroll
        for (int b = 0; b < C::kBlocks; ++b) {
          parts[b] = order.At(g, i, in_cluster, b);
          parts[b].empty = parts[b].empty || in_place(parts[b]);
          in_slot = in_slot || !parts[b].empty;
        }
        if (!in_slot) continue;
        const bool stored = hand_off.Take() != kNoSignal;
        // Edge "tile": released to every owner of the block, system scope.
#pragma unroll
        for (int b = 0; b < C::kBlocks; ++b) {
          const TileOrder::Part& part = parts[b];
          if (part.empty) continue;
          const int32_t copies = g.replicas[part.seg];
          const int32_t first = part.dest / copies * copies;
          for (int32_t j = static_cast<int32_t>(threadIdx.x % 32); stored && j < copies; j += 32) {
            protocol.PublishTile(first + j, part.flag);
          }
        }
        hand_off.TakeDone();
      }
    } else if (run && call.communicate && role == WarpRole::kWatcher && cta == 0) {
      CheckEntries<C::kTest>(call);
    }
  }
  // Until here the other CTA of the cluster may write into this one's shared memory.
  ClusterSync<C>();
  EndRank<C::kTest>(call, shared.rank);
}

}  // namespace jax_ulysses

#endif  // JAX_ULYSSES_GEMM_GEMM_A2A_H_
