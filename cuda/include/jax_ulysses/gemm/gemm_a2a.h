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
#include "jax_ulysses/gemm/consumer.h"
#include "jax_ulysses/gemm/producer.h"

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
  const int32_t first_unit = cta / C::kCluster;
  const int32_t unit_stride = call.ctas / C::kCluster;
  const bool plans_removed = TestHooks::Removed<C::kTest>(call.hooks, kEdgeTilePlan);
  HandOff<C::kTest, typename C::Plan> plans(shared.plans, plans_removed);
  auto plan_tile = [&](typename C::Plan& plan, int32_t unit) {
    // The slot, which depends on the epoch, is looked up again: once a tile, ahead of all others.
    const int64_t index = call.communicate ? Protocol(call.info).slot_index() : 0;
    char* const slot = call.info.peers.heap[g.rank] + call.info.layout.slot(index);
    PlanTile<C::kPartColumns>(plan, pull, slot, unit, cta % C::kCluster);
  };
  auto plan_first = [&] {
    if (first_unit < order.num_units) plan_tile(plans.Room(), first_unit);
  };
  // Before the cluster's barrier nothing but what it is for, shared out between the warps: whatever
  // a warp does before it arrives delays the first loads of both CTAs.
  if (role == WarpRole::kWatcher) {
    // They wait for its first plan, too.
    if (!plans_removed) ClusterArrive();
    plan_first();
    if (plans_removed) {
      plans.CopyFirst();
      ClusterArrive();
    }
  }
  auto pipeline = MakePipeline<C>(shared);  // warp 0
  if (role == WarpRole::kPublisher && threadIdx.x % 32 == 0) {
    // Read by producer and consumers, and by the publisher if there is something to publish.
    plans.Init(shared.plans, C::kParts, 32 * (1 + C::kTeamWarps + (call.communicate ? 1 : 0)));
    HandOff<C::kTest>::Init(shared.hand_off, C::kTeamWarps, 32);
    SharedCredit::Init(shared.credit);
    ptx::BarrierInitFence();
  }
  BeginRank<C::kTest>(call, shared.rank, static_cast<uint32_t>(WarpRole::kPublisher));
  if (role != WarpRole::kWatcher) ClusterArrive();
  if (role == WarpRole::kProducer && cute::elect_one_sync()) {
    C::Mainloop::prefetch_tma_descriptors(p.operands);
  }
  __syncwarp();
  ClusterWait();

  const int32_t k_tiles = static_cast<int32_t>(CeilDiv(p.depth, C::kTileK));
  const bool run = !AnyAborted<C>(shared);
  if (role == WarpRole::kConsumer) {
    TakeRegisters<C>();
    Consumer<C> consumer(pipeline, shared, k_tiles, p.operands, call.hooks);
    const auto team = static_cast<uint32_t>(Consumer<C>::team());
    HandOff<C::kTest, typename C::Plan> team_plans(shared.plans, plans_removed, team, C::kTeams);
    HandOff<C::kTest> hand_off(
        shared.hand_off, TestHooks::Removed<C::kTest>(call.hooks, kEdgeHandOff), team, C::kTeams);
    const int thread = Consumer<C>::thread();
    const int32_t team_first = first_unit + static_cast<int32_t>(team) * unit_stride;
    bool credit = true;
    for (int32_t i = team_first; run && i < order.num_units; i += C::kTeams * unit_stride) {
      auto accumulator = Consumer<C>::MakeAccumulator();
      consumer.Accumulate(accumulator, i == first_unit, i + unit_stride >= order.num_units);
      if constexpr (C::kTest) TestHooks::Sleep(call.hooks.epilogue_delay_ns);
      // Edge "credit". Without it, after an abort, no slot is touched and no flag raised.
      if (i == team_first && call.communicate) credit = SharedCredit::Granted(shared.credit);
      const typename C::Plan& plan = team_plans.Take();
      // The negative control: the flag before the data.
      const bool first = TestHooks::Adversary<C::kTest>(call.hooks) &&
                         TestHooks::Removed<C::kTest>(call.hooks, kEdgeTileRelease);
      auto give = [&](bool now) {
        if (now && call.communicate) hand_off.Give(credit ? 0 : kNoSignal, thread < 32);
      };
      give(first);
      if (first) TestHooks::Sleep(call.hooks.epilogue_delay_ns);
      cute::for_each(cute::make_int_sequence<C::kParts>{}, [&](auto i) {
        constexpr int kBegin = i.value * C::kPartColumns;
        const auto& part = plan.parts[i.value];
        if (part.rows == 0 || (part.owners > 0 && !credit)) return;
        const auto* bias = p.bias == nullptr ? nullptr : p.bias + part.column_of_w + kBegin;
        StoreColumns<kBegin, C::kPartColumns>(
            accumulator,
            TileOutput<typename C::Element>{part.data, bias, part.pitch, part.rows, part.columns},
            thread);
      });
      team_plans.TakeDone();
      give(!first);
    }
  } else {
    GiveRegisters<C>();
    if (run && role == WarpRole::kProducer) {
      Producer<C> producer(pipeline, shared, call.hooks, false);
      for (int32_t i = first_unit; i < order.num_units; i += unit_stride) {
        const typename C::Plan& plan = plans.Take();
        const int32_t row = plan.parts[0].row;
        int32_t columns[C::kParts];
#pragma unroll
        for (int i = 0; i < C::kParts; ++i) columns[i] = plan.parts[i].column_of_w;
        plans.TakeDone();
        producer.Load(p.operands, {g.rows, p.depth, 1}, {p.depth, g.fused_columns}, row, 0, 0,
                      columns, k_tiles);
      }
      producer.Tail();
    } else if (run && role == WarpRole::kWatcher) {
      // Waits for nothing but room, so that it is always ahead of the producer.
      for (int32_t i = first_unit; i < order.num_units; i += unit_stride) {
        if (i != first_unit) plan_tile(plans.Room(), i);
        plans.GiveRoom(C::kParts);
      }
    } else if (run && call.communicate && role == WarpRole::kCommunicator) {
      Protocol protocol(call.info);
      // A late peer costs nothing here: what this CTA pulls after it from others is pulled while
      // that peer makes its tiles.
      if (cta == call.ctas - 1) CheckEntries<C::kTest>(call);
      const CommWorker worker = CommWorker::Of(cta, call.ctas, call.comm_ctas);
      if (worker.communicates) {
        if (threadIdx.x % 32 == 0) {
          C::Ring::Init(shared.ring);
          ptx::BarrierInitFence();
        }
        __syncwarp();
        typename C::Ring ring(shared.ring, call.hooks);
        PullWork<C::kTest, Protocol> pieces(pull, protocol, call.hooks, worker.index,
                                            call.comm_ctas);
        ring.Run(pieces);
      }
    } else if (run && call.communicate && role == WarpRole::kPublisher) {
      Protocol protocol(call.info);
      SharedCredit::Ask(shared.credit, protocol);
      HandOff<C::kTest> hand_off(shared.hand_off,
                                 TestHooks::Removed<C::kTest>(call.hooks, kEdgeHandOff));
      for (int32_t i = first_unit; i < order.num_units; i += unit_stride) {
        const typename C::Plan& plan = plans.Take();
        const bool stored = hand_off.Take() != kNoSignal;
        // Edge "tile": released to every owner of a block, system scope. Lanes are shared out
        // between the parts: a release takes as long for all flags as for one.
        constexpr int kLanes = 32 / C::kParts;
        const int lane = static_cast<int>(threadIdx.x % 32);
        const bool shares = lane < C::kParts * kLanes;
        const auto& part = plan.parts[shares ? lane / kLanes : 0];
        const int32_t owners = stored && shares && part.flag != kNoFlag ? part.owners : 0;
        for (int32_t j = lane % kLanes; j < owners; j += kLanes) {
          protocol.PublishTile(part.first_owner + j, part.flag);
        }
        hand_off.TakeDone();
        plans.TakeDone();
      }
    }
  }
  // Until here the other CTA of the cluster may write into this one's shared memory.
  ClusterSync();
  EndRank<C::kTest>(call, shared.rank);
}

}  // namespace jax_ulysses

#endif  // JAX_ULYSSES_GEMM_GEMM_A2A_H_
