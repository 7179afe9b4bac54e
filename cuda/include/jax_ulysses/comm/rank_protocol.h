// SPDX-License-Identifier: Apache-2.0
// One rank's side of the protocol, for one call. The same code runs on CPU threads and in kernels;
// `Mem` supplies the memory operations (host_memory.h for threads):
//   uint32_t LoadRelaxed(const uint32_t*), uint64_t LoadRelaxed(const uint64_t*)
//   void StoreRelaxed(uint32_t*, uint32_t)                 (own or peer memory)
//   void StoreRelease(uint32_t* | uint64_t*, value)        system scope
//   void AddRelease(uint32_t*, uint32_t), void AddRelaxed  system scope, no result
//   uint32_t Exchange(uint32_t*, uint32_t)                 own memory, relaxed
//   void AcquireFence()                                    system scope
//   void Pause(int polls), uint64_t NowNs()
//
// A call, on every rank:
//   protocol = RankProtocol(...)     reads the epoch of this call from the heap
//   WaitSlotFree                     before anything of this epoch is written, also by PublishEntry
//   any number of roles, each with a copy: WaitEntries, PublishTile/WaitTile,
//       PublishPiece/WaitPieces/TakePieces
//   Finish                           after all roles of the rank have ended
// Every wait returns false when the group has been aborted, by this rank or another; the caller
// then leaves at once, without Finish.
//
// Epochs count calls of the group, mod 2^32. In epoch e all ranks use slot e % num_slots.
#ifndef JAX_ULYSSES_COMM_RANK_PROTOCOL_H_
#define JAX_ULYSSES_COMM_RANK_PROTOCOL_H_

#include "jax_ulysses/base.h"
#include "jax_ulysses/comm/edges.h"
#include "jax_ulysses/comm/fault.h"
#include "jax_ulysses/comm/heap_layout.h"

namespace jax_ulysses {

// Base addresses of all heaps of a line, as this rank sees them. Passed by value to kernels.
struct PeerTable {
  char* heap[kMaxRanks] = {};
};

// What one call needs to know about its line.
struct CallInfo {
  PeerTable peers;
  HeapLayout layout;
  int32_t rank = 0;
  // What the program takes this rank for (its axis index), or null. For kernels, which read it on
  // the device; CPU handlers compare it themselves.
  const int32_t* program_rank = nullptr;
  Operator op = Operator::kNone;
  uint32_t agreement = 0;    // hash of operator, shapes and types: equal on all ranks, or an error
  uint64_t deadline_ns = 0;  // of every single wait; 0 waits for ever
  // Read only by RankProtocol<.., kEdgesAtRunTime>.
  uint32_t removed_edges = kEdgeNone;
};

// True when `flag`, which only grows, has reached `target`. The signed difference makes
// wrap-around harmless.
JU_HD constexpr bool Reached(uint32_t flag, uint32_t target) {
  return static_cast<int32_t>(flag - target) >= 0;
}

template <class Mem, uint32_t kRemoved = kEdgeNone>
class RankProtocol {
 public:
  // Keeps a pointer: `call` outlives every copy of this object. (A copy of it would not fit into
  // registers.)
  JU_HD explicit RankProtocol(const CallInfo& call) : call_(&call) {
    // Own word, written by the previous call of this rank, which has ended: relaxed is enough.
    epoch_ = Mem::LoadRelaxed(Own(call_->layout.epoch())) + 1;
  }
  RankProtocol(CallInfo&&) = delete;

  JU_HD uint32_t epoch() const { return epoch_; }
  // num_slots is a power of two (HeapLayout::IsValid), and a kernel has no cheap division.
  JU_HD int64_t slot_index() const { return epoch_ & (call_->layout.num_slots - 1); }
  JU_HD const CallInfo& call() const { return *call_; }

  // This epoch's slot in the heap of `rank`.
  JU_HD char* Slot(int rank) const {
    return call_->peers.heap[rank] + call_->layout.slot(slot_index());
  }

  JU_HD bool Aborted() const { return Mem::LoadRelaxed(Own(call_->layout.abort())) != 0; }

