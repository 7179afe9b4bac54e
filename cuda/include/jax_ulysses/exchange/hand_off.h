// SPDX-License-Identifier: Apache-2.0
// Hands numbers from a warp whose stores are complete to the warp that raises their flags: the
// fence of a release takes half a microsecond, which then holds up neither epilogue nor copies.
#ifndef JAX_ULYSSES_EXCHANGE_HAND_OFF_H_
#define JAX_ULYSSES_EXCHANGE_HAND_OFF_H_

#include "jax_ulysses/base.h"
#include "jax_ulysses/ptx/async.h"

namespace jax_ulysses {

inline constexpr int kHandOffDepth = 4;

struct HandOffStorage {
  uint64_t full[kHandOffDepth];
  uint64_t empty[kHandOffDepth];
  int32_t item[kHandOffDepth];
};

// A ring with back-pressure. Givers (one thread, or one in each of several warps that give the same
// items in the same order) and taker have an object each.
//
// Edge "hand-off", inside a CTA: the givers' stores (waited for, if they are asynchronous), their
// arrivals on `full` (release), the taker's wait (acquire), and the taker's system-scope release
// are a chain, so the flag is ordered after the stores though another thread raises it.
template <bool kTest>
class HandOff {
 public:
  // `removed` is the negative control: nobody waits for anybody.
  JU_D explicit HandOff(HandOffStorage& storage, bool removed = false)
      : storage_(storage), removed_(kTest && removed) {}

  JU_D static void Init(HandOffStorage& storage, uint32_t givers) {
    for (int i = 0; i < kHandOffDepth; ++i) {
      ptx::BarrierInit(&storage.full[i], givers);
      ptx::BarrierInit(&storage.empty[i], 1);
    }
  }

  // One thread, whose stores are ordinary ones or complete. Of several givers one names the item.
  JU_D void GiveByLane(int32_t item, bool names = true) {
    if (count_ >= kHandOffDepth && !removed_) {
      ptx::BarrierWait(&storage_.empty[slot()], (round() - 1) & 1);
    }
    if (names) storage_.item[slot()] = item;
    ptx::BarrierArrive(&storage_.full[slot()]);
    ++count_;
  }
  // Whole warp, for the stores of all its threads.
  JU_D void Give(int32_t item, bool names = true) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) GiveByLane(item, names);
  }

  // Whole warp. After the work, TakeDone.
  JU_D int32_t Take() {
    if (!removed_) ptx::BarrierWait(&storage_.full[slot()], round() & 1);
    return storage_.item[slot()];
  }
  JU_D void TakeDone() {
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::BarrierArrive(&storage_.empty[slot()]);
    ++count_;
  }

 private:
  JU_D uint32_t slot() const { return count_ % kHandOffDepth; }
  JU_D uint32_t round() const { return count_ / kHandOffDepth; }

  HandOffStorage& storage_;
  const bool removed_;
  uint32_t count_ = 0;
};

}  // namespace jax_ulysses

#endif  // JAX_ULYSSES_EXCHANGE_HAND_OFF_H_
