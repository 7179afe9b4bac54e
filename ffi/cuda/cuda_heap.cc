// SPDX-License-Identifier: Apache-2.0
#include "cuda/cuda_heap.h"

#include <cstdlib>
#include <cstring>
#include <map>
#include <utility>

#include "cuda/records.h"
#include "cuda/runtime.h"
#include "jax_ulysses/comm/host_memory.h"
#include "jax_ulysses/launch.h"

namespace jax_ulysses::cuda {
namespace {

// cudaMalloc cuts smaller requests out of shared blocks, and an IPC handle covers a whole block.
constexpr int64_t kGranularity = int64_t{2} << 20;

std::string MiB(int64_t bytes) { return std::to_string((bytes + (1 << 20) - 1) >> 20) + " MiB"; }

std::string Environment(const char* name) {
  const char* value = std::getenv(name);
  return std::string(name) + (value == nullptr ? " is not set" : std::string("=") + value);
}

[[noreturn]] void ThrowOutOfMemory(const Member& m, int64_t bytes, const HeapLayout& layout,
                                   cudaError_t error) {
  (void)cudaGetLastError();
  size_t free_bytes = 0, total_bytes = 0;
  (void)cudaMemGetInfo(&free_bytes, &total_bytes);
  throw std::runtime_error(
      "the symmetric heap of " + Name(m) + " needs " + MiB(bytes) + " (" +
      std::to_string(layout.num_slots) + " slots of " + MiB(layout.slot_bytes) + "), " +
      MiB(static_cast<int64_t>(free_bytes)) + " of " + MiB(static_cast<int64_t>(total_bytes)) +
      " are free: " + cudaGetErrorString(error) +
      ". XLA takes a fraction of the memory when it starts (" +
      Environment("XLA_PYTHON_CLIENT_MEM_FRACTION") + ", " +
      Environment("XLA_CLIENT_MEM_FRACTION") +
      ", default 0.75): lower it, or pass a smaller workspace_bytes to jax_ulysses.initialize()");
}

// One rank of this process.
struct LocalRank {
  Member member;
  DeviceMemory heap;
  HostMemoryBlock mailbox;
  FaultMailbox* mailbox_on_device = nullptr;
  std::vector<ImportedMemory> imported;  // heaps of other processes, mapped for this device
  PeerTable peers;
};

class CudaHeap final : public SymmetricHeap {
 public:
  CudaHeap(const HeapLayout& layout, int64_t deadline_ms, uint32_t start_epoch,
           const std::vector<Member>& members)
      : layout_(layout), deadline_ms_(deadline_ms) {
    for (const Member& member : members) ranks_.emplace(member.rank, Allocate(member, start_epoch));
  }

  std::vector<HeapRecord> Export() const override {
    std::vector<HeapRecord> records;
    for (const auto& [rank, local] : ranks_) {
      const DeviceScope scope(local.member.device_ordinal);
      HeapRecord record = MakeRecord(local.member, layout_, deadline_ms_);
      record.address = reinterpret_cast<uint64_t>(local.heap.get());
      // A group inside this process does not need it, and there are systems without IPC.
      if (static_cast<int64_t>(ranks_.size()) < layout_.num_ranks) {
        cudaIpcMemHandle_t handle;
        static_assert(sizeof(handle) == sizeof(record.ipc_handle), "IPC handle");
        Check(cudaIpcGetMemHandle(&handle, local.heap.get()), "cudaIpcGetMemHandle");
        std::memcpy(record.ipc_handle, &handle, sizeof(handle));
      }
      records.push_back(record);
    }
    return records;
  }

  void Connect(const std::vector<HeapRecord>& records) override {
    CheckRecords(records, MakeRecord(ranks_.begin()->second.member, layout_, deadline_ms_));
    for (auto& [rank, local] : ranks_) {
      const DeviceScope scope(local.member.device_ordinal);
      for (const HeapRecord& record : records) {
        local.peers.heap[record.member.rank] = Reach(local, record);
      }
    }
  }