  // Edge "credit". Releases: every rank, in Finish of epoch e - num_slots. Acquires: every rank
  // before it writes this epoch's slot, its own or a peer's. Scope: system.
  // All ranks are asked, not only the later readers of what this rank writes: in the previous use
  // of a slot each rank may have read it (pull) or written it (push), whatever the operator.
  JU_HD bool WaitSlotFree() {
    if (Removed(kEdgeCreditWait)) return true;
    return WaitDone(credit_target(), FaultKind::kCreditTimeout);
  }
  // The same for one peer: a warp asks all of them at once, one per lane.
  JU_HD bool WaitSlotFree(int peer) {
    if (Removed(kEdgeCreditWait)) return true;
    return WaitDone(peer, credit_target(), FaultKind::kCreditTimeout);
  }

  // Edge "entry". Releases: each rank here, at every peer. Acquires: the peers in WaitEntries.
  // Scope: system. One 64-bit word carries epoch and hash, so they cannot be torn, and no other
  // data hangs on it. It has a ring of its own because a peer may be one call ahead.
  JU_HD void PublishEntry() {
    for (int i = 0; i < num_ranks(); ++i) PublishEntry(RotatedPeer(i));
  }
  JU_HD void PublishEntry(int peer) {
    const uint64_t word = static_cast<uint64_t>(epoch_) << 32 | call_->agreement;
    Mem::StoreRelease(EntryWord(peer, call_->rank), word);
  }

  // Waits until every peer has entered this epoch, and compares what it came for.
  JU_HD bool WaitEntries() {
    for (int i = 0; i < num_ranks(); ++i) {
      if (!WaitEntry(RotatedPeer(i))) return false;
    }
    return true;
  }
  JU_HD bool WaitEntry(int peer) {
    if (Removed(kEdgeEntryWait)) return true;
    const uint64_t* word = EntryWord(call_->rank, peer);
    uint64_t seen = 0;
    const bool entered = WaitUntil(
        [&] {
          seen = Mem::LoadRelaxed(word);
          // Equality: the credit keeps a peer from reusing this entry before we are done.
          if (static_cast<uint32_t>(seen >> 32) != epoch_) return false;
          // Here and not after the loop, where a lane would wait for those lanes of its warp whose
          // peers have not come yet.
          if (static_cast<uint32_t>(seen) != call_->agreement) {
            Raise(FaultKind::kDisagreement, peer, -1, static_cast<uint32_t>(seen));
          }
          return true;
        },
        FaultKind::kEntryTimeout, peer, -1);
    return entered && static_cast<uint32_t>(seen) == call_->agreement;
  }

  // Edge "tile". Releases: the source, at the destination, after the tile lies complete in the
  // source's slot. Acquires: the destination in WaitTile, before it reads that slot. Scope: system.
  JU_HD void PublishTile(int dest, int64_t tile) {
    uint32_t* flag = At(dest, call_->layout.ready(call_->rank, tile));
    if (Removed(kEdgeTileRelease)) {
      Mem::StoreRelaxed(flag, epoch_);
    } else {
      Mem::StoreRelease(flag, epoch_);
    }
  }

  // A source is at most num_slots - 1 calls ahead, so only these values of the flag mean "ready".
  // The narrow window, unlike a bare sign test, also refuses a flag that was last used more than
  // 2^31 calls ago.
  JU_HD bool WaitTile(int source, int64_t tile) {
    if (Removed(kEdgeTileWait)) return true;
    const uint32_t* flag = Own(call_->layout.ready(source, tile));
    return WaitUntil([&] { return IsReady(Mem::LoadRelaxed(flag)); }, FaultKind::kTileTimeout,
                     source, tile);
  }

  // WaitTile in two steps, for a caller with something to do while the word is on its way. Acquires
  // only if the tile was ready when it was looked at.
  JU_HD uint32_t PeekTile(int source, int64_t tile) const {
    return Mem::LoadRelaxed(Own(call_->layout.ready(source, tile)));
  }
  JU_HD bool IsReady(uint32_t peeked) const {
    return peeked - epoch_ < static_cast<uint32_t>(call_->layout.num_slots);
  }
  JU_HD void AcquirePeeked() const {
    if (!Removed(kEdgeAcquire)) Mem::AcquireFence();
  }

