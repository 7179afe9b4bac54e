// SPDX-License-Identifier: Apache-2.0
// Handlers of jax_ulysses.gemm_a2a.v1: operands rank, x, w and bias.
#include "host/gemm_a2a.h"

#if defined(JAX_ULYSSES_HAS_CUDA)
#include "cuda/calls.h"
#endif
#include "handler.h"
#include "handlers.h"

namespace jax_ulysses {
namespace {

constexpr const char* kTarget = "jax_ulysses.gemm_a2a.v1";

struct Operands {
  ffi::AnyBuffer rank, x, w, bias;
};

// `readable`: operands lie in memory of the host.
host::GemmA2aArgs Read(const CallContext& context, const Operands& in, ffi::RemainingRets rets,
                       int64_t head_dim, int64_t w_transposed, bool readable) {
  CheckCount("results", rets.size(), context.heads.size());
  CheckRankOperand(context, in.rank, readable);
  const auto& [rank, x, w, bias] = in;
  CheckRank(context, "x", x, 3);
  CheckRank(context, "bias", bias, 1);
  const ffi::DataType dtype = x.element_type();
  CheckFloat(context, "x", dtype);
  CheckType(context, "w", w, dtype);
  CheckType(context, "bias", bias, dtype);
  host::GemmA2aArgs call;
  host::Shape& shape = call.shape;
  shape.batch = x.dimensions()[0];
  shape.exchange = MakeExchange(context, head_dim, x.dimensions()[1]);
  shape.element_bytes = static_cast<int64_t>(ffi::ByteWidth(dtype));
  const HeadExchange& exchange = shape.exchange;
  const int64_t columns = exchange.fused_columns();
  call.type = ElementTypeOf(dtype);
  call.depth = x.dimensions()[2];
  call.w_transposed = w_transposed != 0;
  CheckDims(context, "w", w,
            call.w_transposed ? std::vector<int64_t>{columns, call.depth}
                              : std::vector<int64_t>{call.depth, columns});
  const bool has_bias = bias.dimensions()[0] != 0;
  if (has_bias) CheckDims(context, "bias", bias, {columns});
  for (int64_t seg = 0; seg < exchange.num_segments; ++seg) {
    const size_t i = static_cast<size_t>(seg);
    const ffi::AnyBuffer out = Ret(context, rets, i);
    const std::string name = "result " + std::to_string(i);
    CheckDims(context, name.c_str(), out,
              {shape.batch, exchange.tokens().global_tokens(), exchange.local_heads(seg),
               exchange.head_dim});
    CheckType(context, name.c_str(), out, dtype);
    call.out[seg] = out.untyped_data();
  }
  call.x = x.untyped_data();
  call.w = w.untyped_data();
  call.bias = has_bias ? bias.untyped_data() : nullptr;
  call.agreement =
      Agreement(context, shape, dtype).Add(call.depth).Add(call.w_transposed).Add(has_bias).value();
  return call;
}

ffi::Future HostGemmA2a(int32_t device_ordinal, ffi::RunId run_id, ffi::AnyBuffer rank,
                        ffi::AnyBuffer x, ffi::AnyBuffer w, ffi::AnyBuffer bias,
                        ffi::RemainingRets rets, int64_t group, int64_t token_order,
                        ffi::Span<const int64_t> heads, int64_t head_dim, int64_t w_transposed) {
  CallContext context = {kTarget, group, token_order, heads, device_ordinal, run_id.run_id, {}};
  return RunHandler(context, rets, [&]() -> Runner {
    const host::GemmA2aArgs call =
        Read(context, {rank, x, w, bias}, rets, head_dim, w_transposed, true);
    return [handle = context.handle, call] { return host::RunGemmA2a(handle, call); };
  });
}

#if defined(JAX_ULYSSES_HAS_CUDA)
ffi::Error CudaGemmA2a(CUstream_st* stream, int32_t device_ordinal, ffi::AnyBuffer rank,
                       ffi::AnyBuffer x, ffi::AnyBuffer w, ffi::AnyBuffer bias,
                       ffi::RemainingRets rets, int64_t group, int64_t token_order,
                       ffi::Span<const int64_t> heads, int64_t head_dim, int64_t w_transposed) {
  CallContext context = {kTarget, group, token_order, heads, device_ordinal, 0, {}};
  return RunEnqueue(context, [&] {
    const host::GemmA2aArgs call =
        Read(context, {rank, x, w, bias}, rets, head_dim, w_transposed, false);
    return cuda::LaunchGemmA2a(kTarget, context.handle,
                               static_cast<const int32_t*>(rank.untyped_data()), call, stream);
  });
}
#endif

}  // namespace
}  // namespace jax_ulysses

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxUlyssesHostGemmA2a, jax_ulysses::HostGemmA2a,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::DeviceOrdinal>()
                                  .Ctx<xla::ffi::RunId>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .RemainingRets()
                                  .Attr<int64_t>("group")
                                  .Attr<int64_t>("token_order")
                                  .Attr<xla::ffi::Span<const int64_t>>("heads")
                                  .Attr<int64_t>("head_dim")
                                  .Attr<int64_t>("w_transposed"));

#if defined(JAX_ULYSSES_HAS_CUDA)
XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxUlyssesCudaGemmA2a, jax_ulysses::CudaGemmA2a,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<CUstream_st*>>()
                                  .Ctx<xla::ffi::DeviceOrdinal>()

                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .RemainingRets()
                                  .Attr<int64_t>("group")
                                  .Attr<int64_t>("token_order")
                                  .Attr<xla::ffi::Span<const int64_t>>("heads")
                                  .Attr<int64_t>("head_dim")
                                  .Attr<int64_t>("w_transposed"),
                              {xla::ffi::Traits::kCmdBufferCompatible});
#endif
