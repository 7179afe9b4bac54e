// SPDX-License-Identifier: Apache-2.0
#ifndef JAX_ULYSSES_FFI_QUESTION_H_
#define JAX_ULYSSES_FFI_QUESTION_H_

#include <cstdint>
#include <string>
#include <vector>

namespace jax_ulysses {

// A call by its shapes alone.
struct Question {
  std::string dataflow;  // "scatter", "gather", "gemm_a2a" or "a2a_gemm"
  std::vector<int64_t> heads;
  int64_t head_dim = 0;
  int64_t num_ranks = 0;
  int64_t token_order = 0;
  int64_t batch = 0;
  int64_t local_tokens = 0;
  int64_t width = 0;  // of a GEMM: D of its input, or columns of its output
  std::string dtype;  // as NumPy names it
  int64_t element_bytes = 0;
  bool w_transposed = false;
  bool want_gathered = false;
  int64_t slot_bytes = 0;
  int64_t num_slots = 2;
  int64_t sm_budget = 0;
};

}  // namespace jax_ulysses

#endif  // JAX_ULYSSES_FFI_QUESTION_H_