  // Edge "piece". Releases: the source, by adding one at the destination after the piece lies
  // complete in the destination's slot. Acquires: the destination in WaitPieces, before it reads
  // its slot. Scope: system. Counters are never reset; what earlier calls used up is in `taken`,
  // so calls of different shapes may share them.
  JU_HD void PublishPiece(int dest, int64_t block) {
    uint32_t* counter = At(dest, call_->layout.arrived(call_->rank, block));
    if (Removed(kEdgePieceRelease)) {
      Mem::AddRelaxed(counter, 1);
    } else {
      Mem::AddRelease(counter, 1);
    }
  }

  JU_HD bool WaitPieces(int source, int64_t block, uint32_t pieces) {
    if (Removed(kEdgePieceWait)) return true;
    const uint32_t* counter = Own(call_->layout.arrived(source, block));
    const uint32_t target = Mem::LoadRelaxed(Own(call_->layout.taken(source, block))) + pieces;
    return WaitUntil([&] { return Reached(Mem::LoadRelaxed(counter), target); },
                     FaultKind::kPieceTimeout, source, block);
  }

  // Uses up `pieces` arrivals. Once per block and call, after the last WaitPieces on it; only this
  // rank touches the word.
  JU_HD void TakePieces(int source, int64_t block, uint32_t pieces) {
    uint32_t* word = Own(call_->layout.taken(source, block));
    Mem::StoreRelaxed(word, Mem::LoadRelaxed(word) + pieces);
  }

  // Ends the call: everything owed to this rank has been read. Publishes that (edge "credit") and,
  // with `handshake`, waits until every rank has said the same (edge "exit": same release, acquired
  // here), so that an error of any rank in this call is an error of all. Without it a rank may end
  // while its data is still parked in slots; the credit protects them.
  JU_HD bool Finish(bool handshake) {
    for (int i = 0; i < num_ranks(); ++i) PublishDone(RotatedPeer(i));
    if (handshake && !Removed(kEdgeExitWait) && !WaitDone(epoch_, FaultKind::kExitTimeout)) {
      return false;
    }
    AdvanceEpoch();
    return true;
  }
  JU_HD void PublishDone(int peer) {
    uint32_t* word = At(peer, call_->layout.done(call_->rank));
    if (Removed(kEdgeDoneRelease)) {
      Mem::StoreRelaxed(word, epoch_);
    } else {
      Mem::StoreRelease(word, epoch_);
    }
  }
  JU_HD void AdvanceEpoch() { Mem::StoreRelaxed(Own(call_->layout.epoch()), epoch_); }

  // Edge "abort". Releases: the raiser, at every rank, after its fault record lies there.
  // Acquires: ReadFault. Scope: system. A rank raises at most once, so its line is written once.
  JU_HD void Raise(FaultKind kind, int peer, int64_t tile, uint32_t detail = 0) {
    // What was raised before is what every rank should report.
    if (Aborted() || Mem::Exchange(Own(call_->layout.raised()), 1) != 0) return;
    const uint32_t words[kFaultWords] = {static_cast<uint32_t>(kind),
                                         static_cast<uint32_t>(call_->rank),
                                         static_cast<uint32_t>(peer),
                                         static_cast<uint32_t>(call_->op),
                                         static_cast<uint32_t>(tile),
                                         epoch_,
                                         detail};
    for (int i = 0; i < num_ranks(); ++i) {
      const int target = RotatedPeer(i);
      uint32_t* line = At(target, call_->layout.fault(call_->rank));
      for (int w = 0; w < kFaultWords; ++w) Mem::StoreRelaxed(line + w, words[w]);
      uint32_t* word = At(target, call_->layout.abort());
      if (Removed(kEdgeAbortRelease)) {
        Mem::StoreRelaxed(word, static_cast<uint32_t>(call_->rank) + 1);
      } else {
        Mem::StoreRelease(word, static_cast<uint32_t>(call_->rank) + 1);
      }
    }
  }

  // The record behind the abort word of this rank; kind kNone when there is none.
  JU_HD Fault ReadFault() const {
    const uint32_t raiser = Mem::LoadRelaxed(Own(call_->layout.abort()));
    Fault fault;
    if (raiser == 0) return fault;
    Mem::AcquireFence();
    const uint32_t* line = Own(call_->layout.fault(raiser - 1));
    fault.kind = static_cast<FaultKind>(Mem::LoadRelaxed(line));
    fault.rank = static_cast<int32_t>(Mem::LoadRelaxed(line + 1));
    fault.peer = static_cast<int32_t>(Mem::LoadRelaxed(line + 2));
    fault.op = static_cast<Operator>(Mem::LoadRelaxed(line + 3));
    fault.tile = static_cast<int32_t>(Mem::LoadRelaxed(line + 4));
    fault.epoch = Mem::LoadRelaxed(line + 5);
    fault.detail = Mem::LoadRelaxed(line + 6);
    return fault;
  }

