// SPDX-License-Identifier: Apache-2.0
// The XLA FFI entry points, one per target and platform.
#ifndef JAX_ULYSSES_FFI_HANDLERS_H_
#define JAX_ULYSSES_FFI_HANDLERS_H_

#include "xla/ffi/api/c_api.h"

extern "C" {
XLA_FFI_Error* JaxUlyssesHostExchange(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* JaxUlyssesHostGemmA2a(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* JaxUlyssesHostA2aGemm(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* JaxUlyssesHostPsum(XLA_FFI_CallFrame* call_frame);
#if defined(JAX_ULYSSES_HAS_CUDA)
XLA_FFI_Error* JaxUlyssesCudaExchange(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* JaxUlyssesCudaGemmA2a(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* JaxUlyssesCudaA2aGemm(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* JaxUlyssesCudaPsum(XLA_FFI_CallFrame* call_frame);
#endif
}

#endif  // JAX_ULYSSES_FFI_HANDLERS_H_
