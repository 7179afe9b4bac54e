// SPDX-License-Identifier: Apache-2.0
// How a warp waits for pieces that other ranks push: one flag a lane. In both forms the proxy fence
// lets the async proxy (bulk and TMA loads) read what the generic proxy has just acquired.
#ifndef JAX_ULYSSES_EXCHANGE_WAIT_PIECES_H_
#define JAX_ULYSSES_EXCHANGE_WAIT_PIECES_H_

#include "jax_ulysses/exchange/geometry.h"
#include "jax_ulysses/exchange/rank_call.h"

namespace jax_ulysses {

// One warp: waits for the pieces of rows [begin, end) from `source`, one piece per lane.
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

// The same, begun early: the flags are read by Begin and looked at by Finish, with the loads of
// another block in between.
template <bool kTest, class Protocol>
class PiecesPeek {
 public:
  // Whole warp. At most 32 pieces.
  JU_D void Begin(const Protocol& protocol, int32_t source, int32_t begin, int32_t end) {
    const int32_t piece = begin / kPieceRows + static_cast<int32_t>(threadIdx.x % 32);
    mine_ = piece * kPieceRows < end;
    source_ = source;
    if (mine_) word_ = protocol.PeekTile(source, piece);
  }
  // True if everything from `source` had arrived by then; it is then acquired.
  JU_D bool Finish(const Protocol& protocol, const TestHooks& hooks, int32_t source) {
    if (source != source_ || !__all_sync(~0u, !mine_ || protocol.IsReady(word_))) return false;
    protocol.AcquirePeeked();
    __syncwarp();
    if (!TestHooks::Removed<kTest>(hooks, kEdgeProxyFence)) ptx::ProxyFence();
    TestHooks::DelayRead<kTest>(hooks);
    return true;
  }

 private:
  int32_t source_ = -1;
  bool mine_ = false;
  uint32_t word_ = 0;
};

}  // namespace jax_ulysses

#endif  // JAX_ULYSSES_EXCHANGE_WAIT_PIECES_H_
