// SPDX-License-Identifier: Apache-2.0
// P ranks as threads that run many calls of the bare protocol and check every word they receive.
//
// A call either pulls (GEMM -> all-to-all) or pushes (all-to-all -> GEMM), by a hash of its epoch,
// with a number of tiles that changes from call to call. Values flip their sign with every use of a
// slot, so that data of an earlier use shows at once. Who is late, and when, is drawn at random.
#ifndef JAX_ULYSSES_TESTS_WORLD_H_
#define JAX_ULYSSES_TESTS_WORLD_H_

#include <atomic>
#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#include "heap.h"
#include "jax_ulysses/comm/host_memory.h"
#include "jax_ulysses/comm/rank_protocol.h"

namespace jax_ulysses::testing {

inline constexpr int64_t kMaxTiles = 6;
inline constexpr int64_t kTileWords = 32;

inline void SleepUs(int64_t us) { std::this_thread::sleep_for(std::chrono::microseconds(us)); }

enum class Traffic { kMixed, kPull, kPush };

struct WorldOptions {
  int64_t num_ranks = 4;
  int64_t num_slots = 2;
  int64_t epochs = 100;
  uint32_t start_epoch = 0;
  Traffic traffic = Traffic::kMixed;
  bool handshake = true;
  int64_t deadline_ms = 20000;
  // One in `late_one_in` decisions sleeps for up to late_us; 0 is never.
  int64_t late_one_in = 0;
  int64_t late_us = 200;
  // Where sleeps are drawn: before a tile is written, before it is read.
  bool late_writer = true;
  bool late_reader = true;
  // Both roles of a rank on threads of their own (a thread a call) instead of one after the other.
  bool two_roles = false;
  // Rank `bad_rank` misbehaves in call number `bad_call` (0 is the first).
  enum class Misbehave {
    kNone,
    kNeverArrives,
    kLate,
    kOtherShape,
    kRaises
  } misbehave = Misbehave::kNone;
  int64_t bad_rank = 0;
  int64_t bad_call = 3;
  int64_t bad_us = 0;  // how late, or after how long it raises
};

struct WorldResult {
  int64_t mismatches = 0;        // words that are not what the source wrote in this epoch
  int64_t early_exits = 0;       // calls that ended before every rank had finished
  int64_t completed_calls = 0;   // over all ranks
  std::vector<Fault> faults;     // of each rank, kNone where it went through
  std::vector<int64_t> wait_ms;  // of each rank, duration of its failing call
};

inline uint64_t Mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
  x = (x ^ x >> 27) * 0x94d049bb133111ebu;
  return x ^ x >> 31;
}

template <uint32_t kRemoved = kEdgeNone>
class World {
 public:
  using Protocol = RankProtocol<HostMemory, kRemoved>;

  explicit World(const WorldOptions& options) : options_(options) {
    layout_.num_ranks = options.num_ranks;
    layout_.num_slots = options.num_slots;
    layout_.slot_bytes = options.num_ranks * kMaxTiles * kTileWords * 8;
    layout_.flags_per_source = 32;
    layout_.blocks_per_source = 32;
    heap_ = MakeHostHeap(layout_, options.start_epoch);
  }