  PeerTable Peers(int rank) const override { return ranks_.at(rank).peers; }

  FaultMailbox* mailbox(int rank) const override { return ranks_.at(rank).mailbox_on_device; }

  Fault PollFault() const override {
    for (const auto& [rank, local] : ranks_) {
      const auto* box = static_cast<const FaultMailbox*>(local.mailbox.get());
      // Edge "mailbox". Releases: the last CTA of the kernel, after the words, at system scope.
      if (__atomic_load_n(&box->ready, __ATOMIC_ACQUIRE) == 0) continue;
      Fault fault;
      fault.kind = static_cast<FaultKind>(box->words[0]);
      fault.rank = static_cast<int32_t>(box->words[1]);
      fault.peer = static_cast<int32_t>(box->words[2]);
      fault.op = static_cast<Operator>(box->words[3]);
      fault.tile = static_cast<int32_t>(box->words[4]);
      fault.epoch = box->words[5];
      fault.detail = box->words[6];
      return fault;
    }
    return {};
  }

  void Interrupt() override {
    for (auto& [rank, local] : ranks_) {
      const int device = local.member.device_ordinal;
      int before = 0;
      (void)cudaGetDevice(&before);
      (void)cudaSetDevice(device);
      // Without deadlines a wait for a lost peer would never end.
      if (deadline_ms_ == 0) WriteAbort(local);
      if (cudaDeviceSynchronize() != cudaSuccess) (void)cudaGetLastError();
      (void)cudaSetDevice(before);
    }
  }

  void Disconnect() override {
    for (auto& [rank, local] : ranks_) {
      local.imported.clear();
      local.peers = PeerTable{};
    }
  }

