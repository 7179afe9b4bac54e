// SPDX-License-Identifier: Apache-2.0
// How a kernel of one rank begins and ends, whatever it does in between.
//
// A rank is `ctas` CTAs. Begin: every CTA looks whether the group has been aborted, and whether the
// program means the same rank. End: the last CTA to finish says "done" at every rank and advances
// the epoch, or, after an abort, fills all outputs with NaN and hands the fault record to the host.
// There is no exit handshake: what a rank still owes to its peers is parked in slots, which the
// credit protects.
#ifndef JAX_ULYSSES_EXCHANGE_RANK_CALL_H_
#define JAX_ULYSSES_EXCHANGE_RANK_CALL_H_

#include "jax_ulysses/base.h"
#include "jax_ulysses/comm/ptx_memory.h"
#include "jax_ulysses/comm/rank_protocol.h"
#include "jax_ulysses/exchange/fault_mailbox.h"
#include "jax_ulysses/exchange/geometry.h"
#include "jax_ulysses/exchange/test_hooks.h"
#include "jax_ulysses/ptx/async.h"

namespace jax_ulysses {

// Counts the CTAs of a rank that have ended. On the line of the epoch word, which only the owner
// touches; zero between calls.
inline constexpr int64_t kTicketOffset = 64;

struct OutputSpan {
  char* data = nullptr;
  int64_t bytes = 0;
};

struct RankCall {
  CallInfo info;
  FaultMailbox* mailbox = nullptr;
  OutputSpan outputs[kMaxFusedSegments];
  int32_t num_outputs = 0;
  int32_t ctas = 1;
  int32_t comm_ctas = 1;
  // Off: all data is taken to be present, and no flag is touched (a plain GEMM, for comparison).
  int32_t communicate = 1;
  // Off: all-to-all -> GEMM only pushes (benchmarks).
  int32_t compute = 1;
  TestHooks hooks;
};

template <bool kTest>
using KernelProtocol = RankProtocol<PtxMemory, kTest ? kEdgesAtRunTime : kEdgeNone>;

// A copy of parameters in shared memory, for launches of a whole world.
template <class T>
struct SharedCopy {
  alignas(16) char bytes[sizeof(T)];
  // Whole CTA; a barrier must follow.
  JU_D void Fill(const T& from) {
    static_assert(sizeof(T) % 4 == 0);
    for (uint32_t i = threadIdx.x; i < sizeof(T) / 4; i += blockDim.x) {
      reinterpret_cast<uint32_t*>(bytes)[i] = reinterpret_cast<const uint32_t*>(&from)[i];
    }
  }
  JU_D const T& get() const { return *reinterpret_cast<const T*>(bytes); }
};

struct RankShared {
  uint32_t aborted;
  uint32_t last;
};

// Whole CTA, before its first CTA-wide barrier; `shared.aborted` is valid after it. The first lane
// of warp `warp` reads two words, which takes a microsecond: a warp with nothing else to do.
template <bool kTest>
JU_D void BeginRank(const RankCall& call, RankShared& shared, uint32_t warp) {
  if constexpr (kTest) TestHooks::Sleep(call.hooks.start_delay_ns);
  if (threadIdx.x != warp * 32) return;
  shared.aborted = 0;
  if (!call.communicate) return;
  KernelProtocol<kTest> protocol(call.info);
  // Both words are on their way before either is looked at. The rank was written by an earlier
  // kernel of the stream.
  const int32_t program_rank =
      call.info.program_rank == nullptr ? call.info.rank : *call.info.program_rank;
  const bool aborted = protocol.Aborted();
  // Every CTA compares, so that none starts to work; the first one raises the fault.
  if (program_rank != call.info.rank) {
    protocol.Raise(FaultKind::kRankMismatch, call.info.rank, -1,
                   static_cast<uint32_t>(program_rank));
  }
  shared.aborted = aborted || program_rank != call.info.rank;
  if (TestHooks::Adversary<kTest>(call.hooks) &&
      TestHooks::Removed<kTest>(call.hooks, kEdgeDoneRelease)) {
    for (int r = 0; r < static_cast<int>(call.info.layout.num_ranks); ++r) protocol.PublishDone(r);
  }
}

// One warp: whether `ok` is true in every lane. What a lane has acquired is then visible to all of
// them: the vote itself would not order memory.
JU_D bool AllLanes(bool ok) {
  const bool all = __all_sync(~0u, ok);
  __syncwarp();
  return all;
}

// One warp: the credit of every rank, one per lane. False after an abort. The proxy fence orders
// the acquired credit before bulk and TMA stores into a slot.
template <class Protocol>
JU_D bool WaitSlotFreeWarp(Protocol& protocol) {
  bool ok = true;
  const int num_ranks = static_cast<int>(protocol.call().layout.num_ranks);
  for (int peer = static_cast<int>(threadIdx.x % 32); peer < num_ranks; peer += 32) {
    if (peer != protocol.call().rank) ok = protocol.WaitSlotFree(peer) && ok;
  }
  ok = AllLanes(ok);
  ptx::ProxyFence();
  return ok;
}

// The credit, for warps that write a slot but should not wait for words of the heap.
//
// Edge "credit", second half, inside a CTA: one warp acquires it from all ranks (system scope) and
// arrives at `known` (release); the others wait there (acquire) before their first store.
struct SharedCredit {
  uint64_t known;
  uint32_t granted;

