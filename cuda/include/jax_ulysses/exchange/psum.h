// SPDX-License-Identifier: Apache-2.0
// A one-shot all-reduce over the heap, for ranks that share a GPU (where NCCL refuses) and for
// small vectors: every rank sends its vector to all, and each adds the P vectors in rank order.
#ifndef JAX_ULYSSES_EXCHANGE_PSUM_H_
#define JAX_ULYSSES_EXCHANGE_PSUM_H_

#include "jax_ulysses/launch.h"

namespace jax_ulysses {

struct PsumArgs {
  const char* in = nullptr;
  char* out = nullptr;
  int64_t bytes = 0;
  int32_t piece_bytes = 0;  // a multiple of 16; one flag a piece
  int32_t bulk = 0;
  SumType type = SumType::kF32;
  int32_t num_ranks = 1;
  int32_t rank = 0;

  JU_HD constexpr int32_t num_pieces() const {
    return static_cast<int32_t>(CeilDiv(bytes, piece_bytes));
  }
  // Items are the pieces for one destination, then those for the next.
  JU_HD constexpr int32_t Dest(int32_t item) const {
    return (rank + 1 + item / num_pieces()) % num_ranks;
  }
  JU_HD constexpr int64_t stride() const { return RoundUp(bytes, 16); }  // of a vector in a slot
};

}  // namespace jax_ulysses

#if defined(__CUDACC__)
#include "jax_ulysses/exchange/exchange.h"
#include "jax_ulysses/exchange/sum_vectors.h"

namespace jax_ulysses {

template <bool kTest, class Protocol>
class PsumPush {
 public:
  static constexpr bool kSignals = true;
  JU_D PsumPush(const PsumArgs& args, const Protocol& protocol, HandOff<kTest>& hand_off,
                int32_t worker, int32_t workers)
      : args_(args),
        protocol_(protocol),
        hand_off_(hand_off),
        item_(worker - workers),
        stride_(workers) {}

  JU_D bool Next(Strip& strip) {
    item_ += stride_;
    if (item_ >= (args_.num_ranks - 1) * args_.num_pieces()) return false;
    const int64_t begin = static_cast<int64_t>(item_ % args_.num_pieces()) * args_.piece_bytes;
    strip.source = args_.in + begin;
    strip.dest = protocol_.Slot(args_.Dest(item_)) + args_.rank * args_.stride() + begin;
    const int64_t left = args_.bytes - begin;
    strip.rows = 1;
    strip.row_bytes = left < args_.piece_bytes ? static_cast<int32_t>(left) : args_.piece_bytes;
    strip.signal = item_;
    strip.remote = true;
    return true;
  }
  JU_D void Signal(int32_t item) { hand_off_.GiveByLane(item); }

 private:
  const PsumArgs& args_;
  const Protocol& protocol_;
  HandOff<kTest>& hand_off_;
  int32_t item_;
  const int32_t stride_;
};

// Edge "tile" (a piece): acquired by PsumAdd of the destination.
template <class Protocol>
JU_D void PublishPiece(const PsumArgs& args, Protocol& protocol, int32_t item) {
  protocol.PublishTile(args.Dest(item), item % args.num_pieces());
}

template <bool kTest, class Protocol>
JU_D void PsumAdd(const PsumArgs& args, Protocol& protocol, const TestHooks& hooks, char* scratch,
                  int32_t worker, int32_t workers) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x % 32);
  for (int32_t piece = worker; piece < args.num_pieces(); piece += workers) {
    const int64_t start = static_cast<int64_t>(piece) * args.piece_bytes;
    const int64_t stop = start + Min(args.piece_bytes, args.bytes - start);
    for (int32_t r = 0; r < args.num_ranks; ++r) {
      TestHooks::Touch<kTest>(hooks, protocol.Slot(args.rank) + r * args.stride() + start,
                              static_cast<int32_t>(stop - start));
    }
    bool ok = true;
    for (int32_t r = lane; r < args.num_ranks; r += 32) {
      if (r != args.rank) ok = protocol.WaitTile(r, piece) && ok;
    }
    if (!AllLanes(ok)) return;
    TestHooks::DelayRead<kTest>(hooks);
    SumRows(args.type, args.bulk, scratch, args.out + start, 0, 1,
            static_cast<int32_t>(stop - start), args.num_ranks, [&](int32_t r) {
              return (r == args.rank ? args.in : protocol.Slot(args.rank) + r * args.stride()) +
                     start;
            });
  }
}

}  // namespace jax_ulysses
#endif  // __CUDACC__

#endif  // JAX_ULYSSES_EXCHANGE_PSUM_H_
