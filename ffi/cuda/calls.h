// SPDX-License-Identifier: Apache-2.0
// From a checked FFI call to a kernel launch, and whether there is a kernel for it. Both build the
// same description, so what is promised at trace time is what runs.
#ifndef JAX_ULYSSES_FFI_CUDA_CALLS_H_
#define JAX_ULYSSES_FFI_CUDA_CALLS_H_

#include <string>

#include "group.h"
#include "host/a2a_gemm.h"
#include "host/exchange.h"
#include "host/gemm_a2a.h"
#include "host/psum.h"
#include "question.h"
#include "xla/ffi/api/ffi.h"

struct CUstream_st;

namespace jax_ulysses::cuda {

// Enqueue one call of one rank. They never block, allocate device memory or read it, and always
// launch the same one kernel, so that XLA may capture them into a CUDA graph. `program_rank` is the
// rank operand, in device memory: the kernel compares it with the rank of the handle.
xla::ffi::Error LaunchExchange(const char* target, const RankHandle& handle,
                               const int32_t* program_rank, const host::ExchangeArgs& args,
                               CUstream_st* stream);
xla::ffi::Error LaunchGemmA2a(const char* target, const RankHandle& handle,
                              const int32_t* program_rank, const host::GemmA2aArgs& args,
                              CUstream_st* stream);
xla::ffi::Error LaunchA2aGemm(const char* target, const RankHandle& handle,
                              const int32_t* program_rank, const host::A2aGemmArgs& args,
                              CUstream_st* stream);
xla::ffi::Error LaunchPsum(const char* target, const RankHandle& handle,
                           const int32_t* program_rank, const host::PsumArgs& args,
                           CUstream_st* stream);

// Empty, or why the kernels cannot do it.
std::string WhyNot(const Question& question);

}  // namespace jax_ulysses::cuda

#endif  // JAX_ULYSSES_FFI_CUDA_CALLS_H_
