// SPDX-License-Identifier: Apache-2.0
// Data, calls and checks of the two fused operators for a world of ranks.
#ifndef JAX_ULYSSES_TESTS_GPU_FIXTURE_CUH_
#define JAX_ULYSSES_TESTS_GPU_FIXTURE_CUH_

#include <cmath>

#include "jax_ulysses/exchange/pull.h"
#include "jax_ulysses/exchange/push.h"
#include "world.cuh"

namespace jax_ulysses::testing {

// Input set k is set 0 times kScales[k]: powers of two with a sign, so results scale exactly, and
// no two of three consecutive calls agree: stale data of either slot shows.
inline constexpr int kSets = 3;
inline constexpr float kScales[kSets] = {1.0f, -1.0f, 2.0f};

inline constexpr int kGrid = 1024, kBlock = 256;

// Columns of one row block of a slot, filled or read by plain kernels.
template <class T>
__global__ void FillSourceBlock(HeadExchange ex, int64_t rows, int64_t rank, int seg, const T* part,
                                T* block) {
  const int64_t columns = ex.segment_columns(seg);
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < rows * columns;
       i += int64_t{gridDim.x} * blockDim.x) {
    block[i] = part[HeadRow(ex, rank, i / columns) * columns + i % columns];
  }
}
template <class T>
__global__ void ReadMadeBlock(HeadExchange ex, int64_t rows, int64_t source, int seg,
                              const T* block, T* out) {
  const int64_t columns = ex.segment_columns(seg);
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < rows * columns;
       i += int64_t{gridDim.x} * blockDim.x) {
    out[HeadRow(ex, source, i / columns) * columns + i % columns] = block[i];
  }
}

struct Difference {
  double relative = 0;         // L2
  unsigned long long bad = 0;  // NaN, or not exactly equal
};

// What both operators have in common. `Ops` makes calls and knows inputs and outputs.
template <class Call_, class T_>
class FixtureBase {
 public:
  using Call = Call_;
  using T = T_;

  FixtureBase(const Shape& shape, const KernelEntry<Call>& entry, int64_t slot_bytes)
      : shape_(shape),
        entry_(entry),
        ex_(shape.Exchange()),
        heaps_(shape.ranks, slot_bytes),
        sums_(16),
        bad_(8),
        link_(8 * kMaxRanks) {
    const int64_t columns = ex_.fused_columns();
    // Each device has its own copy.
    for (int device = 0; device < g_devices; ++device) {
      UseRank(device);
      w_.emplace_back(columns * shape.model * 2);
      RandomFill<<<kGrid, kBlock>>>(reinterpret_cast<T*>(w_.back().get()), columns * shape.model,
                                    99, 1.0f / std::sqrt(static_cast<float>(shape.model)));
      bias_.emplace_back(std::max<int64_t>(columns, shape.model) * 2);
      RandomFill<<<kGrid, kBlock>>>(reinterpret_cast<T*>(bias_.back().get()),
                                    std::max<int64_t>(columns, shape.model), 98, 1.0f);
    }
    UseRank(0);
    CK(cudaMemset(link_.get(), 0, 8 * kMaxRanks));
  }

  void Fill(FusedCall& call, int rank, Operator op) const {
    call.info = heaps_.Info(rank, op, 0x1234, deadline_ns);
    call.exchange = ex_;
    call.batch = shape_.batch;
    call.type = entry_.type;
    call.w_transposed = entry_.transposed;
    const size_t device = static_cast<size_t>(rank % g_devices);
    call.w = w_[device].get();
    call.bias = shape_.bias ? bias_[device].get() : nullptr;
    call.hooks.link = reinterpret_cast<unsigned long long*>(link_.get()) + rank;
  }
  const T* w() const { return reinterpret_cast<const T*>(w_[0].get()); }
  const T* bias() const {
    return shape_.bias ? reinterpret_cast<const T*>(bias_[0].get()) : nullptr;
  }
  Heaps& heaps() { return heaps_; }
  const Shape& shape() const { return shape_; }
  const KernelEntry<Call>& entry() const { return entry_; }
  bool in_place() const {
    return MakeGeometry(ex_, 0, shape_.batch).TilesFollowRuns(entry_.tile_rows);
  }

