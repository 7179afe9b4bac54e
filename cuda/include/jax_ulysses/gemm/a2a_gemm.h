// SPDX-License-Identifier: Apache-2.0
// All-to-all -> GEMM: y [rows, N] = gathered @ w + bias, where the columns of `gathered` come from
// all ranks. Communication warps push this rank's head shards into the slots of the others; the
// GEMM reads what arrived in its own slot in place, block of K by block of K, its own block first.
//
// `call` and the work arguments come apart from the tensor maps: a world of ranks keeps them in
// shared memory, as near as the constant bank that holds the parameters of a single rank.
//
// K order: sources rank, rank+1, ...; within a source the segments. It depends on the rank but
// never on timing, so results are repeatable bit by bit. Replicated heads are just more K blocks
// over the same rows of w: their sum is taken in the fp32 accumulator.
#ifndef JAX_ULYSSES_GEMM_A2A_GEMM_H_
#define JAX_ULYSSES_GEMM_A2A_GEMM_H_

#include "jax_ulysses/exchange/push.h"
#include "jax_ulysses/exchange/sum_gathered.h"
#include "jax_ulysses/gemm/cta.h"

namespace jax_ulysses {

// Slots of the ring for which a launch carries tensor maps.
inline constexpr int kMaxSlots = 2;

template <class C>
struct A2aGemmParams {
  RankCall call;
  PushArgs args;
  int32_t width = 0;  // N: columns of y
  int32_t k_tiles = 0;
  typename C::Mainloop::Params from_slot[kMaxSlots][kMaxFusedSegments];
  typename C::Mainloop::Params from_input[kMaxFusedSegments];  // own block, if own_in_place
  typename C::Epilogue::Params output;
};

// Tiles of y: windows of rows; in a window column after column, and down each column.
struct OutputTiles {
  int32_t row_blocks;
  int32_t col_blocks;
  int32_t window_blocks;

