// SPDX-License-Identifier: Apache-2.0
// What the GPU tests share: checked CUDA calls, buffers, random numbers, and plain kernels that say
// what the right answer is. They use HeadExchange and TokenMap, not the 32-bit Geometry under test.
#ifndef JAX_ULYSSES_TESTS_GPU_DEVICE_UTIL_CUH_
#define JAX_ULYSSES_TESTS_GPU_DEVICE_UTIL_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <vector>

#include "jax_ulysses/launch.h"

#define CK(call)                                                                             \
  do {                                                                                       \
    const cudaError_t error_ = (call);                                                       \
    if (error_ != cudaSuccess) {                                                             \
      std::printf("%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(error_)); \
      std::fflush(stdout);                                                                   \
      std::exit(1);                                                                          \
    }                                                                                        \
  } while (0)

namespace jax_ulysses::testing {

// Ranks are spread over this many devices; 1 puts them all on the current one.
inline int g_devices = 1;
inline void UseRank(int rank) {
  if (g_devices > 1) CK(cudaSetDevice(rank % g_devices));
}
// One rank a device from here on.
inline void SpreadOver(int devices) {
  g_devices = devices;
  for (int d = 0; d < devices; ++d) {
    CK(cudaSetDevice(d));
    for (int peer = 0; peer < devices; ++peer) {
      if (peer != d) CK(cudaDeviceEnablePeerAccess(peer, 0));
    }
  }
  UseRank(0);
}
inline void SyncDevices() {
  if (g_devices == 1) CK(cudaDeviceSynchronize());
  for (int d = 0; g_devices > 1 && d < g_devices; ++d) {
    CK(cudaSetDevice(d));
    CK(cudaDeviceSynchronize());
  }
  UseRank(0);
}

class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(int64_t bytes) : bytes_(bytes) { CK(cudaMalloc(&data_, bytes > 0 ? bytes : 16)); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  Buffer(Buffer&& other) noexcept : data_(other.data_), bytes_(other.bytes_) {
    other.data_ = nullptr;
  }
  Buffer& operator=(Buffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~Buffer() { cudaFree(data_); }
  char* get() const { return static_cast<char*>(data_); }
  int64_t bytes() const { return bytes_; }
  void Poison(cudaStream_t stream = nullptr) const {
    CK(cudaMemsetAsync(data_, 0xff, static_cast<size_t>(bytes_), stream));
  }

 private:
  void* data_ = nullptr;
  int64_t bytes_ = 0;
};

template <class T>
__device__ inline float ToFloat(T v) {
  return static_cast<float>(v);
}

__device__ inline uint32_t HashBits(uint64_t x) {
  x ^= x >> 33;
  x *= 0xff51afd7ed558ccdull;
  x ^= x >> 33;
  x *= 0xc4ceb9fe1a85ec53ull;
  return static_cast<uint32_t>(x >> 32);
}

// Uniform in [-1, 1), times `scale`.
template <class T>
__global__ void RandomFill(T* p, int64_t n, uint64_t seed, float scale) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < n;
       i += int64_t{gridDim.x} * blockDim.x) {
    const int32_t bits = static_cast<int32_t>(HashBits(i + seed * 0x9e3779b97f4a7c15ull) & 0xffff);
    p[i] = T(static_cast<float>(bits - 32768) / 32768.0f);
    p[i] = T(static_cast<float>(p[i]) * scale);
  }
}

// y [m, n] = a [m, k] w + bias in fp32, w [k, n] or, transposed, [n, k].
template <class T>
__global__ void NaiveGemm(const float* a, const T* w, bool transposed, const T* bias, int m, int n,
                          int k, float* y) {
  __shared__ float sa[16][17], sw[16][17];
  const int row = blockIdx.y * 16 + threadIdx.y, col = blockIdx.x * 16 + threadIdx.x;
  float sum = 0;
  for (int k0 = 0; k0 < k; k0 += 16) {
    const int ka = k0 + threadIdx.x, kw = k0 + threadIdx.y;
    sa[threadIdx.y][threadIdx.x] = row < m && ka < k ? a[int64_t{row} * k + ka] : 0;
    sw[threadIdx.y][threadIdx.x] =
        col < n && kw < k
            ? static_cast<float>(transposed ? w[int64_t{col} * k + kw] : w[int64_t{kw} * n + col])
            : 0;
    __syncthreads();
    for (int i = 0; i < 16; ++i) sum += sa[threadIdx.y][i] * sw[i][threadIdx.x];
    __syncthreads();
  }
  if (row < m && col < n) {
    y[int64_t{row} * n + col] = sum + (bias != nullptr ? static_cast<float>(bias[col]) : 0);
  }
}

struct PartTable {
  const void* part[kMaxRanks][kMaxFusedSegments];
};

// Head-shard row of local row m (b, t) of `rank`.
__device__ inline int64_t HeadRow(const HeadExchange& ex, int64_t rank, int64_t m) {
  const int64_t T = ex.local_tokens;
  return m / T * T * ex.num_ranks + ex.tokens().GlobalRow(rank, m % T);
}

// g [rows, C] of `rank` from everybody's head shards; replicas summed in rank order and, if
// `round`, rounded once.
template <class T>
__global__ void NaiveGather(HeadExchange ex, int64_t rows, int64_t rank, PartTable parts,
                            bool round, float* g) {
  const int64_t columns = ex.fused_columns();
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < rows * columns;
       i += int64_t{gridDim.x} * blockDim.x) {
    const ColumnOwner owner = ex.Owner(i % columns);
    const int64_t row = HeadRow(ex, rank, i / columns);
    const int64_t column = owner.packed_column - ex.packed_begin(owner.segment);
    float sum = 0;
    for (int64_t r = 0; r < owner.replicas; ++r) {
      sum += static_cast<float>(static_cast<const T*>(
          parts.part[owner.first_rank + r][owner.segment])[row * ex.segment_columns(owner.segment) +
                                                           column]);
    }
    g[i] = round ? static_cast<float>(T(sum)) : sum;
  }
}

// Head shard `seg` of `dest` from everybody's fp32 results y_r [rows, C].
struct ResultTable {
  const float* y[kMaxRanks];
};
static __global__ void NaiveScatter(HeadExchange ex, int64_t rows, int64_t dest, int seg,
                                    ResultTable results, float* out) {
  const int64_t columns = ex.segment_columns(seg);
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
       i < rows * ex.num_ranks * columns; i += int64_t{gridDim.x} * blockDim.x) {
    const int64_t source = i / (rows * columns), m = i / columns % rows, c = i % columns;
    out[HeadRow(ex, source, m) * columns + c] =
        results.y[source][m * ex.fused_columns() + ex.fused_block_begin(seg, dest) + c];
  }
}

template <class T>
__global__ void Widen(const T* in, int64_t n, float* out) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < n;
       i += int64_t{gridDim.x} * blockDim.x) {
    out[i] = static_cast<float>(in[i]);
  }
}

