// SPDX-License-Identifier: Apache-2.0
// Chooses a kernel for a call, builds its parameters (or finds them: building encodes tensor maps)
// and launches it.
#include "jax_ulysses/launch.h"

#include <cuda_runtime_api.h>

#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <type_traits>
#include <unordered_map>
#include <vector>

#include "jax_ulysses/heuristics.h"
#include "kernels/checks.h"
#include "kernels/entry.h"
#include "kernels/registry.h"

namespace jax_ulysses {
namespace {

Status CudaError(const char* what, cudaError_t error) {
  return {Status::Code::kCuda, std::string(what) + ": " + cudaGetErrorString(error)};
}

constexpr int kMaxDevices = 64;
constexpr int32_t kMaxParamsBytes = 16 * 1024;

// What is known of a device. Kernels are loaded once for each.
struct Device {
  int index = 0;
  int32_t sms = 0;
};

template <class Entry>
Status LoadKernel(const Entry& entry) {
  cudaError_t error = cudaFuncSetAttribute(
      entry.rank_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, entry.shared_bytes);
  if (error != cudaSuccess) return CudaError("cudaFuncSetAttribute", error);
  int blocks = 0;
  error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, entry.rank_kernel, entry.threads,
                                                        static_cast<size_t>(entry.shared_bytes));
  if (error != cudaSuccess) {
    return CudaError("cudaOccupancyMaxActiveBlocksPerMultiprocessor", error);
  }
  if (blocks < 1) {
    return {Status::Code::kUnsupported, "a kernel does not fit on a multiprocessor of this device"};
  }
  return {};
}

// CTAs of a kernel that are resident at once if it has the device to itself: whole clusters, each
// within a part of the device that may have an odd number of multiprocessors left. Asked once for
// each kernel and device.
template <class Entry>
Status ResidentCtas(const Entry& entry, const Device& device, int32_t& ctas) {
  static std::mutex mutex;
  // Never destroyed, as the cache below.
  static auto* const known = new std::unordered_map<const void*, int32_t>[kMaxDevices];
  std::lock_guard<std::mutex> lock(mutex);
  const auto found = known[device.index].find(entry.rank_kernel);
  if (found != known[device.index].end()) {
    ctas = found->second;
    return {};
  }
  ctas = device.sms;
  if (entry.cluster > 1) {
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = static_cast<unsigned>(entry.cluster);
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(device.sms / entry.cluster * entry.cluster));
    config.blockDim = dim3(static_cast<unsigned>(entry.threads));
    config.dynamicSmemBytes = static_cast<size_t>(entry.shared_bytes);
    config.attrs = &attribute;
    config.numAttrs = 1;
    int clusters = 0;
    const cudaError_t error = cudaOccupancyMaxActiveClusters(&clusters, entry.rank_kernel, &config);
    if (error != cudaSuccess) return CudaError("cudaOccupancyMaxActiveClusters", error);
    ctas = clusters * entry.cluster < device.sms ? clusters * entry.cluster : device.sms;
  }
  known[device.index][entry.rank_kernel] = ctas;
  return {};
}

// Everything that is asked of the driver but once: before a first call, because the driver may make
// a device wait with such a question while a kernel on another one waits for this device.
Status LoadAll(const Device& device) {
  Status status;
  auto load = [&](const auto& registry) {
    for (const auto& entry : registry) {
      int32_t ctas = 0;
      if (status.ok()) status = LoadKernel(entry);
      if (status.ok()) status = ResidentCtas(entry, device, ctas);
    }
  };
  load(A2aGemmRegistry());
  load(GemmA2aRegistry());
  if (status.ok()) status = LoadKernel(ExchangeEntry());
  if (status.ok()) status = LoadKernel(PsumEntry());
  return status;
}

Status CurrentDevice(Device& device) {
  cudaError_t error = cudaGetDevice(&device.index);
  if (error != cudaSuccess) return CudaError("cudaGetDevice", error);
  if (device.index >= kMaxDevices) return {Status::Code::kUnsupported, "too many devices"};
  static std::mutex mutex;
  static int32_t sms[kMaxDevices] = {};
  std::lock_guard<std::mutex> lock(mutex);
  if (sms[device.index] == 0) {
    int count = 0, major = 0;
    error = cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device.index);
    if (error == cudaSuccess) {
      error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device.index);
    }
    if (error != cudaSuccess) return CudaError("cudaDeviceGetAttribute", error);
    if (major != 9) {
      return {Status::Code::kUnsupported, "the CUDA kernels need compute capability 9.0 (Hopper)"};
    }
    device.sms = count;
    const Status status = LoadAll(device);
    if (!status.ok()) return status;
    sms[device.index] = count;
  }
  device.sms = sms[device.index];
  return {};
}

