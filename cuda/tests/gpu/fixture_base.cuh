// SPDX-License-Identifier: Apache-2.0
// What the fixtures of all operators have in common: heaps, weights, comparisons.
#ifndef JAX_ULYSSES_TESTS_GPU_FIXTURE_BASE_CUH_
#define JAX_ULYSSES_TESTS_GPU_FIXTURE_BASE_CUH_

#include <cmath>

#include "world.cuh"

namespace jax_ulysses::testing {

// Input set k is set 0 times kScales[k]: powers of two with a sign, so results scale exactly, and
// no two of three consecutive calls agree: stale data of either slot shows.
inline constexpr int kSets = 3;
inline constexpr float kScales[kSets] = {1.0f, -1.0f, 2.0f};

inline constexpr int kGrid = 1024, kBlock = 256;

struct Difference {
  double relative = 0;         // L2
  unsigned long long bad = 0;  // NaN, or not exactly equal
};

// A fixture of an operator derives from it: Calls(set), CheckNorm(), inputs and outputs_.
template <class Call_, class T_>
class FixtureBase {
 public:
  using Call = Call_;
  using T = T_;

  FixtureBase(const Shape& shape, const KernelEntry<Call>& entry, int64_t slot_bytes)
      : shape_(shape),
        entry_(entry),
        ex_(shape.Exchange()),
        heaps_(shape, slot_bytes),
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
    call.hooks.link = Link(rank);
  }
  // Where the throttled link of `rank` keeps its account.
  unsigned long long* Link(int rank) const {
    return reinterpret_cast<unsigned long long*>(link_.get()) + rank;
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

}  // namespace jax_ulysses::testing

#endif  // JAX_ULYSSES_TESTS_GPU_FIXTURE_BASE_CUH_
