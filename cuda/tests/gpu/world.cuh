// SPDX-License-Identifier: Apache-2.0
// Rig B: all ranks of a group on one GPU, as slices of one cooperative launch.
#ifndef JAX_ULYSSES_TESTS_GPU_WORLD_CUH_
#define JAX_ULYSSES_TESTS_GPU_WORLD_CUH_

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "device_util.cuh"
#include "far_memory.cuh"
#include "jax_ulysses/comm/host_memory.h"
#include "jax_ulysses/heuristics.h"
#include "kernels/entry.h"

namespace jax_ulysses::testing {

struct Shape {
  int ranks = 4;
  int batch = 1;
  int tokens = 256;        // T
  std::vector<int> heads;  // per segment
  int head_dim = 128;
  int model = 512;  // D: depth of gemm_a2a, width of a2a_gemm
  bool zigzag = false;
  bool bias = false;
  bool gathered = false;  // a2a_gemm only
  int slots = 2;          // of a heap
  bool far = false;       // slots across PCIe

  HeadExchange Exchange() const {
    HeadExchange ex;
    ex.num_ranks = ranks;
    ex.head_dim = head_dim;
    ex.token_order = zigzag ? TokenOrder::kZigzag : TokenOrder::kContiguous;
    ex.local_tokens = tokens;
    ex.num_segments = static_cast<int64_t>(heads.size());
    for (size_t i = 0; i < heads.size(); ++i) ex.heads[i] = heads[i];
    return ex;
  }
  int64_t rows() const { return int64_t{batch} * tokens; }
  std::string Text() const {
    std::string text = "P" + std::to_string(ranks) + " B" + std::to_string(batch) + " T" +
                       std::to_string(tokens) + " heads";
    for (int h : heads) text += " " + std::to_string(h);
    return text + " H" + std::to_string(head_dim) + " D" + std::to_string(model) +
           (zigzag ? " zigzag" : "") + (bias ? " bias" : "") + (gathered ? " g" : "");
  }
};

// The heaps of P ranks on this device.
class Heaps {
 public:
  Heaps(int ranks, int64_t slot_bytes) : Heaps(OfRanks(ranks), slot_bytes) {}
  Heaps(const Shape& shape, int64_t slot_bytes) {
    layout_.num_ranks = shape.ranks;
    layout_.num_slots = shape.slots;
    layout_.slot_bytes = slot_bytes;
    // 256 row blocks of 60 column blocks; or a piece for 16 rows, and 64 column blocks for 128.
    layout_.flags_per_source = std::max<int64_t>(1 << 14, shape.rows() / 2);
    control_ = layout_;
    char* base = shape.far ? far_.Allocate(layout_) : nullptr;
    for (int r = 0; r < shape.ranks; ++r) {
      UseRank(r);
      if (!shape.far) heaps_.emplace_back(layout_.heap_bytes());
      peers_.heap[r] = shape.far ? base + r * far_.stride() : heaps_.back().get();
    }
    UseRank(0);
    Reset(0xfffffff0u);  // every test crosses the wrap of the epoch
  }
  void Reset(uint32_t start) {
    std::vector<char> control(static_cast<size_t>(control_.control_bytes()));
    InitControlWords<HostMemory>(control.data(), control_, start);
    for (int64_t r = 0; r < layout_.num_ranks; ++r) {
      CK(cudaMemcpy(peers_.heap[r], control.data(), control.size(), cudaMemcpyHostToDevice));
    }
  }
  void PoisonSlots(cudaStream_t stream) const {
    for (int r = 0; r < static_cast<int>(layout_.num_ranks); ++r) {
      UseRank(r);
      CK(cudaMemsetAsync(Slot(r, 0), 0xff,
                         static_cast<size_t>(layout_.num_slots * layout_.slot_stride()), stream));
    }
    UseRank(0);
  }
  CallInfo Info(int rank, Operator op, uint32_t agreement, uint64_t deadline_ns) const {
    CallInfo info;
    info.peers = peers_;
    info.layout = layout_;
    info.rank = rank;
    info.op = op;
    info.agreement = agreement;
    info.deadline_ns = deadline_ns;
    return info;
  }
  // Raises the abort word of every rank from the host, beside what kernels do. No record is left.
  void RaiseAbort() const {
    cudaStream_t stream;
    uint32_t* word;
    CK(cudaMallocHost(&word, 4));
    *word = 1;
    CK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    for (int64_t r = 0; r < layout_.num_ranks; ++r) {
      CK(cudaMemcpyAsync(peers_.heap[r] + layout_.abort(), word, 4, cudaMemcpyHostToDevice,
                         stream));
    }
    CK(cudaStreamSynchronize(stream));
    CK(cudaStreamDestroy(stream));
    CK(cudaFreeHost(word));
  }
  char* Slot(int rank, int slot) const { return peers_.heap[rank] + layout_.slot(slot); }
  uint32_t Word(int rank, int64_t offset) const {
    uint32_t word;
    CK(cudaMemcpy(&word, peers_.heap[rank] + offset, 4, cudaMemcpyDeviceToHost));
    return word;
  }
  const HeapLayout& layout() const { return layout_; }