// Parameters of recent calls, by everything they are made from except the agreement hash.
class ParamsCache {
 public:
  using Params = std::shared_ptr<const void>;
  static ParamsCache& Get() {
    // Never destroyed: XLA's threads may outlive static destructors.
    static ParamsCache* cache = new ParamsCache;
    return *cache;
  }
  Params Find(const std::string& key) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = items_.find(key);
    return found == items_.end() ? nullptr : found->second;
  }
  void Add(const std::string& key, const Params& params) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!items_.emplace(key, params).second) return;
    order_.push_back(key);
    if (order_.size() <= kItems) return;
    items_.erase(order_.front());
    order_.pop_front();
  }

 private:
  // A training step has a few calls a layer and device, each with its own addresses.
  static constexpr size_t kItems = 4096;
  std::mutex mutex_;
  std::unordered_map<std::string, Params> items_;
  std::deque<std::string> order_;  // oldest first
};

class Key {
 public:
  template <class T>
  Key& Add(const T& value) {
    static_assert(std::is_trivially_copyable<T>::value && !std::is_class<T>::value, "no padding");
    text_.append(reinterpret_cast<const char*>(&value), sizeof(T));
    return *this;
  }
  Key& Add(const CallInfo& info) {
    for (int64_t r = 0; r < info.layout.num_ranks; ++r) Add(info.peers.heap[r]);
    return Add(info.layout.num_ranks)
        .Add(info.layout.num_slots)
        .Add(info.layout.slot_bytes)
        .Add(info.layout.flags_per_source)
        .Add(info.layout.blocks_per_source)
        .Add(info.rank)
        .Add(static_cast<const void*>(info.program_rank))
        .Add(info.op)
        .Add(info.deadline_ns);
  }
  Key& Add(const HeadExchange& ex) {
    Add(ex.num_ranks).Add(ex.head_dim).Add(ex.token_order).Add(ex.local_tokens);
    for (int64_t i = 0; i < ex.num_segments; ++i) Add(ex.heads[i]);
    return *this;
  }
  template <class T>
  Key& Add(T* const (&pointers)[kMaxFusedSegments]) {
    for (T* p : pointers) Add(static_cast<const void*>(p));
    return *this;
  }
  Key& AddFused(const FusedCall& call) {
    return Add(call.info)
        .Add(call.exchange)
        .Add(call.batch)
        .Add(call.w)
        .Add(call.bias)
        .Add(call.mailbox)
        .Add(call.communicate)
        .Add(call.compute);
  }
  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

Key KeyOf(const GemmA2aCall& call) {
  return Key().AddFused(call).Add(call.x).Add(call.depth).Add(call.out);
}
Key KeyOf(const A2aGemmCall& call) {
  return Key().AddFused(call).Add(call.parts).Add(call.width).Add(call.y).Add(call.gathered);
}
Key KeyOf(const ExchangeCall& call) {
  return Key()
      .Add(call.info)
      .Add(call.exchange)
      .Add(call.batch)
      .Add(call.element_bytes)
      .Add(call.gather)
      .Add(call.sum_replicas)
      .Add(call.in)
      .Add(call.out)
      .Add(call.mailbox);
}
Key KeyOf(const PsumCall& call) {
  return Key()
      .Add(call.info)
      .Add(call.type)
      .Add(call.count)
      .Add(call.in)
      .Add(call.out)
      .Add(call.mailbox);
}

template <class Call>
Status Enqueue(const KernelEntry<Call>& entry, const Call& call, const LaunchPlan& plan,
               CUstream_st* stream) {
  const std::string key =
      KeyOf(call).Add(entry.rank_kernel).Add(plan.ctas).Add(plan.comm_ctas).text();
  if (entry.params_bytes > kMaxParamsBytes) {
    return {Status::Code::kUnsupported, "kernel parameters are too large"};
  }
  ParamsCache::Params params = ParamsCache::Get().Find(key);
  if (params == nullptr) {
    void* memory = nullptr;
    if (posix_memalign(&memory, 1024, static_cast<size_t>(entry.params_bytes)) != 0) {
      return {Status::Code::kCuda, "out of host memory"};
    }
    params = ParamsCache::Params(memory, [](const void* p) { std::free(const_cast<void*>(p)); });
    entry.build(call, plan, memory);
    ParamsCache::Get().Add(key, params);
  }
  cudaLaunchAttribute attribute{};
  // Refused unless all CTAs fit on the device at once: they wait for each other.
  attribute.id = cudaLaunchAttributeCooperative;
  attribute.val.cooperative = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(plan.ctas));
  config.blockDim = dim3(static_cast<unsigned>(entry.threads));
  config.dynamicSmemBytes = static_cast<size_t>(entry.shared_bytes);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  alignas(64) char copy[kMaxParamsBytes];
  std::memcpy(copy, params.get(), static_cast<size_t>(entry.params_bytes));
  entry.set_agreement(copy, call.info.agreement);
  void* args[] = {copy};
  const cudaError_t error = cudaLaunchKernelExC(&config, entry.rank_kernel, args);
  if (error != cudaSuccess) return CudaError("cudaLaunchKernelExC", error);
  return {};
}