  void PoisonOutputs(cudaStream_t stream = nullptr) const {
    for (size_t r = 0; r < outputs_.size(); ++r) {
      UseRank(static_cast<int>(r));
      for (const Buffer& b : outputs_[r]) b.Poison(stream);
    }
    UseRank(0);
  }
  void SaveReference() {
    reference_.clear();
    for (const auto& rank : outputs_) {
      reference_.emplace_back();
      for (const Buffer& b : rank) {
        reference_.back().emplace_back(b.bytes());
        CK(cudaMemcpyAsync(reference_.back().back().get(), b.get(), static_cast<size_t>(b.bytes()),
                           cudaMemcpyDeviceToDevice));
      }
    }
  }
  // Adds to the count on the device: read it with TakeBad.
  void CompareReference(float scale, cudaStream_t stream = nullptr, int only_rank = -1) const {
    for (size_t r = 0; r < outputs_.size(); ++r) {
      if (only_rank >= 0 && static_cast<int>(r) != only_rank) continue;
      for (size_t i = 0; i < outputs_[r].size(); ++i) {
        CompareExact<<<256, kBlock, 0, stream>>>(reinterpret_cast<const T*>(outputs_[r][i].get()),
                                                 reinterpret_cast<const T*>(reference_[r][i].get()),
                                                 scale, outputs_[r][i].bytes() / 2,
                                                 reinterpret_cast<unsigned long long*>(bad_.get()));
      }
    }
  }
  unsigned long long TakeBad() const {
    unsigned long long bad;
    CK(cudaMemcpy(&bad, bad_.get(), 8, cudaMemcpyDeviceToHost));
    CK(cudaMemset(bad_.get(), 0, 8));
    return bad;
  }
  // Elements of all outputs of a rank that are NaN, as a share.
  double NanShare(int rank) const {
    int64_t total = 0, nan = 0;
    for (const Buffer& b : outputs_[static_cast<size_t>(rank)]) {
      std::vector<uint16_t> host(static_cast<size_t>(b.bytes() / 2));
      CK(cudaMemcpy(host.data(), b.get(), host.size() * 2, cudaMemcpyDeviceToHost));
      for (uint16_t v : host) {
        ++total;
        nan += v == 0xffff;
      }
    }
    return static_cast<double>(nan) / static_cast<double>(total);
  }

  uint64_t deadline_ns = 5000000000ull;

 protected:
  static constexpr int kElement = 2;
  Difference Norm(const void* got, const float* want, int64_t n) const {
    CK(cudaMemset(sums_.get(), 0, 16));
    CK(cudaMemset(bad_.get(), 0, 8));
    CompareNorm<<<256, kBlock>>>(static_cast<const T*>(got), want, n,
                                 reinterpret_cast<double*>(sums_.get()),
                                 reinterpret_cast<unsigned long long*>(bad_.get()));
    double sums[2];
    CK(cudaMemcpy(sums, sums_.get(), 16, cudaMemcpyDeviceToHost));
    return {std::sqrt(sums[0] / std::max(sums[1], 1e-30)), TakeBad()};
  }
  static void Merge(Difference& all, const Difference& one) {
    all.relative = std::max(all.relative, one.relative);
    all.bad += one.bad;
  }
  T* SlotData(int rank, int64_t offset) const {
    return reinterpret_cast<T*>(heaps_.Slot(rank, 0) + offset);
  }

  Shape shape_;
  KernelEntry<Call> entry_;
  HeadExchange ex_;
  Heaps heaps_;
  std::vector<Buffer> w_, bias_;
  Buffer sums_, bad_, link_;
  std::vector<std::vector<Buffer>> outputs_, reference_;
};

template <class T>
class A2aGemmFixture : public FixtureBase<A2aGemmCall, T> {
  using Base = FixtureBase<A2aGemmCall, T>;

