// SPDX-License-Identifier: Apache-2.0
// GEMM -> all-to-all: y = x @ w + bias, where the columns of y go to the ranks that own their
// heads. The epilogue stores a tile into the own slot, the publisher warp raises its flag at the
// owners, and their communication warps pull the rows into their outputs. Blocks of other ranks
// come first; the own block is stored into the output directly where rows allow.
#ifndef JAX_ULYSSES_GEMM_GEMM_A2A_H_
#define JAX_ULYSSES_GEMM_GEMM_A2A_H_

#include "jax_ulysses/exchange/pull.h"
#include "jax_ulysses/gemm/a2a_gemm.h"
#include "jax_ulysses/gemm/cta.h"

namespace jax_ulysses {

template <class C>
struct GemmA2aParams {
  RankCall call;
  PullArgs args;
  int32_t depth = 0;  // D: columns of x
  typename C::Mainloop::Params operands;
  typename C::Epilogue::Params to_slot[kMaxSlots][kMaxFusedSegments];
  typename C::Epilogue::Params to_output[kMaxFusedSegments];  // own block, if own_in_place
};

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
    HandOff<C::kTest>::Init(shared.hand_off);
    ptx::BarrierInitFence();
  }
  GemmPipelines<C> pipelines(shared);
  __syncthreads();

  const int32_t k_tiles = static_cast<int32_t>(CeilDiv(p.depth, C::kTileK));
  const bool run = !shared.rank.aborted;
  // Whether a tile goes straight into the output.
  auto in_place = [&](const TileOrder::Tile& tile) {
    return tile.dest == g.rank && !PullOrder::OwnInSlot(g, tile.seg, pull.own_in_place);
  };
  if (role == WarpRole::kConsumer) {
    cutlass::arch::warpgroup_reg_alloc<kConsumerRegisters>();
    Consumer<C> consumer(pipelines, shared);
    Protocol protocol(call.info);
    HandOff<C::kTest> hand_off(shared.hand_off,
                               TestHooks::Removed<C::kTest>(call.hooks, kEdgeHandOff));
    const int64_t slot = call.communicate ? protocol.slot_index() : 0;
    bool asked = !call.communicate;
    bool credit = true;
    for (int32_t i = cta; run && i < order.num_tiles; i += call.ctas) {
      const TileOrder::Tile tile = order.At(g, i);
      auto accumulator = Consumer<C>::MakeAccumulator();
      consumer.Accumulate(accumulator, k_tiles, p.operands);
      if constexpr (C::kTest) TestHooks::Sleep(call.hooks.epilogue_delay_ns);
      if (in_place(tile)) {
        const int32_t row = g.HeadShardRows(g.rank, tile.row_block * C::kTileM).begin;
        // With one run the output map begins at it; else every run begins at a whole tile.
        const bool one_run = g.rows == g.run_rows;
        consumer.Store(p.to_output[tile.seg], one_run ? g.rows : g.rows * g.num_ranks,
                       g.columns[tile.seg], 1, one_run ? tile.row_block : row / C::kTileM,
                       tile.col_block, 0, accumulator);
        continue;
      }
      if (!asked) {
        // Edge "credit". Without it, after an abort, no slot is touched and no flag raised.
        credit = Consumer<C>::All(WaitSlotFreeWarp(protocol));
        asked = true;
      }
      if (!credit) {
        if (Consumer<C>::is_storing_warp()) hand_off.Give(kNoSignal);
        continue;
      }
      // The negative control: the flag before the data.
      const bool first = TestHooks::FlagsFirst<C::kTest>(call.hooks);
      if (first) {
        if (Consumer<C>::is_storing_warp()) hand_off.Give(0);
        TestHooks::Sleep(call.hooks.epilogue_delay_ns);
      }
      consumer.Store(p.to_slot[slot][tile.seg], g.rows, g.columns[tile.seg], g.num_blocks(tile.seg),
                     tile.row_block, tile.col_block, g.block(tile.seg, tile.dest), accumulator);
      if (call.communicate && !first && Consumer<C>::is_storing_warp()) {
        // Bulk groups belong to the thread that committed them. Complete, not only read: the flag
        // says that the bytes are in memory.
        if (TestHooks::Removed<C::kTest>(call.hooks, kEdgeBulkComplete)) {
          ptx::BulkWaitRead<0>();
        } else {
          ptx::BulkWait<0>();
        }
        hand_off.Give(0);
      }
    }
    ptx::BulkWait<0>();
  } else {
    cutlass::arch::warpgroup_reg_dealloc<kProducerRegisters>();
    if (run && role == WarpRole::kProducer) {
      Producer<C> producer(pipelines, shared);
      for (int32_t i = cta; i < order.num_tiles; i += call.ctas) {
        const TileOrder::Tile tile = order.At(g, i);
        producer.Load(p.operands, {g.rows, p.depth, 1}, {p.depth, g.fused_columns},
                      tile.row_block * C::kTileM, 0, 0,
                      g.block_begin(tile.seg, tile.dest) + tile.col_block * C::kTileN, k_tiles);
      }
      producer.Tail();
    } else if (run && call.communicate && role == WarpRole::kCommunicator) {
      Protocol protocol(call.info);
      const int32_t worker = (cta * call.comm_ctas + call.ctas - 1) / call.ctas;
      if (worker * call.ctas / call.comm_ctas == cta && worker < call.comm_ctas) {
        typename C::Ring ring(shared.ring, call.hooks);
        PullWork<C::kTest, Protocol> pieces(pull, protocol, call.hooks, worker, call.comm_ctas);
        ring.Run(pieces);
      }
    } else if (run && call.communicate && role == WarpRole::kPublisher) {
      Protocol protocol(call.info);
      HandOff<C::kTest> hand_off(shared.hand_off,
                                 TestHooks::Removed<C::kTest>(call.hooks, kEdgeHandOff));
      for (int32_t i = cta; i < order.num_tiles; i += call.ctas) {
        const TileOrder::Tile tile = order.At(g, i);
        if (in_place(tile)) continue;
        const bool stored = hand_off.Take() != kNoSignal;
        // Edge "tile": released to every owner of the block, system scope.
        const int32_t copies = g.replicas[tile.seg];
        const int32_t first = tile.dest / copies * copies;
        for (int32_t j = static_cast<int32_t>(threadIdx.x % 32); stored && j < copies; j += 32) {
          protocol.PublishTile(first + j, tile.flag);
        }
        hand_off.TakeDone();
      }
    } else if (run && call.communicate && role == WarpRole::kIdle && cta == 0) {
      CheckEntries<C::kTest>(call);
    }
  }
  EndRank<C::kTest>(call, shared.rank);
}

}  // namespace jax_ulysses

#endif  // JAX_ULYSSES_GEMM_GEMM_A2A_H_
