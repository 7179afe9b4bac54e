// SPDX-License-Identifier: Apache-2.0
#include "heap.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "jax_ulysses/comm/host_memory.h"

namespace jax_ulysses {
namespace {

class Mapping {
 public:
  explicit Mapping(int64_t bytes) : bytes_(static_cast<size_t>(bytes)) {
    void* p = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) {
      throw std::runtime_error("cannot map a heap of " + std::to_string(bytes) +
                               " bytes: " + std::strerror(errno));
    }
    data_ = static_cast<char*>(p);
  }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping() { munmap(data_, bytes_); }

  char* data() const { return data_; }

 private:
  size_t bytes_;
  char* data_ = nullptr;
};

class HostHeap final : public SymmetricHeap {
 public:
  HostHeap(const HeapLayout& layout, uint32_t start_epoch) : layout_(layout) {
    for (int64_t rank = 0; rank < layout.num_ranks; ++rank) {
      mappings_.push_back(std::make_unique<Mapping>(layout.heap_bytes()));
      InitControlWords<HostMemory>(mappings_.back()->data(), layout, start_epoch);
    }
  }

  PeerTable Peers(int /*rank*/) const override {
    PeerTable peers;
    for (size_t i = 0; i < mappings_.size(); ++i) peers.heap[i] = mappings_[i]->data();
    return peers;
  }

  void Interrupt() override {
    CallInfo call;
    call.peers = Peers(0);
    call.layout = layout_;
    // Only the abort words matter; the text is the line's.
    RankProtocol<HostMemory>(call).Raise(FaultKind::kClosed, -1, -1);
  }

 private:
  HeapLayout layout_;
  std::vector<std::unique_ptr<Mapping>> mappings_;
};

}  // namespace

std::unique_ptr<SymmetricHeap> MakeHostHeap(const HeapLayout& layout, uint32_t start_epoch) {
  return std::make_unique<HostHeap>(layout, start_epoch);
}

}  // namespace jax_ulysses
