// SPDX-License-Identifier: Apache-2.0
// Kernels of the plain exchange and of psum: half of the warps send, half receive, each with a ring
// of its own; one more publishes and checks the entries, without waiting for any data.
#ifndef JAX_ULYSSES_KERNELS_SM90_EXCHANGE_CUH_
#define JAX_ULYSSES_KERNELS_SM90_EXCHANGE_CUH_

#include "jax_ulysses/exchange/exchange.h"
#include "jax_ulysses/exchange/psum.h"
#include "kernels/entry.h"

namespace jax_ulysses {

inline constexpr int kExchangeWarps = 8;
inline constexpr int kExchangeThreads = (kExchangeWarps + 1) * 32;

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
  using Ring = CopyRing<4, 6144, kTest>;
  typename Ring::Storage rings[kExchangeWarps];
  RankShared rank;
};

template <bool kTest, class Protocol>
JU_D void Send(const ExchangeParams& p, Protocol& protocol,
               typename ExchangeShared<kTest>::Ring& ring, int32_t worker, int32_t workers) {
  ExchangePush<Protocol> push(p.args, protocol, worker, workers);
  if (p.args.bulk) {
    ring.Run(push);
  } else {
    CopyPlain<kTest>(push, p.call.hooks);
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
    SumReplicas<kTest>(p.args, protocol, p.call.hooks, worker, workers);
  }
}
template <bool kTest, class Protocol>
JU_D void Send(const PsumParams& p, Protocol& protocol, typename ExchangeShared<kTest>::Ring& ring,
               int32_t worker, int32_t workers) {
  PsumPush<Protocol> push(p.args, protocol, worker, workers);
  if (p.args.bulk) {
    ring.Run(push);
  } else {
    CopyPlain<kTest>(push, p.call.hooks);
  }
}
template <bool kTest, class Protocol>
JU_D void Receive(const PsumParams& p, Protocol& protocol, typename ExchangeShared<kTest>::Ring&,
                  int32_t worker, int32_t workers) {
  PsumAdd<kTest>(p.args, protocol, p.call.hooks, worker, workers);
}

template <bool kTest, class Params>
JU_D void ExchangeRank(const Params& p, int32_t cta, char* shared_bytes) {
  auto& shared = *reinterpret_cast<ExchangeShared<kTest>*>(shared_bytes);
  if constexpr (kTest) {
    if (p.call.hooks.absent) return;
  }
  const int warp = static_cast<int>(threadIdx.x / 32);
  BeginRank<kTest>(p.call, shared.rank);
  if (threadIdx.x % 32 == 0 && warp < kExchangeWarps) {
    ExchangeShared<kTest>::Ring::Init(shared.rings[warp]);
    ptx::BarrierInitFence();
  }
  __syncthreads();
  const bool run = !shared.rank.aborted;
  if (run && warp == kExchangeWarps) {
    if (cta == 0) CheckEntries<kTest>(p.call);
  } else if (run) {
    KernelProtocol<kTest> protocol(p.call.info);
    typename ExchangeShared<kTest>::Ring ring(shared.rings[warp], p.call.hooks);
    // Consecutive pieces go to different CTAs, which spreads them over the memory system.
    const int32_t worker = warp / 2 * p.call.ctas + cta;
    const int32_t workers = kExchangeWarps / 2 * p.call.ctas;
    if (warp % 2 == 1) {
      Receive<kTest>(p, protocol, ring, worker, workers);
    } else if (WaitSlotFreeWarp(protocol)) {
      Send<kTest>(p, protocol, ring, worker, workers);
    }
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
  rank.comm_ctas = plan.ctas;
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
  for (int seg = 0; seg < g.num_segments; ++seg) {
    p.args.in[seg] = static_cast<const char*>(call.in[seg]);
    p.args.out[seg] = static_cast<char*>(call.out[seg]);
    bulk =
        bulk && p.args.row_bytes(seg) % 16 == 0 &&
        (reinterpret_cast<uintptr_t>(call.in[seg]) | reinterpret_cast<uintptr_t>(call.out[seg])) %
                16 ==
            0;
    summed = summed || p.args.Summed(seg);
    const int64_t head_shard = int64_t{g.rows} * g.num_ranks * p.args.row_bytes(seg);
    const int64_t sequence_shard = int64_t{g.rows} * p.args.pitch(seg);
    p.call.outputs[p.call.num_outputs++] = {p.args.out[seg],
                                            call.gather ? sequence_shard : head_shard};
  }
  p.args.bulk = bulk;
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
  a.bulk = a.bytes % 16 == 0 && reinterpret_cast<uintptr_t>(call.in) % 16 == 0;
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