 public:
  static constexpr bool kPush = true;
  A2aGemmFixture(const Shape& shape, const KernelEntry<A2aGemmCall>& entry)
      : Base(shape, entry, SlotBytes(Probe(shape))) {
    for (int set = 0; set < kSets; ++set) {
      parts_.emplace_back();
      for (int r = 0; r < shape.ranks; ++r) {
        UseRank(r);
        parts_.back().emplace_back();
        for (size_t seg = 0; seg < shape.heads.size(); ++seg) {
          const int64_t n = shape.rows() * shape.ranks * this->ex_.segment_columns(seg);
          Buffer b(n * 2);
          RandomFill<<<kGrid, kBlock>>>(reinterpret_cast<T*>(b.get()), n, r * 16 + seg + 1,
                                        kScales[set]);
          parts_.back().back().push_back(std::move(b));
        }
      }
    }
    for (int r = 0; r < shape.ranks; ++r) {
      UseRank(r);
      this->outputs_.emplace_back();
      this->outputs_.back().emplace_back(shape.rows() * shape.model * 2);
      if (shape.gathered) {
        this->outputs_.back().emplace_back(shape.rows() * this->ex_.fused_columns() * 2);
      }
    }
    SyncDevices();
  }
  static A2aGemmCall Probe(const Shape& shape) {
    A2aGemmCall call;
    call.exchange = shape.Exchange();
    call.batch = shape.batch;
    return call;
  }
  std::vector<A2aGemmCall> Calls(int set, bool communicate = true) const {
    std::vector<A2aGemmCall> calls(static_cast<size_t>(this->shape_.ranks));
    for (int r = 0; r < this->shape_.ranks; ++r) {
      A2aGemmCall& call = calls[static_cast<size_t>(r)];
      this->Fill(call, r, Operator::kA2aGemm);
      call.communicate = communicate;
      call.width = this->shape_.model;
      for (size_t seg = 0; seg < this->shape_.heads.size(); ++seg) {
        call.parts[seg] = parts_[set][r][seg].get();
      }
      call.y = this->outputs_[r][0].get();
      if (this->shape_.gathered) call.gathered = this->outputs_[r][1].get();
    }
    return calls;
  }
  // Against fp32.
  Difference CheckNorm() const {
    const int64_t rows = this->shape_.rows(), columns = this->ex_.fused_columns();
    Buffer g(rows * columns * 4), y(rows * this->shape_.model * 4);
    Difference all;
    for (int r = 0; r < this->shape_.ranks; ++r) {
      NaiveGather<T>
          <<<kGrid, kBlock>>>(this->ex_, rows, r, Parts(), reinterpret_cast<float*>(g.get()));
      const dim3 grid((this->shape_.model + 15) / 16, (rows + 15) / 16);
      NaiveGemm<T><<<grid, dim3(16, 16)>>>(
          reinterpret_cast<float*>(g.get()), this->w(), this->entry_.transposed, this->bias(),
          static_cast<int>(rows), this->shape_.model, static_cast<int>(columns),
          reinterpret_cast<float*>(y.get()));
      this->Merge(all, this->Norm(this->outputs_[r][0].get(), reinterpret_cast<float*>(y.get()),
                                  rows * this->shape_.model));
      if (this->shape_.gathered) {
        Difference d = this->Norm(this->outputs_[r][1].get(), reinterpret_cast<float*>(g.get()),
                                  rows * columns);
        if (d.relative != 0) ++d.bad;  // a copy: exact
        this->Merge(all, d);
      }
    }
    return all;
  }
  // After a launch with communicate = false on what this put into slot 0: the unfused result.
  void PrepareUnfused() const {
    for (int r = 0; r < this->shape_.ranks; ++r) {
      const Geometry g = MakeGeometry(this->ex_, r, this->shape_.batch);
      for (int seg = 0; seg < g.num_segments; ++seg) {
        for (int source = 0; source < this->shape_.ranks; ++source) {
          FillSourceBlock<T><<<64, kBlock>>>(
              this->ex_, g.rows, r, seg, reinterpret_cast<const T*>(parts_[0][source][seg].get()),
              this->SlotData(r, SourceBlockOffset(g, seg, source, 2)));
        }
      }
    }
  }
  void CompleteUnfused() const {
    if (!this->shape_.gathered) return;
    // The unfused kernel makes no gathered operand; CheckNorm has looked at it.
    for (int r = 0; r < this->shape_.ranks; ++r) this->outputs_[r][1].Poison();
  }
  PartTable Parts() const {
    PartTable table{};
    for (int r = 0; r < this->shape_.ranks; ++r) {
      for (size_t seg = 0; seg < this->shape_.heads.size(); ++seg) {
        table.part[r][seg] = parts_[0][r][seg].get();
      }
    }
    return table;
  }

 private:
  std::vector<std::vector<std::vector<Buffer>>> parts_;
};

template <class T>
class GemmA2aFixture : public FixtureBase<GemmA2aCall, T> {
  using Base = FixtureBase<GemmA2aCall, T>;