int32_t CtasFor(int32_t sm_budget, int32_t sms) {
  return sm_budget > 0 && sm_budget < sms ? sm_budget : sms;
}

// The kernel for a call, or why there is none. `sms` is the CTAs that it may use.
template <class Call>
Status Select(const Call& call, const std::vector<KernelEntry<Call>>& registry, int32_t ctas,
              KernelEntry<Call>& entry) {
  auto find = [&](TilePolicy policy) -> const KernelEntry<Call>* {
    for (const auto& e : registry) {
      if (e.tile == policy && e.type == call.type && e.transposed == call.w_transposed) return &e;
    }
    return nullptr;
  };
  TilePolicy policy = call.tile;
  if (policy == TilePolicy::kAuto) {
    policy = ChooseTile(ProblemOf(call), ctas, [&](TilePolicy p) { return find(p) != nullptr; });
    if (policy == TilePolicy::kAuto && ctas < 2) {
      return {Status::Code::kUnsupported,
              "tiles are made by clusters of 2 CTAs, and sm_budget allows 1"};
    }
  }
  const KernelEntry<Call>* found = find(policy);
  if (found == nullptr) {
    return {Status::Code::kUnsupported, "no kernel is compiled for this type, layout and tile"};
  }
  if (found->cluster > ctas) {
    return {Status::Code::kUnsupported, "this tile is made by clusters of " +
                                            std::to_string(found->cluster) +
                                            " CTAs, the call may use " + std::to_string(ctas)};
  }
  entry = *found;
  return CheckCall(call, entry.tile_rows, entry.tile_columns);
}

template <class Call>
Status CanImplementFused(const Call& call, const std::vector<KernelEntry<Call>>& registry) {
  // The tile may differ from the one that a device with another number of SMs gets; what is
  // checked, except the number of flags, does not depend on it.
  KernelEntry<Call> entry;
  constexpr int32_t kTypicalSms = 132;
  return Select(call, registry, CtasFor(call.sm_budget, kTypicalSms), entry);
}

template <class Call>
Status LaunchFused(const Call& call, const std::vector<KernelEntry<Call>>& registry,
                   CUstream_st* stream) {
  Device device;
  Status status = CurrentDevice(device);
  if (!status.ok()) return status;
  LaunchPlan plan;
  plan.ctas = CtasFor(call.sm_budget, device.sms);
  KernelEntry<Call> entry;
  status = Select(call, registry, plan.ctas, entry);
  if (!status.ok()) return status;
  int32_t resident = 0;
  status = ResidentCtas(entry, device, resident);
  if (!status.ok()) return status;
  plan.ctas = (plan.ctas < resident ? plan.ctas : resident) / entry.cluster * entry.cluster;
  if (plan.ctas == 0) {
    return {Status::Code::kUnsupported, "no cluster of CTAs fits on this device"};
  }
  plan.comm_ctas = call.comm_ctas > 0 ? call.comm_ctas : DefaultCommCtas(call, plan.ctas);
  if (plan.comm_ctas > plan.ctas) plan.comm_ctas = plan.ctas;
  // Flags count tiles, so ranks must agree on the tile as well.
  Call agreed = call;
  agreed.info.agreement = call.info.agreement * 31u + static_cast<uint32_t>(entry.tile);
  return Enqueue(entry, agreed, plan, stream);
}

template <class Call>
Status LaunchExchange(const Call& call, const KernelEntry<Call>& entry, CUstream_st* stream) {
  const Status checked = CheckCall(call);
  if (!checked.ok()) return checked;
  Device device;
  const Status status = CurrentDevice(device);
  if (!status.ok()) return status;
  LaunchPlan plan;
  plan.ctas = plan.comm_ctas = CtasFor(call.sm_budget, device.sms);
  return Enqueue(entry, call, plan, stream);
}

}  // namespace

Status CanImplement(const GemmA2aCall& call) { return CanImplementFused(call, GemmA2aRegistry()); }
Status CanImplement(const A2aGemmCall& call) { return CanImplementFused(call, A2aGemmRegistry()); }
Status CanImplement(const ExchangeCall& call) { return CheckCall(call); }
Status CanImplement(const PsumCall& call) { return CheckCall(call); }

Status Launch(const GemmA2aCall& call, CUstream_st* stream) {
  return LaunchFused(call, GemmA2aRegistry(), stream);
}
Status Launch(const A2aGemmCall& call, CUstream_st* stream) {
  return LaunchFused(call, A2aGemmRegistry(), stream);
}
Status Launch(const ExchangeCall& call, CUstream_st* stream) {
  return LaunchExchange(call, ExchangeEntry(), stream);
}
Status Launch(const PsumCall& call, CUstream_st* stream) {
  return LaunchExchange(call, PsumEntry(), stream);
}

Status Prepare() {
  Device device;
  return CurrentDevice(device);
}

}  // namespace jax_ulysses