  struct Tile {
    int32_t row_block;
    int32_t col_block;
  };
  JU_HD constexpr int32_t num_tiles() const { return row_blocks * col_blocks; }
  JU_HD constexpr Tile At(int32_t index) const {
    const int32_t window = index / (window_blocks * col_blocks);
    index -= window * window_blocks * col_blocks;
    const int32_t left = row_blocks - window * window_blocks;
    const int32_t height = left < window_blocks ? left : window_blocks;
    return {window * window_blocks + index % height, index / height};
  }
};

template <class C>
JU_D void A2aGemmRank(const A2aGemmParams<C>& p, const RankCall& call, const PushArgs& push,
                      int32_t cta, char* shared_bytes) {
  using Protocol = KernelProtocol<C::kTest>;
  auto& shared = *reinterpret_cast<typename C::Shared*>(shared_bytes);
  const Geometry& g = push.geometry;
  if constexpr (C::kTest) {
    if (call.hooks.absent) return;
  }
  const WarpRole role = RoleOfWarp();
  if (role == WarpRole::kProducer && cute::elect_one_sync()) {
    for (int seg = 0; seg < g.num_segments; ++seg) {
      if (push.own_in_place) C::Mainloop::prefetch_tma_descriptors(p.from_input[seg]);
    }
    C::Epilogue::prefetch_tma_descriptors(p.output);
  }
  BeginRank<C::kTest>(call, shared.rank);
  if (threadIdx.x == 0) {
    C::Ring::Init(shared.ring);
    HandOff<C::kTest>::Init(shared.hand_off);
    ptx::BarrierInitFence();
  }
  GemmPipelines<C> pipelines(shared);
  __syncthreads();

  const OutputTiles tiles = {static_cast<int32_t>(CeilDiv(g.rows, C::kTileM)),
                             static_cast<int32_t>(CeilDiv(p.width, C::kTileN)),
                             kWindowRows / C::kTileM};
  const int32_t num_tiles = call.compute ? tiles.num_tiles() : 0;
  const bool run = !shared.rank.aborted;
  // The communicating CTAs are spread over the rank's: worker w is CTA w * ctas / comm_ctas.
  const int32_t worker = (cta * call.comm_ctas + call.ctas - 1) / call.ctas;
  const bool pushes = worker < call.comm_ctas && worker * call.ctas / call.comm_ctas == cta;
  if (role == WarpRole::kConsumer) {
    cutlass::arch::warpgroup_reg_alloc<kConsumerRegisters>();
    Consumer<C> consumer(pipelines, shared);
    for (int32_t i = cta; run && i < num_tiles; i += call.ctas) {
      const OutputTiles::Tile tile = tiles.At(i);
      auto accumulator = Consumer<C>::MakeAccumulator();
      consumer.Accumulate(accumulator, p.k_tiles, p.from_slot[0][0]);
      consumer.Store(p.output, g.rows, p.width, 1, tile.row_block, tile.col_block, 0, accumulator);
    }
    ptx::BulkWait<0>();
  } else {
    cutlass::arch::warpgroup_reg_dealloc<kProducerRegisters>();
    if (run && role == WarpRole::kProducer) {
      Protocol protocol(call.info);
      Producer<C> producer(pipelines, shared);
      const int64_t slot = call.communicate ? protocol.slot_index() : 0;
      // Blocks of this window that this warp has already acquired: one bit per (row block, source).
      uint64_t arrived = 0;
      int32_t window = 0;
      for (int32_t i = cta; i < num_tiles; i += call.ctas) {
        const OutputTiles::Tile tile = tiles.At(i);
        const int32_t row = tile.row_block * C::kTileM;
        if (tile.row_block / tiles.window_blocks != window) {
          window = tile.row_block / tiles.window_blocks;
          arrived = 0;
        }
        const int32_t row_end = min(row + C::kTileM, g.rows);
        // Bit of a source in `arrived`; from 64 on there is none, and every tile waits.
        auto bit = [&](int32_t source) {
          return tile.row_block % tiles.window_blocks * g.num_ranks + source;
        };
        auto known = [&](int32_t source) {
          return bit(source) < 64 && (arrived >> bit(source) & 1) != 0;
        };
        PiecesPeek<C::kTest, Protocol> peek;
        for (int32_t step = 0; step < g.num_ranks; ++step) {
          int32_t source = g.rank + step;
          if (source >= g.num_ranks) source -= g.num_ranks;
          const bool in_place = step == 0 && push.own_in_place;
          if (call.communicate && !in_place && !known(source)) {
            // Edge "tile" (a piece). After an abort it returns at once, and the tile is computed
            // from whatever is there: the pipelines drain, and the output becomes NaN.
            if (!peek.Finish(protocol, call.hooks, source)) {
              WaitPiecesWarp<C::kTest>(protocol, call.hooks, source, row, row_end);
            }
            if (bit(source) < 64) arrived |= uint64_t{1} << bit(source);
          }
          const int32_t next = source + 1 == g.num_ranks ? 0 : source + 1;
          if (call.communicate && step + 1 < g.num_ranks && !known(next)) {
            peek.Begin(protocol, next, row, row_end);
          }
          for (int seg = 0; seg < g.num_segments; ++seg) {
            const int32_t columns = g.columns[seg];
            producer.Load(in_place ? p.from_input[seg] : p.from_slot[slot][seg],
                          {g.rows, columns, g.num_ranks}, {g.fused_columns, p.width},
                          in_place ? g.HeadShardRows(g.rank, row).begin : row,
                          in_place ? 0 : source, g.block_begin(seg, source),
                          tile.col_block * C::kTileN,
                          static_cast<int32_t>(CeilDiv(columns, C::kTileK)));
          }
        }
      }
      producer.Tail();
    } else if (run && call.communicate && role == WarpRole::kCommunicator) {
      Protocol protocol(call.info);
      typename C::Ring ring(shared.ring, call.hooks);
      if (pushes && WaitSlotFreeWarp(protocol)) {
        HandOff<C::kTest> hand_off(shared.hand_off);
        PushWork<C::kTest, Protocol> pieces(push, protocol, hand_off, worker, call.comm_ctas);
        ring.Run(pieces);
        hand_off.Give(kNoSignal);
      } else if (pushes) {
        HandOff<C::kTest>(shared.hand_off).Give(kNoSignal);
      }
      if (push.gathered != nullptr) {
        GatherWork<C::kTest, Protocol> gather(push, protocol, call.hooks, cta, call.ctas);
        ring.Run(gather);
        SumGathered<C::kTest, cute::is_same_v<typename C::Element, cutlass::half_t>>(
            push, protocol, call.hooks, cta, call.ctas);
      }
    } else if (run && call.communicate && role == WarpRole::kPublisher && pushes) {
      Protocol protocol(call.info);
      HandOff<C::kTest> hand_off(shared.hand_off);
      PublishPieces(push, protocol, hand_off);
    } else if (run && call.communicate && role == WarpRole::kIdle && cta == 0) {
      CheckEntries<C::kTest>(call);
    }
  }
  EndRank<C::kTest>(call, shared.rank);
}

}  // namespace jax_ulysses

#endif  // JAX_ULYSSES_GEMM_A2A_GEMM_H_