 private:
  JU_HD bool Removed(uint32_t edge) const {
    if constexpr (kRemoved == kEdgesAtRunTime) return (call_->removed_edges & edge) != 0;
    return (kRemoved & edge) != 0;
  }

  JU_HD int num_ranks() const { return static_cast<int>(call_->layout.num_ranks); }

  // Starts after the own rank, so that not everyone talks to rank 0 first; ends with itself.
  JU_HD int RotatedPeer(int i) const { return (call_->rank + 1 + i) % num_ranks(); }

  JU_HD uint32_t* At(int rank, int64_t offset) const {
    return reinterpret_cast<uint32_t*>(call_->peers.heap[rank] + offset);
  }
  JU_HD uint32_t* Own(int64_t offset) const { return At(call_->rank, offset); }
  JU_HD uint64_t* EntryWord(int holder, int writer) const {
    return reinterpret_cast<uint64_t*>(call_->peers.heap[holder] +
                                       call_->layout.entry(slot_index(), writer));
  }

  JU_HD uint32_t credit_target() const {
    return epoch_ - static_cast<uint32_t>(call_->layout.num_slots);
  }

  JU_HD bool WaitDone(uint32_t target, FaultKind kind) {
    for (int i = 0; i < num_ranks() - 1; ++i) {
      if (!WaitDone(RotatedPeer(i), target, kind)) return false;
    }
    return true;
  }
  JU_HD bool WaitDone(int peer, uint32_t target, FaultKind kind) {
    const uint32_t* word = Own(call_->layout.done(peer));
    return WaitUntil([&] { return Reached(Mem::LoadRelaxed(word), target); }, kind, peer, -1);
  }

  // Polls relaxed and fences once after success: a load with acquire in every poll costs more.
  template <class Condition>
  JU_HD bool WaitUntil(Condition&& condition, FaultKind kind, int peer, int64_t tile) {
    uint64_t start = 0;
    for (int polls = 0; !condition(); ++polls) {
      // Another word, which on a GPU takes as long to load as the one that is waited for.
      const bool looks = polls % 8 == 7;
      if (looks && !Removed(kEdgeAbortCheck) && Aborted()) return false;
      Mem::Pause(polls);
      if (call_->deadline_ns == 0 || Removed(kEdgeDeadline)) continue;
      const uint64_t now = Mem::NowNs();
      if (start == 0) start = now;
      if (now - start > call_->deadline_ns) {
        Raise(kind, peer, tile);
        return false;
      }
    }
    if (!Removed(kEdgeAcquire)) Mem::AcquireFence();
    return true;
  }

  const CallInfo* call_;
  uint32_t epoch_ = 0;
};

// Prepares the control words of one heap. `start` is the epoch before the first call. All flags
// begin there: with zeros, a start near 2^32 would find flags that are already "ahead".
template <class Mem>
void InitControlWords(char* heap, const HeapLayout& layout, uint32_t start) {
  auto store = [heap](int64_t offset, uint32_t value) {
    Mem::StoreRelaxed(reinterpret_cast<uint32_t*>(heap + offset), value);
  };
  for (int64_t i = 0; i < layout.control_bytes(); i += 4) store(i, 0);
  store(layout.epoch(), start);
  for (int64_t peer = 0; peer < layout.num_ranks; ++peer) {
    store(layout.done(peer), start);
    for (int64_t slot = 0; slot < layout.num_slots; ++slot) {
      // Little-endian: the epoch is the upper half of the entry word.
      store(layout.entry(slot, peer) + 4, start);
    }
    for (int64_t i = 0; i < layout.flags_per_source; ++i) store(layout.ready(peer, i), start);
    for (int64_t i = 0; i < layout.blocks_per_source; ++i) {
      store(layout.arrived(peer, i), start);
      store(layout.taken(peer, i), start);
    }
  }
}

}  // namespace jax_ulysses

#endif  // JAX_ULYSSES_COMM_RANK_PROTOCOL_H_