 public:
  static constexpr bool kPush = false;
  GemmA2aFixture(const Shape& shape, const KernelEntry<GemmA2aCall>& entry)
      : Base(shape, entry, SlotBytes(Probe(shape))) {
    for (int set = 0; set < kSets; ++set) {
      x_.emplace_back();
      for (int r = 0; r < shape.ranks; ++r) {
        UseRank(r);
        const int64_t n = shape.rows() * shape.model;
        Buffer b(n * 2);
        RandomFill<<<kGrid, kBlock>>>(reinterpret_cast<T*>(b.get()), n, r + 1, kScales[set]);
        x_.back().push_back(std::move(b));
      }
    }
    for (int r = 0; r < shape.ranks; ++r) {
      UseRank(r);
      this->outputs_.emplace_back();
      for (size_t seg = 0; seg < shape.heads.size(); ++seg) {
        this->outputs_.back().emplace_back(shape.rows() * shape.ranks *
                                           this->ex_.segment_columns(seg) * 2);
      }
    }
    SyncDevices();
  }
  static GemmA2aCall Probe(const Shape& shape) {
    GemmA2aCall call;
    call.exchange = shape.Exchange();
    call.batch = shape.batch;
    return call;
  }
  std::vector<GemmA2aCall> Calls(int set, bool communicate = true) const {
    std::vector<GemmA2aCall> calls(static_cast<size_t>(this->shape_.ranks));
    for (int r = 0; r < this->shape_.ranks; ++r) {
      GemmA2aCall& call = calls[static_cast<size_t>(r)];
      this->Fill(call, r, Operator::kGemmA2a);
      call.communicate = communicate;
      call.depth = this->shape_.model;
      call.x = x_[set][r].get();
      for (size_t seg = 0; seg < this->shape_.heads.size(); ++seg) {
        call.out[seg] = this->outputs_[r][seg].get();
      }
    }
    return calls;
  }
  Difference CheckNorm() const {
    const int64_t rows = this->shape_.rows(), columns = this->ex_.fused_columns();
    Buffer x(rows * this->shape_.model * 4);
    std::vector<Buffer> y;
    ResultTable results{};
    for (int r = 0; r < this->shape_.ranks; ++r) {
      y.emplace_back(rows * columns * 4);
      results.y[r] = reinterpret_cast<const float*>(y.back().get());
      Widen<T><<<kGrid, kBlock>>>(reinterpret_cast<const T*>(x_[0][r].get()),
                                  rows * this->shape_.model, reinterpret_cast<float*>(x.get()));
      const dim3 grid((columns + 15) / 16, (rows + 15) / 16);
      NaiveGemm<T><<<grid, dim3(16, 16)>>>(
          reinterpret_cast<float*>(x.get()), this->w(), this->entry_.transposed, this->bias(),
          static_cast<int>(rows), static_cast<int>(columns), this->shape_.model,
          reinterpret_cast<float*>(y.back().get()));
    }
    Difference all;
    for (int q = 0; q < this->shape_.ranks; ++q) {
      for (size_t seg = 0; seg < this->shape_.heads.size(); ++seg) {
        const int64_t n = this->outputs_[q][seg].bytes() / 2;
        Buffer want(n * 4);
        NaiveScatter<<<kGrid, kBlock>>>(this->ex_, rows, q, static_cast<int>(seg), results,
                                        reinterpret_cast<float*>(want.get()));
        this->Merge(
            all, this->Norm(this->outputs_[q][seg].get(), reinterpret_cast<float*>(want.get()), n));
      }
    }
    return all;
  }
  void PrepareUnfused() const {}
  // Brings the blocks that the unfused GEMM left in slot 0 to the outputs.
  void CompleteUnfused() const {
    for (int r = 0; r < this->shape_.ranks; ++r) {
      const Geometry g = MakeGeometry(this->ex_, r, this->shape_.batch);
      for (int seg = 0; seg < g.num_segments; ++seg) {
        for (int dest = 0; dest < this->shape_.ranks; ++dest) {
          if (dest == r && !PullOrder::OwnInSlot(g, seg, this->in_place())) continue;
          ReadMadeBlock<T>
              <<<64, kBlock>>>(this->ex_, g.rows, r, seg,
                               this->SlotData(r, MadeBlockOffset(g, seg, g.block(seg, dest), 2)),
                               reinterpret_cast<T*>(this->outputs_[dest][seg].get()));
        }
      }
    }
  }

 private:
  std::vector<std::vector<Buffer>> x_;
};

}  // namespace jax_ulysses::testing

#endif  // JAX_ULYSSES_TESTS_GPU_FIXTURE_CUH_
