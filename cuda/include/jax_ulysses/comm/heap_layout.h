// SPDX-License-Identifier: Apache-2.0
// What lies where in a rank's symmetric heap. Every rank's heap has the same layout, so an offset
// is valid in all of them.
//
// Control words that different ranks write lie on different 128-byte lines. Words that only the
// owner uses (epoch, raised, taken) are kept apart from those that peers write.
#ifndef JAX_ULYSSES_COMM_HEAP_LAYOUT_H_
#define JAX_ULYSSES_COMM_HEAP_LAYOUT_H_

#include "jax_ulysses/base.h"

namespace jax_ulysses {

inline constexpr int64_t kLineBytes = 128;
// Slots begin on a page, which satisfies every alignment that bulk copies ask for.
inline constexpr int64_t kSlotAlignment = 4096;

// Words of a fault record, in this order on the raiser's line.
inline constexpr int kFaultWords = 7;

struct HeapLayout {
  int64_t num_ranks = 1;
  // A power of two, so that epoch % num_slots has no jump where the epoch wraps.
  int64_t num_slots = 2;
  int64_t slot_bytes = 0;
  // Ready flags and piece counters of one source. Multiples of 32 fill whole lines.
  int64_t flags_per_source = 4096;
  int64_t blocks_per_source = 4096;

  JU_HD constexpr int64_t epoch() const { return 0; }
  JU_HD constexpr int64_t raised() const { return kLineBytes; }
  JU_HD constexpr int64_t abort() const { return 2 * kLineBytes; }
  // Fault record that rank `raiser` leaves here.
  JU_HD constexpr int64_t fault(int64_t raiser) const { return (3 + raiser) * kLineBytes; }
  // Last epoch that rank `peer` has finished.
  JU_HD constexpr int64_t done(int64_t peer) const { return fault(num_ranks) + peer * kLineBytes; }
  // Epoch and agreement hash with which `peer` entered the call that uses `slot`.
  JU_HD constexpr int64_t entry(int64_t slot, int64_t peer) const {
    return done(num_ranks) + (slot * num_ranks + peer) * kLineBytes;
  }
  // Ready flag of a tile of `source`.
  JU_HD constexpr int64_t ready(int64_t source, int64_t tile) const {
    return entry(num_slots, 0) + source * FlagBytes(flags_per_source) + tile * 4;
  }
  // Pieces of row block `block` that have arrived from `source`, ever (mod 2^32).
  JU_HD constexpr int64_t arrived(int64_t source, int64_t block) const {
    return ready(num_ranks, 0) + source * FlagBytes(blocks_per_source) + block * 4;
  }
  // Of these, how many the owner has used up.
  JU_HD constexpr int64_t taken(int64_t source, int64_t block) const {
    return arrived(num_ranks, 0) + source * FlagBytes(blocks_per_source) + block * 4;
  }
  JU_HD constexpr int64_t control_bytes() const {
    return RoundUp(taken(num_ranks, 0), kSlotAlignment);
  }
  JU_HD constexpr int64_t slot_stride() const { return RoundUp(slot_bytes, kSlotAlignment); }
  JU_HD constexpr int64_t slot(int64_t index) const {
    return control_bytes() + index * slot_stride();
  }
  JU_HD constexpr int64_t heap_bytes() const { return slot(num_slots); }

  JU_HD constexpr bool IsValid() const {
    return num_ranks >= 1 && num_ranks <= kMaxRanks && num_slots >= 1 &&
           (num_slots & (num_slots - 1)) == 0 && slot_bytes >= 0 && flags_per_source >= 1 &&
           blocks_per_source >= 1;
  }

 private:
  JU_HD static constexpr int64_t FlagBytes(int64_t flags) { return RoundUp(flags * 4, kLineBytes); }
};

}  // namespace jax_ulysses

#endif  // JAX_ULYSSES_COMM_HEAP_LAYOUT_H_
