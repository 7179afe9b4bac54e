// SPDX-License-Identifier: Apache-2.0
// The communication role pushes 16-row pieces of the input into the peers' slots. The compute role
// walks row blocks; in each it takes the sources in the fixed order rank, rank+1, ... (mod P), so
// the order of additions depends on the rank and on nothing else, in particular not on arrival.
#include "a2a_gemm.h"

#include <algorithm>
#include <vector>

#include "gemm.h"
#include "push.h"

namespace jax_ulysses::host {
namespace {

template <class T>
class RowBlocks {
 public:
  using A = Accumulator<T>;

  RowBlocks(const A2aGemmArgs& args, const A2aGemmPieces& pieces, Protocol& protocol)
      : args_(args),
        shape_(args.shape),
        exchange_(args.shape.exchange),
        pieces_(pieces),
        protocol_(protocol),
        columns_(args.shape.exchange.fused_columns()),
        weight_{static_cast<const T*>(args.w), columns_, args.width, args.w_transposed} {}

  bool Run() {
    for (int64_t block = 0; block < pieces_.num_blocks(); ++block) {
      begin_ = pieces_.block_begin(block);
      rows_ = pieces_.block_size(block);
      acc_.assign(static_cast<size_t>(rows_ * args_.width), A{0});
      if (args_.g != nullptr) {
        gathered_rows_ = static_cast<T*>(args_.g) + begin_ * columns_;
      } else {
        scratch_.resize(static_cast<size_t>(rows_ * columns_));
        gathered_rows_ = scratch_.data();
      }
      for (int64_t p = 0; p < exchange_.num_ranks; ++p) {
        const int64_t source = pieces_.KSource(p);
        if (p > 0 && !WaitBlock(pieces_, protocol_, source, block)) return false;
        for (int64_t seg = 0; seg < exchange_.num_segments; ++seg) {
          Consume(seg, source, p);
        }
      }
      for (int64_t p = 1; p < exchange_.num_ranks; ++p) {
        TakeBlock(pieces_, protocol_, pieces_.KSource(p), block);
      }
      Store();
    }
    return true;
  }

 private:
  // Columns of segment `seg` in row `row` (flattened, of this rank), as `source` holds them.
  const T* SourceRow(int64_t seg, int64_t source, int64_t row) const {
    if (source == shape_.rank) {
      // The own block never leaves the XLA input.
      return reinterpret_cast<const T*>(args_.parts[seg]) +
             shape_.HeadShardRow(seg, shape_.rank, row);
    }
    const char* block = ReceivedBlock(shape_, protocol_, source);
    return reinterpret_cast<const T*>(block + row * shape_.row_bytes()) +
           exchange_.packed_begin(seg);
  }

  void Consume(int64_t seg, int64_t source, int64_t position) {
    const int64_t copies = exchange_.replicas(seg);
    const int64_t first = source / copies * copies;
    // A replicated head is summed once, when the last of its copies is here.
    if (copies > 1 && pieces_.GroupReadyAt(first, copies) != position) return;
    const int64_t width = exchange_.segment_columns(seg);
    const int64_t fused = exchange_.fused_block_begin(seg, source);
    T* gathered = gathered_rows_ + fused;
    for (int64_t m = 0; m < rows_; ++m) {
      T* out = gathered + m * columns_;
      if (copies == 1) {
        std::copy_n(SourceRow(seg, source, begin_ + m), width, out);
        continue;
      }
      sum_.assign(static_cast<size_t>(width), A{0});
      for (int64_t rank = first; rank < first + copies; ++rank) {
        const T* in = SourceRow(seg, rank, begin_ + m);
        for (int64_t n = 0; n < width; ++n) sum_[static_cast<size_t>(n)] += Widen(in[n]);
      }
      for (int64_t n = 0; n < width; ++n) out[n] = Narrow<T>(sum_[static_cast<size_t>(n)]);
    }
    gemm_.Accumulate(acc_.data(), args_.width, gathered, columns_, rows_, width, weight_, fused, 0,
                     args_.width);
  }

  void Store() {
    const T* bias = static_cast<const T*>(args_.bias);
    T* y = static_cast<T*>(args_.y) + begin_ * args_.width;
    for (int64_t m = 0; m < rows_; ++m) {
      for (int64_t n = 0; n < args_.width; ++n) {
        A value = acc_[static_cast<size_t>(m * args_.width + n)];
        if (bias != nullptr) value += Widen(bias[n]);
        y[m * args_.width + n] = Narrow<T>(value);
      }
    }
  }

  const A2aGemmArgs& args_;
  const Shape& shape_;
  const HeadExchange& exchange_;
  const A2aGemmPieces& pieces_;
  Protocol& protocol_;
  const int64_t columns_;
  const Weight<T> weight_;
  int64_t begin_ = 0;
  int64_t rows_ = 0;
  T* gathered_rows_ = nullptr;  // of the block: in g, or in the scratch where g is not wanted
  std::vector<T> scratch_;
  Gemm<T> gemm_;
  std::vector<A> acc_;
  std::vector<A> sum_;
};

}  // namespace

CallStatus RunA2aGemm(const RankHandle& handle, A2aGemmArgs args) {
  args.shape.rank = handle.rank;
  const A2aGemmPieces pieces = MakePieces(args.shape, handle.line->layout());
  CallSpec spec;
  spec.op = Operator::kA2aGemm;
  spec.agreement = args.agreement;
  spec.slot_bytes = args.shape.slot_bytes();
  spec.entries_first = false;
  spec.compute = [&](Protocol& protocol) {
    return DispatchFloat(args.type, [&](auto tag) {
      return RowBlocks<decltype(tag)>(args, pieces, protocol).Run();
    });
  };
  spec.communicate = [&](Protocol& protocol) {
    return PushPieces(args.shape, pieces, protocol, [&](int64_t dest, int64_t row, char* out) {
      args.shape.PackHeadShardRow(args.parts, dest, row, out);
    });
  };
  return RunCall(handle, spec);
}

}  // namespace jax_ulysses::host
