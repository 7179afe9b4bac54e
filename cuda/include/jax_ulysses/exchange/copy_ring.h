// SPDX-License-Identifier: Apache-2.0
// One warp that moves bytes with bulk copies: global -> shared ring -> global. It owns a small ring
// in shared memory and keeps loads and stores in flight at the same time. What it moves: strip.h.
// The lead lane copies a chunk that is contiguous; of others each lane copies some of the rows.
#ifndef JAX_ULYSSES_EXCHANGE_COPY_RING_H_
#define JAX_ULYSSES_EXCHANGE_COPY_RING_H_

#include "jax_ulysses/base.h"
#include "jax_ulysses/comm/edges.h"
#include "jax_ulysses/exchange/strip.h"
#include "jax_ulysses/exchange/test_hooks.h"
#include "jax_ulysses/ptx/async.h"

namespace jax_ulysses {

// A warp moves what it has under way over the time from asking for a chunk to its being stored, and
// a chunk costs about 0.35 us of instructions whatever its size (tests/gpu/ring_bench.cu): stages
// are as big as they can be, and only the chunk that completes a piece is waited for.
template <int kStages, int kStageBytes, bool kTest>
class CopyRing {
 public:
  // One stage less than there are: reading a stage out takes far less time than filling it.
  static constexpr int kLoadsAhead = kStages - 1;
  // Stores that may still be under way when a signal is given: it must not hold up those behind it,
  // and somebody waits for it.
  static constexpr int kSignalLag = kStages / 2;
  static_assert(kStages >= 2 && kStages <= 8 && kStageBytes % 128 == 0);

  static constexpr int kBytes = kStages * kStageBytes;
  struct Storage {
    alignas(128) char data[kStages][kStageBytes];
    alignas(8) uint64_t full[kStages];
    Chunk pending[kStages];
    int32_t signals[16];
  };

  // One thread, before BarrierInitFence and a barrier of those who use the ring.
  JU_D static void Init(Storage& storage) {
    for (int i = 0; i < kStages; ++i) ptx::BarrierInit(&storage.full[i], 1);
  }

  JU_D CopyRing(Storage& storage, const TestHooks& hooks) : storage_(storage), hooks_(hooks) {}

  // kBytes of shared memory, for other things when nothing is under way; no Run after that.
  JU_D char* IdleData() { return &storage_.data[0][0]; }

  // Whole warp. May be called again with other work. On return all stores are complete.
  template <class Work>
  JU_D void Run(Work& work) {
    Start(work);
    Finish(work, [] { return true; });
  }

  // The same in two halves. The first loads need nothing but the ring.
  template <class Work>
  JU_D void Start(Work& work) {
    more_ = work.Next(strip_);
    // The negative controls give signals before they load, when nobody can be told yet.
    if (TestHooks::Removed<kTest>(hooks_, kEdgeHandOff) || TestHooks::FlagsFirst<kTest>(hooks_)) {
      return;
    }
    LoadAhead(work);
  }

  // `may_store` is asked once, with the first loads under way. If it says no, nothing is stored.
  template <class Work, class MayStore>
  JU_D void Finish(Work& work, MayStore&& may_store) {
    bool asked = false;
    // The first signal goes out as soon as it may, because somebody waits for it and has nothing
    // else to do. Later ones lag.
    int lag = 0;
    while (true) {
      LoadAhead(work);
      if (stored_ == loaded_) break;
      if (!asked && !may_store()) {
        Drop();
        return;
      }
      asked = true;
      Store();
      if constexpr (Work::kSignals) {
        if (unsignalled_ >> lag != 0) {
          if (lag == 0) {
            WaitWritten<0>();
          } else {
            WaitWritten<kSignalLag>();
          }
          Signal(work, lag);
          lag = kSignalLag;
        }
      }
    }
    WaitWritten<0>();
    if constexpr (Work::kSignals) {
      for (int age = kSignalLag - 1; age >= 0; --age) Signal(work, age);
    }
    __syncwarp();
  }

 private:
  struct Cursor {
    uint32_t stage = 0;
    uint32_t parity = 0;
    JU_D void Advance() {
      if (++stage == kStages) {
        stage = 0;
        parity ^= 1;
      }
    }
  };

  template <int kPending>
  JU_D void WaitWritten() {
    if (TestHooks::Removed<kTest>(hooks_, kEdgeBulkComplete)) {
      ptx::BulkWaitRead<kPending>();
    } else {
      ptx::BulkWait<kPending>();
    }
  }

  template <class Work>
  JU_D void LoadAhead(Work& work) {
    while (more_ && loaded_ - stored_ < kLoadsAhead) {
      if constexpr (kTest && Work::kSignals) {
        // The negative control: before anything of the strip has been stored.
        if (strip_.signal != kNoSignal && (TestHooks::Removed<kTest>(hooks_, kEdgeHandOff) ||
                                           TestHooks::FlagsFirst<kTest>(hooks_))) {
          if (lead_) work.Signal(strip_.signal);
          strip_.signal = kNoSignal;
        }
      }
      Load();
      if (strip_.rows == 0) more_ = work.Next(strip_);
    }
  }

