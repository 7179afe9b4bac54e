// SPDX-License-Identifier: Apache-2.0
// The publisher warp of the plain exchange and of psum.
#ifndef JAX_ULYSSES_EXCHANGE_PUBLISH_PIECES_H_
#define JAX_ULYSSES_EXCHANGE_PUBLISH_PIECES_H_

#include "jax_ulysses/exchange/hand_off.h"
#include "jax_ulysses/exchange/strip.h"

namespace jax_ulysses {

// Raises the flags of the pieces that `givers` warps hand over, until each has given kNoSignal. The
// fence of a release takes some microseconds where stores to a peer are under way, for all flags
// that are due as for one. publish(index) does it for one, in one lane: PublishPiece of what was
// sent.
template <class Publish>
JU_D void PublishGiven(HandOffStorage<int32_t>* hand_offs, int32_t givers, Publish&& publish) {
  static_assert(kHandOffDepth == 4);
  const uint32_t lane = threadIdx.x % 32;
  const int32_t giver = static_cast<int32_t>(lane / kHandOffDepth);
  const uint32_t ahead = lane % kHandOffDepth;
  const uint32_t first = lane - ahead;
  HandOffStorage<int32_t>& from = hand_offs[giver < givers ? giver : 0];
  bool open = giver < givers;
  uint32_t taken = 0;
  while (__any_sync(~0u, open)) {
    // A lane finds out itself about the item that it takes: that is its acquire.
    const uint32_t count = taken + ahead;
    const uint32_t place = count % kHandOffDepth;
    const bool given = open && ptx::BarrierTest(&from.full[place], count / kHandOffDepth & 1);
    const uint32_t missing = ~(__ballot_sync(~0u, given) >> first) | 1u << kHandOffDepth;
    const uint32_t items = static_cast<uint32_t>(__ffs(static_cast<int>(missing))) - 1;
    const bool mine = ahead < items;
    const int32_t item = mine ? from.item[place] : kNoSignal;
    if (mine && item != kNoSignal) publish(item);
    const uint32_t ended = __ballot_sync(~0u, mine && item == kNoSignal) >> first;
    open = open && (ended & ((1u << kHandOffDepth) - 1)) == 0;
    __syncwarp();
    if (mine) ptx::BarrierArrive(&from.empty[place]);
    taken += items;
  }
}

}  // namespace jax_ulysses

#endif  // JAX_ULYSSES_EXCHANGE_PUBLISH_PIECES_H_