 private:
  LocalRank Allocate(const Member& member, uint32_t start_epoch) const {
    int devices = 0;
    const cudaError_t error = cudaGetDeviceCount(&devices);
    if (error != cudaSuccess) {
      (void)cudaGetLastError();
      throw UnavailableError(ErrorText("no usable CUDA driver", error));
    }
    if (member.device_ordinal >= devices) {
      throw std::runtime_error(Name(member) + ": this process has " + std::to_string(devices) +
                               " CUDA devices");
    }
    const DeviceScope scope(member.device_ordinal);
    const Status loaded = Prepare();
    if (loaded.code == Status::Code::kUnsupported) {
      throw UnavailableError(Name(member) + ": " + loaded.text);
    }
    if (!loaded.ok()) throw std::runtime_error(Name(member) + ": " + loaded.text);

    LocalRank local;
    local.member = member;
    const int64_t bytes = RoundUp(layout_.heap_bytes(), kGranularity);
    void* heap = nullptr;
    const cudaError_t refused = cudaMalloc(&heap, static_cast<size_t>(bytes));
    if (refused != cudaSuccess) ThrowOutOfMemory(member, bytes, layout_, refused);
    local.heap = DeviceMemory(member.device_ordinal, heap);

    std::vector<char> control(static_cast<size_t>(layout_.control_bytes()));
    InitControlWords<HostMemory>(control.data(), layout_, start_epoch);
    Check(cudaMemcpy(heap, control.data(), control.size(), cudaMemcpyHostToDevice), "cudaMemcpy");
    // All bits set is a NaN: what nobody wrote must not pass for data.
    Check(cudaMemset(static_cast<char*>(heap) + layout_.slot(0), 0xff,
                     static_cast<size_t>(layout_.heap_bytes() - layout_.slot(0))),
          "cudaMemset");

    void* mailbox = nullptr;
    Check(
        cudaHostAlloc(&mailbox, sizeof(FaultMailbox), cudaHostAllocMapped | cudaHostAllocPortable),
        "cudaHostAlloc");
    local.mailbox = HostMemoryBlock(member.device_ordinal, mailbox);
    std::memset(mailbox, 0, sizeof(FaultMailbox));
    void* on_device = nullptr;
    Check(cudaHostGetDevicePointer(&on_device, mailbox, 0), "cudaHostGetDevicePointer");
    local.mailbox_on_device = static_cast<FaultMailbox*>(on_device);
    // Before any peer hears of this heap. Not for the whole device, on which a kernel of another
    // group may wait for a device that this thread has yet to serve.
    Check(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize");
    return local;
  }

  // The heap of `record` as `local` sees it. The device of `local` is current.
  static char* Reach(LocalRank& local, const HeapRecord& record) {
    if (!IsOwnProcess(record)) {
      cudaIpcMemHandle_t handle;
      std::memcpy(&handle, record.ipc_handle, sizeof(handle));
      void* mapped = nullptr;
      const cudaError_t error =
          cudaIpcOpenMemHandle(&mapped, handle, cudaIpcMemLazyEnablePeerAccess);
      if (error != cudaSuccess) {
        (void)cudaGetLastError();
        const std::string text = Name(local.member) + " cannot map the heap of " +
                                 Name(record.member) + " of process " + std::to_string(record.pid) +
                                 ": " + ErrorText("cudaIpcOpenMemHandle", error);
        if (error == cudaErrorPeerAccessUnsupported) throw UnavailableError(text);
        throw std::runtime_error(text);
      }
      local.imported.emplace_back(local.member.device_ordinal, mapped);
      return static_cast<char*>(mapped);
    }
    const int own = local.member.device_ordinal;
    const int other = record.member.device_ordinal;
    if (own != other) {
      int reachable = 0;
      Check(cudaDeviceCanAccessPeer(&reachable, own, other), "cudaDeviceCanAccessPeer");
      if (reachable == 0) {
        throw UnavailableError("device " + std::to_string(own) +
                               " cannot access the memory of device " + std::to_string(other) +
                               " (no NVLink or PCIe peer access between them)");
      }
      const cudaError_t error = cudaDeviceEnablePeerAccess(other, 0);
      // XLA enables it too.
      if (error == cudaErrorPeerAccessAlreadyEnabled) {
        (void)cudaGetLastError();
      } else {
        Check(error, "cudaDeviceEnablePeerAccess");
      }
    }
    return reinterpret_cast<char*>(record.address);
  }

  // Raises the abort word of one rank from the host, beside whatever its kernel does.
  void WriteAbort(const LocalRank& local) const {
    cudaStream_t stream = nullptr;
    if (cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) != cudaSuccess) {
      (void)cudaGetLastError();
      return;
    }
    const uint32_t raiser = static_cast<uint32_t>(local.member.rank) + 1;
    (void)cudaMemcpyAsync(static_cast<char*>(local.heap.get()) + layout_.abort(), &raiser,
                          sizeof(raiser), cudaMemcpyHostToDevice, stream);
    (void)cudaStreamSynchronize(stream);
    (void)cudaStreamDestroy(stream);
  }

  HeapLayout layout_;
  int64_t deadline_ms_;
  std::map<int, LocalRank> ranks_;
};

}  // namespace

std::pair<int64_t, int64_t> DeviceMemoryInfo(int device) {
  const DeviceScope scope(device);
  size_t free_bytes = 0, total_bytes = 0;
  Check(cudaMemGetInfo(&free_bytes, &total_bytes), "cudaMemGetInfo");
  return {static_cast<int64_t>(free_bytes), static_cast<int64_t>(total_bytes)};
}

std::string DeviceUuid(int device) {
  cudaDeviceProp properties;
  Check(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
  std::string text;
  for (const char byte : properties.uuid.bytes) {
    constexpr char kDigits[] = "0123456789abcdef";
    text += kDigits[static_cast<unsigned char>(byte) >> 4];
    text += kDigits[static_cast<unsigned char>(byte) & 15];
  }
  return text;
}

std::unique_ptr<SymmetricHeap> MakeHeap(const HeapLayout& layout, int64_t deadline_ms,
                                        uint32_t start_epoch, const std::vector<Member>& members) {
  return std::make_unique<CudaHeap>(layout, deadline_ms, start_epoch, members);
}

}  // namespace jax_ulysses::cuda