// sums[0] += (got - want)^2, sums[1] += want^2, bad[0] += NaN in got.
template <class T>
__global__ void CompareNorm(const T* got, const float* want, int64_t n, double* sums,
                            unsigned long long* bad) {
  double error = 0, norm = 0;
  unsigned long long nan = 0;
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < n;
       i += int64_t{gridDim.x} * blockDim.x) {
    const float v = static_cast<float>(got[i]);
    if (!(v == v)) {
      ++nan;
      continue;
    }
    error += double(v - want[i]) * (v - want[i]);
    norm += double(want[i]) * want[i];
  }
  atomicAdd(sums, error);
  atomicAdd(sums + 1, norm);
  if (nan != 0) atomicAdd(bad, nan);
}

// bad[0] += elements that are not exactly scale * want. NaN never is.
template <class T>
__global__ void CompareExact(const T* got, const T* want, float scale, int64_t n,
                             unsigned long long* bad) {
  unsigned long long count = 0;
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < n;
       i += int64_t{gridDim.x} * blockDim.x) {
    if (!(static_cast<float>(got[i]) == scale * static_cast<float>(want[i]))) ++count;
  }
  if (count != 0) atomicAdd(bad, count);
}

}  // namespace jax_ulysses::testing

#endif  // JAX_ULYSSES_TESTS_GPU_DEVICE_UTIL_CUH_