  WorldResult Run() {
    const size_t ranks = static_cast<size_t>(options_.num_ranks);
    result_.faults.resize(ranks);
    result_.wait_ms.resize(ranks);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < options_.num_ranks; ++rank) {
      threads.emplace_back([this, rank] { RankMain(rank); });
    }
    for (std::thread& thread : threads) thread.join();
    result_.mismatches = mismatches_;
    result_.early_exits = early_exits_;
    result_.completed_calls = completed_;
    return result_;
  }

 private:
  using Misbehave = WorldOptions::Misbehave;

  struct Plan {
    bool push;
    int64_t tiles;
  };
  Plan PlanOf(uint32_t epoch) const {
    const uint64_t h = Mix(epoch);
    const bool push =
        options_.traffic == Traffic::kPush || (options_.traffic == Traffic::kMixed && (h & 1) != 0);
    return {push, static_cast<int64_t>(1 + (h >> 8) % kMaxTiles)};
  }

  int64_t Value(uint32_t epoch, int source, int dest, int64_t tile, int64_t word) const {
    const int64_t base = ((source * 64 + dest) * kMaxTiles + tile) * kTileWords + word + 1;
    return (epoch / static_cast<uint32_t>(options_.num_slots)) % 2 == 0 ? base : -base;
  }

  void MaybeLate(uint64_t& random, bool enabled) const {
    if (!enabled || options_.late_one_in == 0) return;
    random = Mix(random);
    if (random % static_cast<uint64_t>(options_.late_one_in) != 0) return;
    SleepUs(static_cast<int64_t>((random >> 32) % static_cast<uint64_t>(options_.late_us)));
  }

  // Tile `tile` of the block between `holder`'s slot and `other`.
  static int64_t* TileAt(const Protocol& p, int holder, int other, int64_t tile) {
    return reinterpret_cast<int64_t*>(p.Slot(holder)) + (other * kMaxTiles + tile) * kTileWords;
  }

  bool Produce(Protocol& p, int rank, const Plan& plan, uint64_t random) {
    for (int64_t tile = 0; tile < plan.tiles; ++tile) {
      for (int step = 1; step < options_.num_ranks; ++step) {
        const int dest = (rank + step) % static_cast<int>(options_.num_ranks);
        MaybeLate(random, options_.late_writer);
        int64_t* out = plan.push ? TileAt(p, dest, rank, tile) : TileAt(p, rank, dest, tile);
        for (int64_t w = 0; w < kTileWords; ++w) out[w] = Value(p.epoch(), rank, dest, tile, w);
        if (plan.push) {
          // All tiles count as pieces of few blocks, so that counters collect several arrivals.
          p.PublishPiece(dest, tile % 2);
        } else {
          p.PublishTile(dest, tile);
        }
      }
    }
    return true;
  }

  bool Consume(Protocol& p, int rank, const Plan& plan, uint64_t random) {
    if (!p.WaitEntries()) return false;
    for (int64_t tile = 0; tile < plan.tiles; ++tile) {
      for (int step = 1; step < options_.num_ranks; ++step) {
        const int source =
            static_cast<int>((rank - step + options_.num_ranks) % options_.num_ranks);
        const int64_t block = tile % 2;
        const uint32_t pieces = static_cast<uint32_t>((plan.tiles + 1 - block) / 2);
        const bool ok = plan.push ? p.WaitPieces(source, block, pieces) : p.WaitTile(source, tile);
        if (!ok) return false;
        MaybeLate(random, options_.late_reader);
        const int64_t* in =
            plan.push ? TileAt(p, rank, source, tile) : TileAt(p, source, rank, tile);
        int64_t wrong = 0;
        for (int64_t w = 0; w < kTileWords; ++w) {
          wrong += in[w] != Value(p.epoch(), source, rank, tile, w);
        }
        if (wrong != 0) mismatches_ += wrong;
      }
    }
    for (int source = 0; plan.push && source < options_.num_ranks; ++source) {
      if (source == rank) continue;
      for (int64_t block = 0; block < 2; ++block) {
        p.TakePieces(source, block, static_cast<uint32_t>((plan.tiles + 1 - block) / 2));
      }
    }
    return true;
  }

  bool Call(Protocol& p, int rank, int64_t number) {
    const Plan plan = PlanOf(p.epoch());
    const bool raises = options_.misbehave == Misbehave::kRaises && rank == options_.bad_rank &&
                        number == options_.bad_call;
    uint64_t random = Mix(static_cast<uint64_t>(rank) << 40 | static_cast<uint64_t>(number));
    if (!p.WaitSlotFree()) return false;
    if (raises) {
      SleepUs(options_.bad_us);
      p.Raise(FaultKind::kThrown, rank, -1);
      return false;
    }
    p.PublishEntry();
    bool ok = false;
    if (options_.two_roles) {
      Protocol copy = p;
      bool produced = false;
      std::thread other([&] { produced = Produce(copy, rank, plan, random); });
      ok = Consume(p, rank, plan, Mix(random));
      other.join();
      ok = ok && produced;
    } else {
      ok = Produce(p, rank, plan, random) && Consume(p, rank, plan, Mix(random));
    }
    if (!ok || !p.Finish(options_.handshake)) return false;
    for (int peer = 0; peer < options_.num_ranks; ++peer) {
      const char* word = p.call().peers.heap[rank] + layout_.done(peer);
      const uint32_t done = HostMemory::LoadRelaxed(reinterpret_cast<const uint32_t*>(word));
      if (!Reached(done, p.epoch())) ++early_exits_;
    }
    return true;
  }

  void RankMain(int rank) {
    const bool bad = rank == options_.bad_rank;
    for (int64_t number = 0; number < options_.epochs; ++number) {
      CallInfo call;
      call.peers = heap_->Peers(rank);
      call.layout = layout_;
      call.rank = rank;
      call.op = Operator::kGemmA2a;
      call.agreement = 7;
      call.deadline_ns = static_cast<uint64_t>(options_.deadline_ms) * 1000000u;
      const bool now = bad && number == options_.bad_call;
      if (now && options_.misbehave == Misbehave::kNeverArrives) {
        // Later it raises, which ends the wait of ranks that have no deadline.
        Protocol p(call);
        for (int64_t us = 0; us < options_.bad_us && !p.Aborted(); us += 1000) SleepUs(1000);
        p.Raise(FaultKind::kThrown, rank, -1);
        result_.faults[static_cast<size_t>(rank)] = p.ReadFault();
        return;
      }
      if (now && options_.misbehave == Misbehave::kLate) SleepUs(options_.bad_us);
      if (now && options_.misbehave == Misbehave::kOtherShape) call.agreement = 8;
      const auto start = std::chrono::steady_clock::now();
      Protocol p(call);
      if (!Call(p, rank, number)) {
        const auto spent = std::chrono::steady_clock::now() - start;
        result_.faults[static_cast<size_t>(rank)] = p.ReadFault();
        result_.wait_ms[static_cast<size_t>(rank)] =
            std::chrono::duration_cast<std::chrono::milliseconds>(spent).count();
        return;
      }
      ++completed_;
    }
  }

  WorldOptions options_;
  HeapLayout layout_;
  std::unique_ptr<SymmetricHeap> heap_;
  std::atomic<int64_t> mismatches_{0};
  std::atomic<int64_t> early_exits_{0};
  std::atomic<int64_t> completed_{0};
  WorldResult result_;
};

}  // namespace jax_ulysses::testing

#endif  // JAX_ULYSSES_TESTS_WORLD_H_
