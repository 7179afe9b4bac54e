// SPDX-License-Identifier: Apache-2.0
// The CUDA runtime with exceptions, and its resources with owners.
#ifndef JAX_ULYSSES_FFI_CUDA_RUNTIME_H_
#define JAX_ULYSSES_FFI_CUDA_RUNTIME_H_

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>
#include <utility>

namespace jax_ulysses::cuda {

inline std::string ErrorText(const char* what, cudaError_t error) {
  return std::string(what) + ": " + cudaGetErrorString(error) + " (" + cudaGetErrorName(error) +
         ")";
}

// Throws std::runtime_error. Clears the error, which would else turn up in an unrelated call.
inline void Check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  (void)cudaGetLastError();
  throw std::runtime_error(ErrorText(what, error));
}

// Makes a device current, and the previous one again at the end of the scope.
class DeviceScope {
 public:
  explicit DeviceScope(int device) {
    Check(cudaGetDevice(&before_), "cudaGetDevice");
    if (before_ != device) Check(cudaSetDevice(device), "cudaSetDevice");
  }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;
  ~DeviceScope() { (void)cudaSetDevice(before_); }

 private:
  int before_ = 0;
};

// A pointer with the function that gives it back; its errors at that point help nobody.
template <cudaError_t (*kRelease)(void*)>
class Owned {
 public:
  Owned() = default;
  Owned(int device, void* pointer) : device_(device), pointer_(pointer) {}
  Owned(Owned&& other) noexcept
      : device_(other.device_), pointer_(std::exchange(other.pointer_, nullptr)) {}
  Owned& operator=(Owned&& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(pointer_, other.pointer_);
    return *this;
  }
  ~Owned() {
    if (pointer_ == nullptr) return;
    int before = 0;
    (void)cudaGetDevice(&before);
    (void)cudaSetDevice(device_);
    if (kRelease(pointer_) != cudaSuccess) (void)cudaGetLastError();
    (void)cudaSetDevice(before);
  }
  void* get() const { return pointer_; }

 private:
  int device_ = 0;
  void* pointer_ = nullptr;
};

using DeviceMemory = Owned<cudaFree>;
using HostMemoryBlock = Owned<cudaFreeHost>;
using ImportedMemory = Owned<cudaIpcCloseMemHandle>;

}  // namespace jax_ulysses::cuda

#endif  // JAX_ULYSSES_FFI_CUDA_RUNTIME_H_