 private:
  static Shape OfRanks(int ranks) {
    Shape shape;
    shape.ranks = ranks;
    return shape;
  }

  HeapLayout layout_;
  HeapLayout control_;  // the same control words, as many counters of row blocks as there are
  PeerTable peers_;
  FarMemory far_;
  std::vector<Buffer> heaps_;
};

// Parameters of all ranks for one launch, in device memory.
template <class Call>
class WorldLaunch {
 public:
  WorldLaunch(const KernelEntry<Call>& entry, const std::vector<Call>& calls, LaunchPlan plan)
      : entry_(entry), ranks_(static_cast<int>(calls.size())), plan_(plan) {
    const size_t stride = static_cast<size_t>(entry.params_bytes);
    void* host = nullptr;
    if (posix_memalign(&host, 1024, stride * calls.size()) != 0) std::abort();
    for (size_t r = 0; r < calls.size(); ++r) {
      entry.build(calls[r], plan, static_cast<char*>(host) + r * stride);
    }
    params_ = Buffer(static_cast<int64_t>(stride * calls.size()));
    CK(cudaMemcpy(params_.get(), host, stride * calls.size(), cudaMemcpyHostToDevice));
    std::free(host);
    CK(cudaFuncSetAttribute(entry.world_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                            entry.shared_bytes));
  }
  void Run(cudaStream_t stream) const {
    const char* params = params_.get();
    int32_t ctas = plan_.ctas;
    void* args[] = {&params, &ctas};
    CK(cudaLaunchCooperativeKernel(entry_.world_kernel, dim3(ranks_ * plan_.ctas),
                                   dim3(entry_.threads), args,
                                   static_cast<size_t>(entry_.shared_bytes), stream));
  }

 private:
  KernelEntry<Call> entry_;
  int ranks_;
  LaunchPlan plan_;
  Buffer params_;
};

// Every rank is a launch of its own: parameters by value.
template <class Call>
class RankLaunches {
 public:
  RankLaunches(const KernelEntry<Call>& entry, const std::vector<Call>& calls, LaunchPlan plan)
      : entry_(entry), plan_(plan) {
    for (size_t r = 0; r < calls.size(); ++r) {
      UseRank(static_cast<int>(r));
      CK(cudaFuncSetAttribute(entry.rank_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              entry.shared_bytes));
      void* params = nullptr;
      if (posix_memalign(&params, 1024, static_cast<size_t>(entry.params_bytes)) != 0) {
        std::abort();
      }
      entry.build(calls[r], plan, params);
      params_.emplace_back(params, std::free);
    }
    UseRank(0);
  }
  void Run(int rank, cudaStream_t stream) const {
    void* args[] = {params_[static_cast<size_t>(rank)].get()};
    CK(cudaLaunchCooperativeKernel(entry_.rank_kernel, dim3(plan_.ctas), dim3(entry_.threads), args,
                                   static_cast<size_t>(entry_.shared_bytes), stream));
  }

 private:
  KernelEntry<Call> entry_;
  LaunchPlan plan_;
  std::vector<std::unique_ptr<void, void (*)(void*)>> params_;
};

inline int NumSms() {
  int sms = 0;
  CK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
  return sms;
}

// Of a rank, at most; 0: its share of the SMs. With few a CTA makes several tiles of a small shape.
inline int g_most_ctas = 0;

inline LaunchPlan PlanFor(int ranks, bool push) {
  LaunchPlan plan;
  plan.ctas = NumSms() * g_devices / ranks / 2 * 2;  // whole clusters
  if (g_most_ctas > 0) plan.ctas = std::min(plan.ctas, g_most_ctas);
  plan.comm_ctas = push ? std::min(plan.ctas, kPushingCtas) : plan.ctas;
  return plan;
}

}  // namespace jax_ulysses::testing

#endif  // JAX_ULYSSES_TESTS_GPU_WORLD_CUH_
