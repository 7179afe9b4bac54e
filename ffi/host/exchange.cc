// SPDX-License-Identifier: Apache-2.0
// The communication role pushes packed rows into the peers' slots; the compute role unpacks what
// has arrived, and its own block from the input.
#include "exchange.h"

#include <algorithm>
#include <vector>

#include "push.h"

namespace jax_ulysses::host {
namespace {

class Exchanger {
 public:
  Exchanger(const ExchangeArgs& args, const A2aGemmPieces& pieces)
      : args_(args), shape_(args.shape), exchange_(args.shape.exchange), pieces_(pieces) {}

  bool Push(Protocol& protocol) const {
    return PushPieces(shape_, pieces_, protocol,
                      [&](int64_t dest, int64_t row, char* out) { Pack(dest, row, out); });
  }

  bool Unpack(Protocol& protocol) const {
    std::vector<char> own(static_cast<size_t>(shape_.row_bytes()));
    std::vector<const char*> rows(static_cast<size_t>(exchange_.num_ranks));
    for (int64_t block = 0; block < pieces_.num_blocks(); ++block) {
      for (int64_t p = 1; p < exchange_.num_ranks; ++p) {
        if (!WaitBlock(pieces_, protocol, pieces_.KSource(p), block)) return false;
      }
      const int64_t begin = pieces_.block_begin(block);
      for (int64_t row = begin; row < begin + pieces_.block_size(block); ++row) {
        Pack(shape_.rank, row, own.data());
        for (int64_t source = 0; source < exchange_.num_ranks; ++source) {
          rows[static_cast<size_t>(source)] =
              source == shape_.rank
                  ? own.data()
                  : ReceivedBlock(shape_, protocol, source) + row * shape_.row_bytes();
        }
        for (int64_t seg = 0; seg < exchange_.num_segments; ++seg) {
          if (args_.gather) {
            UnpackGather(seg, row, rows);
          } else {
            UnpackScatter(seg, row, rows);
          }
        }
      }
      for (int64_t p = 1; p < exchange_.num_ranks; ++p) {
        TakeBlock(pieces_, protocol, pieces_.KSource(p), block);
      }
    }
    return true;
  }

 private:
  int64_t Bytes(int64_t elements) const { return elements * shape_.element_bytes; }

  // Byte offset of head `head` of local row `row` in a sequence shard of segment `seg`.
  int64_t SequenceShard(int64_t seg, int64_t row, int64_t head) const {
    return Bytes((row * exchange_.heads[seg] + head) * exchange_.head_dim);
  }

  void Pack(int64_t dest, int64_t row, char* out) const {
    if (args_.gather) {
      shape_.PackHeadShardRow(args_.in, dest, row, out);
      return;
    }
    for (int64_t seg = 0; seg < exchange_.num_segments; ++seg) {
      const int64_t bytes = Bytes(exchange_.segment_columns(seg));
      std::memcpy(out, args_.in[seg] + SequenceShard(seg, row, exchange_.first_head(seg, dest)),
                  static_cast<size_t>(bytes));
      out += bytes;
    }
  }

  void UnpackScatter(int64_t seg, int64_t row, const std::vector<const char*>& rows) const {
    const int64_t bytes = Bytes(exchange_.segment_columns(seg));
    for (int64_t source = 0; source < exchange_.num_ranks; ++source) {
      std::memcpy(args_.out[seg] + Bytes(shape_.HeadShardRow(seg, source, row)),
                  rows[static_cast<size_t>(source)] + Bytes(exchange_.packed_begin(seg)),
                  static_cast<size_t>(bytes));
    }
  }

  void UnpackGather(int64_t seg, int64_t row, const std::vector<const char*>& rows) const {
    const int64_t columns = exchange_.segment_columns(seg);
    const int64_t copies = exchange_.replicas(seg);
    for (int64_t source = 0; source < exchange_.num_ranks; source += copies) {
      char* out = args_.out[seg] + SequenceShard(seg, row, exchange_.first_head(seg, source));
      const int64_t offset = Bytes(exchange_.packed_begin(seg));
      if (copies == 1 || !args_.sum_replicas) {
        std::memcpy(out, rows[static_cast<size_t>(source)] + offset,
                    static_cast<size_t>(Bytes(columns)));
        continue;
      }
      DispatchFloat(args_.type, [&](auto tag) {
        using T = decltype(tag);
        for (int64_t n = 0; n < columns; ++n) {
          Accumulator<T> sum = 0;
          // In rank order, in the accumulator's precision, rounded once.
          for (int64_t r = source; r < source + copies; ++r) {
            sum += Widen(reinterpret_cast<const T*>(rows[static_cast<size_t>(r)] + offset)[n]);
          }
          reinterpret_cast<T*>(out)[n] = Narrow<T>(sum);
        }
      });
    }
  }

  const ExchangeArgs& args_;
  const Shape& shape_;
  const HeadExchange& exchange_;
  const A2aGemmPieces& pieces_;
};

}  // namespace

CallStatus RunExchange(const RankHandle& handle, ExchangeArgs args) {
  args.shape.rank = handle.rank;
  const A2aGemmPieces pieces = MakePieces(args.shape, handle.line->layout());
  const Exchanger exchanger(args, pieces);
  CallSpec spec;
  spec.op = args.gather ? Operator::kGather : Operator::kScatter;
  spec.agreement = args.agreement;
  spec.slot_bytes = args.shape.slot_bytes();
  spec.entries_first = false;
  spec.compute = [&](Protocol& protocol) { return exchanger.Unpack(protocol); };
  spec.communicate = [&](Protocol& protocol) { return exchanger.Push(protocol); };
  return RunCall(handle, spec);
}

}  // namespace jax_ulysses::host