  JU_D static void Init(SharedCredit& credit) { ptx::BarrierInit(&credit.known, 1); }
  // One warp, once.
  template <class Protocol>
  JU_D static void Ask(SharedCredit& credit, Protocol& protocol) {
    const bool granted = WaitSlotFreeWarp(protocol);
    if (threadIdx.x % 32 != 0) return;
    credit.granted = granted;
    ptx::BarrierArrive(&credit.known);
  }
  // False after an abort.
  JU_D static bool Granted(SharedCredit& credit) {
    ptx::BarrierWait(&credit.known, 0);
    return credit.granted != 0;
  }
  // The same, before bulk stores.
  JU_D static bool GrantedToCopies(SharedCredit& credit) {
    const bool granted = Granted(credit);
    ptx::ProxyFence();
    return granted;
  }
};

// One warp of one CTA: says that this rank is here and looks who else is. Nobody waits for it, so
// a late peer costs nothing here; a peer that came for another call aborts the group.
template <bool kTest>
JU_D void CheckEntries(const RankCall& call) {
  KernelProtocol<kTest> protocol(call.info);
  if (!WaitSlotFreeWarp(protocol)) return;
  const int num_ranks = static_cast<int>(call.info.layout.num_ranks);
  const int lane = static_cast<int>(threadIdx.x % 32);
  for (int i = lane; i < num_ranks; i += 32)
    protocol.PublishEntry((call.info.rank + i) % num_ranks);
  for (int i = lane; i < num_ranks; i += 32) {
    if (!protocol.WaitEntry((call.info.rank + i) % num_ranks)) break;
  }
  __syncwarp();
}

// Whole CTA, after all its asynchronous stores are complete.
template <bool kTest>
JU_D void EndRank(const RankCall& call, RankShared& shared) {
  if (!call.communicate) return;
  KernelProtocol<kTest> protocol(call.info);
  uint32_t* ticket =
      reinterpret_cast<uint32_t*>(call.info.peers.heap[call.info.rank] + kTicketOffset);
  __syncthreads();
  if (threadIdx.x == 0) {
    // Releases what this CTA did, acquires what the others did. Scope: device.
    const bool last = ptx::AddAcqRelGpu(ticket, 1) == static_cast<uint32_t>(call.ctas) - 1;
    if (last) *ticket = 0;
    shared.last = last;
    shared.aborted = protocol.Aborted();
  }
  __syncthreads();
  if (!shared.last) return;
  if (!shared.aborted) {
    if (threadIdx.x < 32) {
      const int num_ranks = static_cast<int>(call.info.layout.num_ranks);
      for (int i = static_cast<int>(threadIdx.x); i < num_ranks; i += 32) {
        protocol.PublishDone((call.info.rank + i) % num_ranks);
      }
      __syncwarp();
      if (threadIdx.x == 0) protocol.AdvanceEpoch();
    }
    return;
  }
  for (int i = 0; i < call.num_outputs; ++i) {
    // All bits set is a NaN in every floating-point format.
    char* data = call.outputs[i].data;
    const int64_t bytes = call.outputs[i].bytes;
    const int64_t vectors = reinterpret_cast<uint64_t>(data) % 16 == 0 ? bytes / 16 : 0;
    for (int64_t j = threadIdx.x; j < vectors; j += blockDim.x) {
      reinterpret_cast<uint4*>(data)[j] = make_uint4(~0u, ~0u, ~0u, ~0u);
    }
    for (int64_t j = vectors * 16 + threadIdx.x; j < bytes; j += blockDim.x) data[j] = '\xff';
  }
  if (threadIdx.x == 0 && call.mailbox != nullptr) {
    const Fault fault = protocol.ReadFault();
    const uint32_t words[kFaultWords] = {static_cast<uint32_t>(fault.kind),
                                         static_cast<uint32_t>(fault.rank),
                                         static_cast<uint32_t>(fault.peer),
                                         static_cast<uint32_t>(fault.op),
                                         static_cast<uint32_t>(fault.tile),
                                         fault.epoch,
                                         fault.detail};
    for (int w = 0; w < kFaultWords; ++w) {
      PtxMemory::StoreRelaxed(&call.mailbox->words[w], words[w]);
    }
    PtxMemory::StoreRelease(&call.mailbox->ready, 1);
  }
}

}  // namespace jax_ulysses

#endif  // JAX_ULYSSES_EXCHANGE_RANK_CALL_H_
