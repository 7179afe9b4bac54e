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
#include "jax_ulysses/gemm/consumer.h"
#include "jax_ulysses/gemm/producer.h"

namespace jax_ulysses {

// Slots of the ring for which a launch carries tensor maps.
inline constexpr int kMaxSlots = 2;

template <class C>
struct A2aGemmParams {
  using Config = C;
  RankCall call;
  PushArgs args;
  int32_t width = 0;  // N: columns of y
  int32_t k_tiles = 0;
  typename C::Mainloop::Params from_slot[kMaxSlots][kMaxFusedSegments];
  typename C::Mainloop::Params from_input[kMaxFusedSegments];  // own block, if own_in_place
  typename Producer<C>::TensorMapA gathered[kMaxFusedSegments];
  typename C::Element* output = nullptr;      // y
  const typename C::Element* bias = nullptr;  // or null
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
  static_assert(C::kTileM <= kWatchedPieces * kPieceRows);
  // Before the cluster's barrier nothing but what it is for, shared out between the warps: whatever
  // a warp does here delays the first loads of both CTAs.
  const WarpRole role = RoleOfWarp();
  auto pipeline = MakePipeline<C>(shared);  // warp 0
  if (role == WarpRole::kPublisher && threadIdx.x % 32 == 0) {
    HandOff<C::kTest>::Init(shared.hand_off, 1);
    SharedCredit::Init(shared.credit);
    shared.arrivals = 0;
    ptx::BarrierInitFence();
  }
  BeginRank<C::kTest>(call, shared.rank, static_cast<uint32_t>(WarpRole::kPublisher));
  ClusterArrive();
  const PushShare share = PushShare::Make(push.head_items, cta, call.ctas, call.comm_ctas);
  const bool pushes = call.communicate && (share.rest_stride > 0 || share.item < push.head_items);
  const OutputTiles tiles = {static_cast<int32_t>(CeilDiv(g.rows, C::kTileM)),
                             static_cast<int32_t>(CeilDiv(p.width, C::kTileN)),
                             push.window_rows / C::kTileM, C::kCluster};
  const int32_t num_units = call.compute ? tiles.num_units() : 0;
  const int32_t first_unit = cta / C::kCluster;
  const int32_t unit_stride = call.ctas / C::kCluster;
  const int32_t in_cluster = cta % C::kCluster;
  if (role == WarpRole::kConsumer) {
    ClusterWait();
    const bool run = !AnyAborted<C>(shared);
    TakeRegisters<C>();
    Consumer<C> consumer(pipeline, shared, p.k_tiles, p.from_slot[0][0], call.hooks);
    for (int32_t i = first_unit + Consumer<C>::team() * unit_stride; run && i < num_units;
         i += C::kTeams * unit_stride) {
      const OutputTiles::Tile tile = tiles.At(i, in_cluster);
      auto accumulator = Consumer<C>::MakeAccumulator();
      consumer.Accumulate(accumulator, i == first_unit, i + unit_stride >= num_units);
      const int32_t row = tile.row_block * C::kTileM;
      constexpr int kColumns = C::kTileN % 128 == 0 ? 128 : 64;  // at a time
      auto store = [&](auto block) {
        const int32_t column = tile.col_block * C::kTileN + block.value * kColumns;
        StoreColumns<block.value * kColumns, kColumns>(
            accumulator,
            TileOutput<typename C::Element>{p.output + int64_t{row} * p.width + column,
                                            p.bias == nullptr ? nullptr : p.bias + column, p.width,
                                            g.rows - row, p.width - column},
            Consumer<C>::thread());
      };
      cute::for_each(cute::make_int_sequence<C::kTileN / kColumns>{}, store);
    }
  } else {
    // First, because the consumers wait for these registers.
    GiveRegisters<C>();
    Protocol protocol(call.info);
    HandOff<C::kTest> hand_off(shared.hand_off);
    typename C::Ring ring(shared.ring, call.hooks);
    PushWork<C::kTest, Protocol> pieces(push, protocol, hand_off, share);
    if (role == WarpRole::kCommunicator) {
      if (threadIdx.x % 32 == 0) {
        C::Ring::Init(shared.ring);
        ptx::BarrierInitFence();
      }
      __syncwarp();
      // Before the barrier: a moment later the first loads of all GEMMs fill the queues of the
      // memory, and who comes after them waits for several microseconds.
      if (pushes) ring.Start(pieces);
    } else if (role == WarpRole::kPublisher) {
      if (pushes) SharedCredit::Ask(shared.credit, protocol);
    } else if (role == WarpRole::kWatcher && push.own_in_place && cute::elect_one_sync()) {
      for (int seg = 0; seg < g.num_segments; ++seg) {
        C::Mainloop::prefetch_tma_descriptors(p.from_input[seg]);
      }
    }
    __syncwarp();
    ClusterWait();
    const bool run = !AnyAborted<C>(shared);
    const bool communicates = run && call.communicate;
    if (run && role == WarpRole::kProducer) {
      const bool copies = call.communicate && push.gathered != nullptr;
      Producer<C> producer(pipeline, shared, call.hooks, copies);
      Arrivals<C::kTest> arrivals(shared.arrivals, call.hooks);
      const int64_t slot = call.communicate ? protocol.slot_index() : 0;
      for (int32_t i = first_unit; i < num_units; i += unit_stride) {
        const OutputTiles::Tile tile = tiles.At(i, in_cluster);
        const int32_t row = tile.row_block * C::kTileM;
        const int32_t columns_of_w[1] = {tile.col_block * C::kTileN};
        producer.BeginCopies(tile.col_block, tiles.col_blocks);
        for (int32_t step = 0; step < g.num_ranks; ++step) {
          int32_t source = g.rank + step;
          if (source >= g.num_ranks) source -= g.num_ranks;
          const bool in_place = step == 0 && push.own_in_place;
          if (call.communicate && !in_place) arrivals.WaitNext();
          for (int seg = 0; seg < g.num_segments; ++seg) {
            const int32_t columns = g.columns[seg];
            producer.Load(in_place ? p.from_input[seg] : p.from_slot[slot][seg],
                          {g.rows, columns, g.num_ranks}, {g.fused_columns, p.width},
                          in_place ? g.HeadShardRows(g.rank, row).begin : row,
                          in_place ? 0 : source, g.block_begin(seg, source), columns_of_w,
                          (columns + C::kTileK - 1) / C::kTileK,
                          copies && !g.replicated(seg) ? &p.gathered[seg] : nullptr, row, source);
          }
        }
      }
      producer.Tail();
    } else if (communicates && role == WarpRole::kWatcher) {
      // Walks the producer's list ahead of it.
      Arrivals<C::kTest> arrivals(shared.arrivals, call.hooks);
      // Blocks of this window that have been acquired: one bit per (row block, source).
      uint64_t acquired = 0;
      int32_t window = 0;
      for (int32_t i = first_unit; i < num_units; i += unit_stride) {
        const OutputTiles::Tile tile = tiles.At(i, in_cluster);
        const int32_t row = tile.row_block * C::kTileM;
        const int32_t row_end = min(row + C::kTileM, g.rows);
        if (tile.row_block / tiles.window_blocks != window) {
          window = tile.row_block / tiles.window_blocks;
          acquired = 0;
        }
        int32_t step = push.own_in_place;
        auto source = [&](int32_t i) {
          const int32_t s = g.rank + step + i;
          return s < g.num_ranks ? s : s - g.num_ranks;
        };
        // From 64 on there is no bit, and every tile waits.
        auto bit = [&](int32_t i) {
          return tile.row_block % tiles.window_blocks * g.num_ranks + source(i);
        };
        while (step < g.num_ranks) {
          // Edge "tile" (a piece). After an abort it returns at once, and the tile is computed
          // from whatever is there: the pipelines drain, and the output becomes NaN.
          const int32_t arrived = WaitSourcesWarp<C::kTest>(
              protocol, call.hooks, row, row_end, g.num_ranks - step, source,
              [&](int32_t i) { return bit(i) < 64 && (acquired >> bit(i) & 1) != 0; });
          for (int32_t i = 0; i < arrived; ++i) {
            if (bit(i) < 64) acquired |= uint64_t{1} << bit(i);
          }
          arrivals.Add(arrived);
          step += arrived;
        }
      }
    } else if (role == WarpRole::kCommunicator) {
      if (pushes) {
        // After an abort what has been loaded is dropped.
        ring.Finish(pieces, [&] { return run && SharedCredit::GrantedToCopies(shared.credit); });
        hand_off.Give(kNoSignal);
      }
      // Here and not before, because it waits for late peers.
      if (communicates && cta == call.ctas - 1) CheckEntries<C::kTest>(call);
      if (communicates && push.gathered != nullptr) {
        constexpr SumType kType =
            cute::is_same_v<typename C::Element, cutlass::half_t> ? SumType::kF16 : SumType::kBf16;
        static_assert(C::Ring::kBytes >= kSumScratchBytes);
        SumGathered<C::kTest, kType>(push, protocol, call.hooks, ring.IdleData(), cta, call.ctas);
      }
    } else if (run && pushes && role == WarpRole::kPublisher) {
      PublishPieces(push, protocol, hand_off);
    }
  }
  // Until here the other CTA of the cluster may write into this one's shared memory.
  ClusterSync();
  EndRank<C::kTest>(call, shared.rank);
}

}  // namespace jax_ulysses

#endif  // JAX_ULYSSES_GEMM_A2A_GEMM_H_
