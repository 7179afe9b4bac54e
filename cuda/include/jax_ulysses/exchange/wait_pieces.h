// SPDX-License-Identifier: Apache-2.0
// How a warp waits for pieces that other ranks push: one flag a lane.
#ifndef JAX_ULYSSES_EXCHANGE_WAIT_PIECES_H_
#define JAX_ULYSSES_EXCHANGE_WAIT_PIECES_H_

#include "jax_ulysses/exchange/geometry.h"
#include "jax_ulysses/exchange/rank_call.h"

namespace jax_ulysses {

// One warp: waits for the pieces of rows [begin, end) from `source`, one piece per lane. The proxy
// fence lets the async proxy (bulk and TMA loads) read what the generic proxy has just acquired.
template <bool kTest, class Protocol>
JU_D bool WaitPiecesWarp(Protocol& protocol, const TestHooks& hooks, int32_t source, int32_t begin,
                         int32_t end) {
  bool ok = true;
  for (int32_t piece = begin / kPieceRows + static_cast<int32_t>(threadIdx.x % 32);
       piece * kPieceRows < end; piece += 32) {
    ok = protocol.WaitTile(source, piece) && ok;
  }
  ok = AllLanes(ok);
  if (!TestHooks::Removed<kTest>(hooks, kEdgeProxyFence)) ptx::ProxyFence();
  TestHooks::DelayRead<kTest>(hooks);
  return ok;
}

// One warp: of the pieces of rows [begin, end), which are at most kWatchedPieces, how many of the
// next sources have sent all: at least 1, at most kWatchedSources or `count`. source(i) is the i-th
// of them. If the first has not, it waits for it; otherwise one acquire does for all. Sources for
// which known(i) is true count as arrived.
inline constexpr int32_t kWatchedPieces = 8;
inline constexpr int32_t kWatchedSources = 32 / kWatchedPieces;

template <bool kTest, class Protocol, class Source, class Known>
JU_D int32_t WaitSourcesWarp(Protocol& protocol, const TestHooks& hooks, int32_t begin, int32_t end,
                             int32_t count, Source&& source, Known&& known) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x % 32);
  const int32_t mine = lane / kWatchedPieces;
  const int32_t piece = begin / kPieceRows + lane % kWatchedPieces;
  const bool asks = mine < count && piece * kPieceRows < end && !known(mine);
  const bool here = !asks || protocol.IsReady(protocol.PeekTile(source(mine), piece));
  const uint32_t missing = ~__ballot_sync(~0u, here);
  int32_t arrived = missing == 0 ? kWatchedSources : (__ffs(missing) - 1) / kWatchedPieces;
  if (arrived > count) arrived = count;
  if (arrived == 0) {
    WaitPiecesWarp<kTest>(protocol, hooks, source(0), begin, end);
    return 1;
  }
  if (__any_sync(~0u, asks)) {
    protocol.AcquirePeeked();
    __syncwarp();
    if (!TestHooks::Removed<kTest>(hooks, kEdgeProxyFence)) ptx::ProxyFence();
    TestHooks::DelayRead<kTest>(hooks);
  }
  return arrived;
}

// How far the watcher warp of a CTA has come: blocks of K that have arrived, in the order in which
// the producer loads them. Waiting costs about 1.2 us even for what arrived long ago (the load of a
// flag, the fences of an acquire), which in the producer would empty the pipeline.
//
// Edge "arrivals", inside a CTA: the watcher's acquires and its proxy fence, the release of the
// count (CTA scope), the producer's acquire of it and its loads are a chain, so that they see what
// the source wrote.
template <bool kTest>
class Arrivals {
 public:
  JU_D Arrivals(uint32_t& count, const TestHooks& hooks)
      : count_(count), removed_(TestHooks::Removed<kTest>(hooks, kEdgeArrivals)) {}

  // Watcher, whole warp: `blocks` more. The warp must have met since its waits.
  JU_D void Add(int32_t blocks) {
    if (threadIdx.x % 32 == 0) ptx::AddReleaseShared(&count_, static_cast<uint32_t>(blocks));
  }
  // Producer, whole warp: waits for the next block. The watcher gives up on an abort.
  JU_D void WaitNext() {
    ++mine_;
    if (removed_) return;
    // One acquire for all that have arrived by then.
    while (static_cast<int32_t>(seen_ - mine_) < 0) {
      if (threadIdx.x % 32 == 0) seen_ = ptx::ReadAcquireShared(&count_);
      seen_ = __shfl_sync(~0u, seen_, 0);
    }
    __syncwarp();
  }

 private:
  uint32_t& count_;  // zero at first
  const bool removed_;
  uint32_t mine_ = 0;
  uint32_t seen_ = 0;
};

}  // namespace jax_ulysses

#endif  // JAX_ULYSSES_EXCHANGE_WAIT_PIECES_H_
