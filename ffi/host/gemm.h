// SPDX-License-Identifier: Apache-2.0
// Plain blocked matrix product of the CPU handlers. Every element of the result is a sum over K in
// the order of the calls and, inside a call, in ascending k: no result depends on tile sizes.
#ifndef JAX_ULYSSES_FFI_HOST_GEMM_H_
#define JAX_ULYSSES_FFI_HOST_GEMM_H_

#include <algorithm>
#include <vector>

#include "numeric.h"

namespace jax_ulysses::host {

// A weight matrix [K, N], or [N, K] when `transposed`. Row-major, dense.
template <class T>
struct Weight {
  const T* data;
  int64_t k_size;
  int64_t n_size;
  bool transposed;
};

template <class T>
class Gemm {
 public:
  using A = Accumulator<T>;
  static constexpr int64_t kDepth = 128;
  static constexpr int64_t kWidth = 256;

  // acc[m, 0:cols] += sum over k in [0, depth) of a[m, k] * w[k_begin + k, n_begin + n], for m in
  // [0, rows). `a` has row stride lda, `acc` has row stride ld_acc.
  void Accumulate(A* acc, int64_t ld_acc, const T* a, int64_t lda, int64_t rows, int64_t depth,
                  const Weight<T>& w, int64_t k_begin, int64_t n_begin, int64_t cols) {
    for (int64_t n = 0; n < cols; n += kWidth) {
      const int64_t width = std::min(kWidth, cols - n);
      for (int64_t k = 0; k < depth; k += kDepth) {
        const int64_t d = std::min(kDepth, depth - k);
        LoadWeight(w, k_begin + k, d, n_begin + n, width);
        LoadRows(a + k, lda, rows, d);
        for (int64_t m = 0; m < rows; ++m) {
          Row(acc + m * ld_acc + n, rows_.data() + m * d, d, width);
        }
      }
    }
  }

 private:
  void LoadRows(const T* a, int64_t lda, int64_t rows, int64_t depth) {
    rows_.resize(static_cast<size_t>(rows * depth));
    for (int64_t m = 0; m < rows; ++m) {
      for (int64_t k = 0; k < depth; ++k) {
        rows_[static_cast<size_t>(m * depth + k)] = Widen(a[m * lda + k]);
      }
    }
  }

  void LoadWeight(const Weight<T>& w, int64_t k_begin, int64_t depth, int64_t n_begin,
                  int64_t width) {
    panel_.resize(static_cast<size_t>(depth * width));
    for (int64_t k = 0; k < depth; ++k) {
      for (int64_t n = 0; n < width; ++n) {
        const int64_t at = w.transposed ? (n_begin + n) * w.k_size + k_begin + k
                                        : (k_begin + k) * w.n_size + n_begin + n;
        panel_[static_cast<size_t>(k * width + n)] = Widen(w.data[at]);
      }
    }
  }

  // Four k at a time keep the accumulator in registers; the additions stay in order.
  void Row(A* __restrict acc, const A* __restrict a, int64_t depth, int64_t width) const {
    const A* __restrict w = panel_.data();
    int64_t k = 0;
    for (; k + 4 <= depth; k += 4, w += 4 * width) {
      const A a0 = a[k], a1 = a[k + 1], a2 = a[k + 2], a3 = a[k + 3];
      for (int64_t n = 0; n < width; ++n) {
        A sum = acc[n] + a0 * w[n];
        sum = sum + a1 * w[width + n];
        sum = sum + a2 * w[2 * width + n];
        acc[n] = sum + a3 * w[3 * width + n];
      }
    }
    for (; k < depth; ++k, w += width) {
      for (int64_t n = 0; n < width; ++n) acc[n] += a[k] * w[n];
    }
  }

  std::vector<A> rows_;
  std::vector<A> panel_;
};

}  // namespace jax_ulysses::host

#endif  // JAX_ULYSSES_FFI_HOST_GEMM_H_
