// SPDX-License-Identifier: Apache-2.0
// The exchange and psum behind the interface of the fused operators' fixtures, so that the same
// stress tests, faults and negative controls run on them. Values are checked by exchange_test.
#ifndef JAX_ULYSSES_TESTS_GPU_EXCHANGE_FIXTURE_CUH_
#define JAX_ULYSSES_TESTS_GPU_EXCHANGE_FIXTURE_CUH_

#include "fixture_base.cuh"

namespace jax_ulysses::testing {

// A gather of one segment; its replicas, if it has some, are summed.
class ExchangeFixture : public FixtureBase<ExchangeCall, __nv_bfloat16> {
  using Base = FixtureBase<ExchangeCall, __nv_bfloat16>;

 public:
  static constexpr bool kPush = false;
  ExchangeFixture(const Shape& shape, const KernelEntry<ExchangeCall>& entry)
      : Base(shape, entry, SlotBytes(Probe(shape))) {
    const int64_t n = shape.rows() * shape.ranks * ex_.segment_columns(0);
    for (int set = 0; set < kSets; ++set) {
      in_.emplace_back();
      for (int r = 0; r < shape.ranks; ++r) {
        in_.back().emplace_back(n * 2);
        RandomFill<<<kGrid, kBlock>>>(reinterpret_cast<T*>(in_.back().back().get()), n, r + 1,
                                      kScales[set]);
      }
    }
    for (int r = 0; r < shape.ranks; ++r) {
      outputs_.emplace_back();
      outputs_.back().emplace_back(shape.rows() * ex_.fused_columns() * 2);
    }
    SyncDevices();
  }
  static ExchangeCall Probe(const Shape& shape) {
    ExchangeCall call;
    call.exchange = shape.Exchange();
    call.batch = shape.batch;
    call.element_bytes = 2;
    return call;
  }
  std::vector<ExchangeCall> Calls(int set) const {
    std::vector<ExchangeCall> calls(static_cast<size_t>(shape_.ranks), Probe(shape_));
    for (int r = 0; r < shape_.ranks; ++r) {
      ExchangeCall& call = calls[static_cast<size_t>(r)];
      call.info = heaps_.Info(r, Operator::kGather, 0x1234, deadline_ns);
      call.hooks.link = Link(r);
      call.gather = true;
      call.sum_replicas = SumType::kBf16;
      call.in[0] = in_[set][r].get();
      call.out[0] = outputs_[r][0].get();
    }
    return calls;
  }
  // After a gather without sums of set 0: the way back, into the inputs of set 1.
  std::vector<ExchangeCall> ScatterBack() const {
    std::vector<ExchangeCall> calls = Calls(0);
    for (int r = 0; r < shape_.ranks; ++r) {
      ExchangeCall& call = calls[static_cast<size_t>(r)];
      call.info.op = Operator::kScatter;
      call.gather = false;
      call.sum_replicas = SumType::kNone;
      call.in[0] = outputs_[r][0].get();
      call.out[0] = in_[1][r].get();
      in_[1][r].Poison();
    }
    return calls;
  }
  unsigned long long WrongBack() const {
    for (int r = 0; r < shape_.ranks; ++r) {
      CompareExact<<<kGrid, kBlock>>>(
          reinterpret_cast<const T*>(in_[1][r].get()), reinterpret_cast<const T*>(in_[0][r].get()),
          1.0f, in_[0][r].bytes() / 2, reinterpret_cast<unsigned long long*>(bad_.get()));
    }
    return TakeBad();
  }
  Difference CheckNorm() const {
    PartTable parts{};
    for (int r = 0; r < shape_.ranks; ++r) parts.part[r][0] = in_[0][r].get();
    const int64_t n = shape_.rows() * ex_.fused_columns();
    Buffer want(n * 4);
    Difference all;
    for (int r = 0; r < shape_.ranks; ++r) {
      NaiveGather<T><<<kGrid, kBlock>>>(ex_, shape_.rows(), r, parts, true,
                                        reinterpret_cast<float*>(want.get()));
      Merge(all, Norm(outputs_[r][0].get(), reinterpret_cast<float*>(want.get()), n));
    }
    return all;
  }

 private:
  std::vector<std::vector<Buffer>> in_;
};

template <class T>
__global__ void NaiveSum(PartTable parts, int ranks, int64_t n, float* sum) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < n;
       i += int64_t{gridDim.x} * blockDim.x) {
    float total = 0;
    for (int r = 0; r < ranks; ++r) {
      total += static_cast<float>(static_cast<const T*>(parts.part[r][0])[i]);
    }
    sum[i] = total;
  }
}

// A vector of `rows` * `model` elements.
class PsumFixture : public FixtureBase<PsumCall, __nv_bfloat16> {
  using Base = FixtureBase<PsumCall, __nv_bfloat16>;

 public:
  static constexpr bool kPush = false;
  PsumFixture(const Shape& shape, const KernelEntry<PsumCall>& entry)
      : Base(shape, entry, SlotBytes(Probe(shape))), count_(Probe(shape).count) {
    for (int set = 0; set < kSets; ++set) {
      in_.emplace_back();
      for (int r = 0; r < shape.ranks; ++r) {
        in_.back().emplace_back(count_ * 2);
        RandomFill<<<kGrid, kBlock>>>(reinterpret_cast<T*>(in_.back().back().get()), count_, r + 1,
                                      kScales[set]);
      }
    }
    for (int r = 0; r < shape.ranks; ++r) {
      outputs_.emplace_back();
      outputs_.back().emplace_back(count_ * 2);
    }
    SyncDevices();
  }
  static PsumCall Probe(const Shape& shape) {
    PsumCall call;
    call.info.layout.num_ranks = shape.ranks;
    call.type = SumType::kBf16;
    call.count = shape.rows() * shape.model;
    return call;
  }
  std::vector<PsumCall> Calls(int set) const {
    std::vector<PsumCall> calls(static_cast<size_t>(shape_.ranks), Probe(shape_));
    for (int r = 0; r < shape_.ranks; ++r) {
      PsumCall& call = calls[static_cast<size_t>(r)];
      call.info = heaps_.Info(r, Operator::kPsum, 0x1234, deadline_ns);
      call.hooks.link = Link(r);
      call.in = in_[set][r].get();
      call.out = outputs_[r][0].get();
    }
    return calls;
  }
  Difference CheckNorm() const {
    PartTable parts{};
    for (int r = 0; r < shape_.ranks; ++r) parts.part[r][0] = in_[0][r].get();
    Buffer want(count_ * 4);
    NaiveSum<T>
        <<<kGrid, kBlock>>>(parts, shape_.ranks, count_, reinterpret_cast<float*>(want.get()));
    Difference all;
    for (int r = 0; r < shape_.ranks; ++r) {
      Merge(all, Norm(outputs_[r][0].get(), reinterpret_cast<float*>(want.get()), count_));
    }
    return all;
  }

 private:
  int64_t count_;
  std::vector<std::vector<Buffer>> in_;
};

}  // namespace jax_ulysses::testing

#endif  // JAX_ULYSSES_TESTS_GPU_EXCHANGE_FIXTURE_CUH_
