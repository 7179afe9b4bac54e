// SPDX-License-Identifier: Apache-2.0
// A ring in shared memory that hands items from warps to warps of a CTA. Two uses:
//   - numbers, from a warp whose stores are complete to the warp that raises their flags: the fence
//     of a release takes half a microsecond, which then holds up neither epilogue nor copies;
//   - plans of tiles, from the warp that makes them to those that need them (gemm/tile_plan.h).
#ifndef JAX_ULYSSES_EXCHANGE_HAND_OFF_H_
#define JAX_ULYSSES_EXCHANGE_HAND_OFF_H_

#include "jax_ulysses/base.h"
#include "jax_ulysses/ptx/async.h"

namespace jax_ulysses {

inline constexpr int kHandOffDepth = 4;

template <class Item>
struct HandOffStorage {
  Item item[kHandOffDepth];
  uint64_t full[kHandOffDepth];
  uint64_t empty[kHandOffDepth];
};

// A ring with back-pressure. Every warp that gives or takes has an object of its own, and gives, or
// takes, the items in order: all of them, or every `stride`-th from `first` on, if others do so
// with the rest. What is given by several warps has been given when the last of them has; a place
// is free when the last taker is done with it.
//
// Edges "hand-off" and "tile plan", inside a CTA: the givers' stores (waited for, if they are
// asynchronous), their arrivals on `full` (release) and the takers' wait (acquire); back, the
// takers' arrivals on `empty` and the givers' wait. A flag that the taker then releases at system
// scope is ordered after the givers' stores though another thread raises it.
template <bool kTest, class Item = int32_t>
class HandOff {
 public:
  using Storage = HandOffStorage<Item>;

  // `removed` is the negative control: nobody waits for anybody.
  JU_D explicit HandOff(Storage& storage, bool removed = false, uint32_t first = 0,
                        uint32_t stride = 1)
      : storage_(storage), removed_(kTest && removed), stride_(stride), count_(first) {}

  // In lanes: who calls GiveRoom(n) counts as n givers, who calls Take as 32 takers.
  JU_D static void Init(Storage& storage, uint32_t givers, uint32_t takers = 1) {
    for (int i = 0; i < kHandOffDepth; ++i) {
      ptx::BarrierInit(&storage.full[i], givers);
      ptx::BarrierInit(&storage.empty[i], takers);
    }
  }

  // Giver: where the next item goes. The first kHandOffDepth of them need no barrier.
  JU_D Item& Room() {
    if (count_ >= kHandOffDepth && !removed_) {
      ptx::BarrierWait(&storage_.empty[slot()], (round() - 1) & 1);
    }
    return storage_.item[slot()];
  }
  // Whole warp: the first `lanes` lanes have stored something into the room. Each arrives itself:
  // racecheck does not follow __syncwarp and another lane's arrival. TakeDone likewise.
  JU_D void GiveRoom(uint32_t lanes) {
    if (threadIdx.x % 32 < lanes) ptx::BarrierArrive(&storage_.full[slot()]);
    count_ += stride_;
  }
  // For the negative control: those who do not wait shall find an item, though not theirs. Whole
  // warp, before the CTA's first barrier.
  JU_D void CopyFirst() {
    __syncwarp();
    if (threadIdx.x % 32 != 0) return;
    for (int i = 1; i < kHandOffDepth; ++i) storage_.item[i] = storage_.item[0];
  }
  // One thread, whose stores are ordinary ones or complete. Of several givers one names the item.
  JU_D void GiveByLane(Item item, bool names = true) {
    Item& room = Room();
    if (names) room = item;
    ptx::BarrierArrive(&storage_.full[slot()]);
    count_ += stride_;
  }
  // Whole warp, for the stores of all its threads.
  JU_D void Give(Item item, bool names = true) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) GiveByLane(item, names);
  }

  // Whole warp. After the work, TakeDone.
  JU_D const Item& Take() {
    if (!removed_) ptx::BarrierWait(&storage_.full[slot()], round() & 1);
    return storage_.item[slot()];
  }
  JU_D void TakeDone() {
    ptx::BarrierArrive(&storage_.empty[slot()]);
    count_ += stride_;
  }

  // Whole warp, with a stride of 1, as one taker: the next item, as soon as it is given, and those
  // that have been given behind it by then, lane i the i-th. Returns how many; after the work,
  // TakeDone(how many).
  JU_D int32_t TakeSome(Item& item) {
    const uint32_t lane = threadIdx.x % 32;
    Take();
    // A lane waits itself, or finds out, for the item that it takes: that is its acquire.
    const bool mine =
        lane < kHandOffDepth &&
        (lane == 0 || (!removed_ && ptx::BarrierTest(&storage_.full[slot(lane)], round(lane) & 1)));
    if (mine) item = storage_.item[slot(lane)];
    return __ffs(static_cast<int>(~__ballot_sync(~0u, mine))) - 1;
  }
  JU_D void TakeDone(int32_t items) {
    __syncwarp();
    const uint32_t lane = threadIdx.x % 32;
    if (lane < static_cast<uint32_t>(items)) ptx::BarrierArrive(&storage_.empty[slot(lane)]);
    count_ += static_cast<uint32_t>(items) * stride_;
  }

 private:
  JU_D uint32_t slot(uint32_t ahead = 0) const { return (count_ + ahead) % kHandOffDepth; }
  JU_D uint32_t round(uint32_t ahead = 0) const { return (count_ + ahead) / kHandOffDepth; }

  Storage& storage_;
  const bool removed_;
  const uint32_t stride_;
  uint32_t count_;
};

}  // namespace jax_ulysses

#endif  // JAX_ULYSSES_EXCHANGE_HAND_OFF_H_
