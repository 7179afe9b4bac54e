// SPDX-License-Identifier: Apache-2.0
// Kernels of the plain exchange and of psum: some warps send, others receive, each with a ring of
// its own; one raises the flags of what has been sent; one more publishes and checks the entries,
// without waiting for any data.
#ifndef JAX_ULYSSES_KERNELS_SM90_EXCHANGE_CUH_
#define JAX_ULYSSES_KERNELS_SM90_EXCHANGE_CUH_

#include "jax_ulysses/exchange/exchange.h"
#include "jax_ulysses/exchange/plain_copy.h"
#include "jax_ulysses/exchange/psum.h"
#include "jax_ulysses/exchange/publish_pieces.h"
#include "jax_ulysses/exchange/sum_replicas.h"
#include "kernels/entry.h"

namespace jax_ulysses {

// The rings fill the shared memory of an SM.
inline constexpr int kExchangeWarps = 7;
inline constexpr int kExchangeSenders = 2;  // of a CTA that sends
inline constexpr int kExchangeThreads = (kExchangeWarps + 2) * 32;

struct ExchangeParams {
  RankCall call;
  ExchangeArgs args;
};
struct PsumParams {
  RankCall call;
  PsumArgs args;
};

template <bool kTest>
struct ExchangeShared {
  using Ring = CopyRing<4, 8192, kTest>;
  static_assert(Ring::kBytes >= kSumScratchBytes);
  typename Ring::Storage rings[kExchangeWarps];
  HandOffStorage<int32_t> hand_offs[kExchangeSenders];
  SharedCredit credit;
  RankShared rank;
};

template <bool kTest, class Protocol>
JU_D ExchangePush<kTest, Protocol> MakePush(const ExchangeArgs& args, const Protocol& protocol,
                                            HandOff<kTest>& hand_off, int32_t worker,
                                            int32_t workers) {
  return {args, protocol, hand_off, worker, workers};
}
template <bool kTest, class Protocol>
JU_D PsumPush<kTest, Protocol> MakePush(const PsumArgs& args, const Protocol& protocol,
                                        HandOff<kTest>& hand_off, int32_t worker, int32_t workers) {
  return {args, protocol, hand_off, worker, workers};
}

// Whole warp. Bulk loads may be under way, and end here. Stores, unlike loads, need the credit; so
// do flags that the adversary raises before it stores.
template <bool kTest, class Params, class Protocol, class Push>
JU_D void Send(const Params& p, Protocol& protocol, typename ExchangeShared<kTest>::Ring& ring,
               Push& push, SharedCredit& credit, bool run) {
  const TestHooks& hooks = p.call.hooks;
  if (p.args.bulk && !TestHooks::FlagsFirst<kTest>(hooks)) {
    ring.Finish(push, [&] { return run && SharedCredit::GrantedToCopies(credit); });
  } else if (run && SharedCredit::GrantedToCopies(credit)) {
    if (p.args.bulk) {
      ring.Finish(push, [] { return true; });
    } else {
      CopyPlain<kTest>(push, hooks);
    }
  }
}

template <bool kTest, class Protocol>
JU_D void Receive(const ExchangeParams& p, Protocol& protocol,
                  typename ExchangeShared<kTest>::Ring& ring, int32_t worker, int32_t workers) {
  ExchangeCopyOut<kTest, Protocol> copy(p.args, protocol, p.call.hooks, worker, workers);
  if (p.args.bulk) {
    ring.Run(copy);
  } else {
    CopyPlain<kTest>(copy, p.call.hooks);
  }
  if (p.args.sum_replicas != SumType::kNone) {
    SumReplicas<kTest>(p.args, protocol, p.call.hooks, ring.IdleData(), worker, workers);
  }
}
template <bool kTest, class Protocol>
JU_D void Receive(const PsumParams& p, Protocol& protocol,
                  typename ExchangeShared<kTest>::Ring& ring, int32_t worker, int32_t workers) {
  PsumAdd<kTest>(p.args, protocol, p.call.hooks, ring.IdleData(), worker, workers);
}

template <bool kTest, class Params>
JU_D void ExchangeRank(const Params& p, int32_t cta, char* shared_bytes) {
  auto& shared = *reinterpret_cast<ExchangeShared<kTest>*>(shared_bytes);
  using Ring = typename ExchangeShared<kTest>::Ring;
  if constexpr (kTest) {
    if (p.call.hooks.absent) return;
  }
  // The first two warps have other things to do before the barrier.
  const int warp = static_cast<int>(threadIdx.x / 32) - 2;
  BeginRank<kTest>(p.call, shared.rank, 0);
  const ExchangeRole role =
      ExchangeRole::Of(cta, p.call.ctas, p.call.comm_ctas, kExchangeWarps, kExchangeSenders);
  const bool sends = warp >= 0 && warp < role.senders;
  KernelProtocol<kTest> protocol(p.call.info);
  Ring ring(shared.rings[max(warp, 0)], p.call.hooks);
  auto& to_publisher = shared.hand_offs[sends ? warp : 0];
  HandOff<kTest> hand_off(to_publisher);
  auto push = MakePush(p.args, protocol, hand_off, role.Worker(warp), role.senders * role.ctas);
  if (warp >= 0) {
    if (threadIdx.x % 32 == 0) {
      if (sends) HandOff<kTest>::Init(to_publisher, 1);
      Ring::Init(shared.rings[warp]);
      ptx::BarrierInitFence();
    }
    __syncwarp();
    // The first loads need nothing but the input.
    if (sends && p.args.bulk) ring.Start(push);
  } else if (warp == -1 && role.senders > 0) {
    if (threadIdx.x % 32 == 0) SharedCredit::Init(shared.credit);
    __syncwarp();
    SharedCredit::Ask(shared.credit, protocol);
  }
  __syncthreads();
  const bool run = !shared.rank.aborted;
  if (sends) {
    Send<kTest>(p, protocol, ring, push, shared.credit, run);
    hand_off.Give(kNoSignal);
  } else if (run && warp == -1) {
    PublishGiven(shared.hand_offs, role.senders,
                 [&](int32_t index) { PublishPiece(p.args, protocol, index); });
  } else if (run && warp == -2) {
    if (cta == 0) CheckEntries<kTest>(p.call);
  } else if (run && role.receivers > 0) {
    Receive<kTest>(p, protocol, ring, role.Worker(warp - role.senders), role.receivers * role.ctas);
  }
  EndRank<kTest>(p.call, shared.rank);
}

template <bool kTest, class Params>
__global__ void __launch_bounds__(kExchangeThreads, 1)
    ExchangeRankKernel(const __grid_constant__ Params params) {
  extern __shared__ __align__(128) char shared[];
  ExchangeRank<kTest>(params, static_cast<int32_t>(blockIdx.x), shared);
}

template <bool kTest, class Params>
__global__ void __launch_bounds__(kExchangeThreads, 1)
    ExchangeWorldKernel(const Params* ranks, int32_t ctas) {
  extern __shared__ __align__(128) char shared[];
  __shared__ SharedCopy<Params> params;
  const int32_t rank = static_cast<int32_t>(blockIdx.x) / ctas;
  params.Fill(ranks[rank]);
  __syncthreads();
  ExchangeRank<kTest>(params.get(), static_cast<int32_t>(blockIdx.x) - rank * ctas, shared);
}

inline void FillRankCall(const CallInfo& info, FaultMailbox* mailbox, const TestHooks& hooks,
                         const LaunchPlan& plan, RankCall& rank) {
  rank.info = info;
  rank.info.removed_edges = hooks.removed_edges;
  rank.mailbox = mailbox;
  rank.ctas = plan.ctas;
  rank.comm_ctas = ExchangeRole::SendingCtas(plan.ctas);
  rank.hooks = hooks;
}

inline void BuildExchange(const ExchangeCall& call, const LaunchPlan& plan, void* memory) {
  auto& p = *new (memory) ExchangeParams;
  FillRankCall(call.info, call.mailbox, call.hooks, plan, p.call);
  const Geometry g = MakeGeometry(call.exchange, call.info.rank, call.batch);
  p.args.geometry = g;
  p.args.element_bytes = static_cast<int32_t>(call.element_bytes);
  p.args.gather = call.gather;
  p.args.sum_replicas = call.sum_replicas;
  bool bulk = true;
  bool summed = false;
  int64_t bytes = 0;  // of a row of a piece
  for (int seg = 0; seg < g.num_segments; ++seg) {
    p.args.in[seg] = static_cast<const char*>(call.in[seg]);
    p.args.out[seg] = static_cast<char*>(call.out[seg]);
    bulk =
        bulk && p.args.row_bytes(seg) % 16 == 0 &&
        (reinterpret_cast<uintptr_t>(call.in[seg]) | reinterpret_cast<uintptr_t>(call.out[seg])) %
                16 ==
            0;
    summed = summed || p.args.Summed(seg);
    bytes += p.args.row_bytes(seg);
    const int64_t head_shard = int64_t{g.rows} * g.num_ranks * p.args.row_bytes(seg);
    const int64_t sequence_shard = int64_t{g.rows} * p.args.pitch(seg);
    p.call.outputs[p.call.num_outputs++] = {p.args.out[seg],
                                            call.gather ? sequence_shard : head_shard};
  }
  p.args.bulk = bulk;
  p.args.piece_rows =
      ExchangePieceRows(g.num_ranks, g.rows, bytes, call.info.layout.flags_per_source);
  // Without a replicated segment there is nothing to add.
  if (!summed) p.args.sum_replicas = SumType::kNone;
}

inline void BuildPsum(const PsumCall& call, const LaunchPlan& plan, void* memory) {
  auto& p = *new (memory) PsumParams;
  FillRankCall(call.info, call.mailbox, call.hooks, plan, p.call);
  PsumArgs& a = p.args;
  a.in = static_cast<const char*>(call.in);
  a.out = static_cast<char*>(call.out);
  a.type = call.type;
  a.bytes = call.count * (call.type == SumType::kF32 ? 4 : 2);
  a.num_ranks = static_cast<int32_t>(call.info.layout.num_ranks);
  a.rank = call.info.rank;
  a.piece_bytes = static_cast<int32_t>(
      Max(1024, RoundUp(CeilDiv(a.bytes, call.info.layout.flags_per_source), 16)));
  a.bulk = a.bytes % 16 == 0 &&
           (reinterpret_cast<uintptr_t>(call.in) | reinterpret_cast<uintptr_t>(call.out)) % 16 == 0;
  p.call.outputs[p.call.num_outputs++] = {a.out, a.bytes};
}

template <bool kTest, class Params, class Call>
KernelEntry<Call> MakeExchangeEntry(void (*build)(const Call&, const LaunchPlan&, void*)) {
  KernelEntry<Call> entry{};
  entry.shared_bytes = sizeof(ExchangeShared<kTest>);
  entry.params_bytes = sizeof(Params);
  entry.threads = kExchangeThreads;
  entry.rank_kernel = reinterpret_cast<const void*>(&ExchangeRankKernel<kTest, Params>);
  if constexpr (kTest) {
    entry.world_kernel = reinterpret_cast<const void*>(&ExchangeWorldKernel<kTest, Params>);
  }
  entry.build = build;
  entry.set_agreement = [](void* params, uint32_t agreement) {
    static_cast<Params*>(params)->call.info.agreement = agreement;
  };
  return entry;
}

}  // namespace jax_ulysses

#endif  // JAX_ULYSSES_KERNELS_SM90_EXCHANGE_CUH_
