// SPDX-License-Identifier: Apache-2.0
// Data, calls and checks of the two fused operators for a world of ranks.
#ifndef JAX_ULYSSES_TESTS_GPU_FIXTURE_CUH_
#define JAX_ULYSSES_TESTS_GPU_FIXTURE_CUH_

#include "fixture_base.cuh"
#include "jax_ulysses/exchange/pull.h"
#include "jax_ulysses/exchange/push.h"

namespace jax_ulysses::testing {

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
      NaiveGather<T><<<kGrid, kBlock>>>(this->ex_, rows, r, Parts(), false,
                                        reinterpret_cast<float*>(g.get()));
      const dim3 grid((this->shape_.model + 15) / 16, (rows + 15) / 16);
      NaiveGemm<T><<<grid, dim3(16, 16)>>>(
          reinterpret_cast<float*>(g.get()), this->w(), this->entry_.transposed, this->bias(),
          static_cast<int>(rows), this->shape_.model, static_cast<int>(columns),
          reinterpret_cast<float*>(y.get()));
      this->Merge(all, this->Norm(this->outputs_[r][0].get(), reinterpret_cast<float*>(y.get()),
                                  rows * this->shape_.model));
      if (this->shape_.gathered) {
        NaiveGather<T><<<kGrid, kBlock>>>(this->ex_, rows, r, Parts(), true,
                                          reinterpret_cast<float*>(g.get()));
        Difference d = this->Norm(this->outputs_[r][1].get(), reinterpret_cast<float*>(g.get()),
                                  rows * columns);
        if (d.relative != 0) ++d.bad;  // copies and sums: exact
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
    call.depth = shape.model;
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