  // Takes as much of the strip as fits into a stage and starts to load it.
  JU_D void Load() {
    // Edge "ring": before a stage is filled again, its last store has read it. At most
    // kStages - kLoadsAhead younger stores may still be reading theirs.
    if (!TestHooks::Removed<kTest>(hooks_, kEdgeRing)) {
      ptx::BulkWaitRead<kStages - kLoadsAhead>();
    }
    const bool split = strip_.row_bytes > kStageBytes;
    const int32_t bytes = split ? min(strip_.row_bytes - offset_, kStageBytes) : strip_.row_bytes;
    const int32_t rows =
        split || strip_.rows == 1 ? 1 : min(strip_.rows, kStageBytes / strip_.row_bytes);
    const bool row_end = offset_ + bytes == strip_.row_bytes;
    if constexpr (kTest) {
      if (strip_.remote) hooks_.Throttle(rows * bytes, lead_);
    }
    const bool last = row_end && rows == strip_.rows;
    const char* source = strip_.source + offset_;
    uint64_t* full = &storage_.full[load_.stage];
    char* data = storage_.data[load_.stage];
    if (lead_) {
      storage_.pending[load_.stage] = {strip_.dest + offset_, rows, bytes, strip_.dest_pitch,
                                       last ? strip_.signal : kNoSignal};
      ptx::BarrierExpect(full, rows * bytes);
    }
    // Every lane has waited for its stores from this stage, and has read what was pending before.
    __syncwarp();
    if (rows == 1 || strip_.source_pitch == bytes) {
      if (lead_) ptx::BulkLoad(data, source, rows * bytes, full);
    } else {
      for (int32_t row = lane_; row < rows; row += 32) {
        ptx::BulkLoad(data + row * bytes, source + static_cast<int64_t>(row) * strip_.source_pitch,
                      bytes, full);
      }
    }
    ++loaded_;
    load_.Advance();
    offset_ = row_end ? 0 : offset_ + bytes;
    if (!row_end) return;
    strip_.rows -= rows;
    if (strip_.rows == 0) return;
    strip_.source += static_cast<int64_t>(rows) * strip_.source_pitch;
    strip_.dest += static_cast<int64_t>(rows) * strip_.dest_pitch;
  }

  JU_D void Store() {
    ptx::BarrierWait(&storage_.full[store_.stage], store_.parity);
    const Chunk chunk = storage_.pending[store_.stage];
    char* data = storage_.data[store_.stage];
    if (chunk.rows == 1 || chunk.pitch == chunk.row_bytes) {
      if (lead_) ptx::BulkStore(chunk.dest, data, chunk.rows * chunk.row_bytes);
    } else {
      for (int32_t row = lane_; row < chunk.rows; row += 32) {
        ptx::BulkStore(chunk.dest + static_cast<int64_t>(row) * chunk.pitch,
                       data + row * chunk.row_bytes, chunk.row_bytes);
      }
    }
    ptx::BulkCommit();  // of every lane, empty or not: all count alike
    if (TestHooks::Adversary<kTest>(hooks_)) Overwrite(data, chunk.rows * chunk.row_bytes);
    if (lead_) storage_.signals[stored_ % 16] = chunk.signal;
    unsignalled_ = unsignalled_ << 1 | (chunk.signal != kNoSignal ? 1u : 0u);
    ++stored_;
    store_.Advance();
  }

  // The adversary overwrites a stage as soon as nothing but the edge "ring" forbids it.
  JU_D void Overwrite(char* data, int32_t bytes) {
    if (!TestHooks::Removed<kTest>(hooks_, kEdgeRing)) ptx::BulkWaitRead<0>();
    __syncwarp();
    if (!lead_) return;
    // From the end, which a store reads last.
    for (int32_t i = bytes - 16; i >= 0; i -= 16) {
      *reinterpret_cast<uint4*>(data + i) = make_uint4(~0u, ~0u, ~0u, ~0u);
    }
    ptx::ProxyFence();
  }

  // Forgets what has been loaded.
  JU_D void Drop() {
    for (; stored_ != loaded_; ++stored_) {
      if (lead_) ptx::BarrierWait(&storage_.full[store_.stage], store_.parity);
      store_.Advance();
    }
    strip_ = Strip();
    offset_ = 0;
    more_ = false;
    __syncwarp();
  }

  // Gives the signal of the chunk that was stored `age` chunks before the last one, if it has one.
  template <class Work>
  JU_D void Signal(Work& work, int age) {
    if ((unsignalled_ >> age & 1) == 0) return;
    unsignalled_ &= ~(1u << age);
    // All lanes have waited for their stores.
    __syncwarp();
    if (lead_) work.Signal(storage_.signals[(stored_ - 1 - age) % 16]);
  }

  Storage& storage_;
  const TestHooks& hooks_;
  const int32_t lane_ = static_cast<int32_t>(threadIdx.x % 32);
  const bool lead_ = lane_ == 0;
  bool more_ = false;  // strip_ is not empty
  Strip strip_;
  int32_t offset_ = 0;  // bytes of the current row that are done, when a row is split
  Cursor load_, store_;
  uint32_t loaded_ = 0;
  uint32_t stored_ = 0;
  uint32_t unsignalled_ = 0;  // bit i is the chunk stored i chunks before the last
};

}  // namespace jax_ulysses

#endif  // JAX_ULYSSES_EXCHANGE_COPY_RING_H_
