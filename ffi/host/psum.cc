// SPDX-License-Identifier: Apache-2.0
// The communication role sends the vector to all peers, piece by piece; the compute role adds what
// has arrived, in rank order, so that every rank gets the same bits.
#include "psum.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace jax_ulysses::host {
namespace {

constexpr int64_t kPieceBytes = 16384;

class Summer {
 public:
  Summer(const PsumArgs& args, const HeapLayout& layout, int rank)
      : args_(args), num_ranks_(layout.num_ranks), rank_(rank) {
    const int64_t smallest = CeilDiv(args.bytes(), layout.flags_per_source);
    piece_bytes_ = std::max(kPieceBytes, RoundUp(smallest, 16));
  }

  bool Push(Protocol& protocol) const {
    for (int64_t piece = 0; piece < num_pieces(); ++piece) {
      if (protocol.Aborted()) return false;
      const int64_t begin = piece * piece_bytes_;
      for (int64_t i = 1; i < num_ranks_; ++i) {
        const int dest = static_cast<int>((rank_ + i) % num_ranks_);
        std::memcpy(protocol.Slot(dest) + rank_ * args_.stride() + begin, args_.in + begin,
                    static_cast<size_t>(End(piece) - begin));
        // Edge "tile" (a piece): acquired by Add of the destination.
        protocol.PublishTile(dest, piece);
      }
    }
    return true;
  }

  bool Add(Protocol& protocol) const {
    for (int64_t piece = 0; piece < num_pieces(); ++piece) {
      for (int64_t r = 0; r < num_ranks_; ++r) {
        if (r != rank_ && !protocol.WaitTile(static_cast<int>(r), piece)) return false;
      }
      DispatchFloat(args_.type, [&](auto tag) { AddPiece<decltype(tag)>(protocol, piece); });
    }
    return true;
  }

 private:
  int64_t num_pieces() const { return CeilDiv(args_.bytes(), piece_bytes_); }
  int64_t End(int64_t piece) const { return std::min(args_.bytes(), (piece + 1) * piece_bytes_); }

  template <class T>
  void AddPiece(const Protocol& protocol, int64_t piece) const {
    std::vector<const T*> vectors;
    for (int64_t r = 0; r < num_ranks_; ++r) {
      vectors.push_back(reinterpret_cast<const T*>(
          r == rank_ ? args_.in : protocol.Slot(static_cast<int>(rank_)) + r * args_.stride()));
    }
    const int64_t size = static_cast<int64_t>(sizeof(T));
    T* out = reinterpret_cast<T*>(args_.out);
    for (int64_t i = piece * piece_bytes_ / size; i < End(piece) / size; ++i) {
      Accumulator<T> sum = 0;
      for (const T* vector : vectors) sum += Widen(vector[i]);
      out[i] = Narrow<T>(sum);
    }
  }

  const PsumArgs& args_;
  const int64_t num_ranks_;
  const int64_t rank_;
  int64_t piece_bytes_;
};

}  // namespace

CallStatus RunPsum(const RankHandle& handle, const PsumArgs& args) {
  const HeapLayout& layout = handle.line->layout();
  const Summer summer(args, layout, handle.rank);
  CallSpec spec;
  spec.op = Operator::kPsum;
  spec.agreement = args.agreement;
  spec.slot_bytes = layout.num_ranks * args.stride();
  spec.entries_first = false;
  spec.compute = [&](Protocol& protocol) { return summer.Add(protocol); };
  spec.communicate = [&](Protocol& protocol) { return summer.Push(protocol); };
  return RunCall(handle, spec);
}

}  // namespace jax_ulysses::host
