// SPDX-License-Identifier: Apache-2.0
// Handlers of jax_ulysses.a2a_gemm.v1: operands rank, one part a segment, w and bias.
#include "host/a2a_gemm.h"

#if defined(JAX_ULYSSES_HAS_CUDA)
#include "cuda/calls.h"
#endif
#include "handler.h"
#include "handlers.h"

namespace jax_ulysses {
namespace {

constexpr const char* kTarget = "jax_ulysses.a2a_gemm.v1";

// `readable`: operands lie in memory of the host.
host::A2aGemmArgs Read(const CallContext& context, ffi::RemainingArgs args, ffi::RemainingRets rets,
                       int64_t w_transposed, int64_t want_gathered, bool readable) {
  const size_t segments = context.heads.size();
  if (segments == 0) throw ArgumentError("heads is empty");
  CheckCount("operands", args.size(), segments + 3);
  CheckCount("results", rets.size(), 2);
  CheckRankOperand(context, Arg(context, args, 0), readable);
  const ffi::AnyBuffer first = Arg(context, args, 1);
  const ffi::AnyBuffer w = Arg(context, args, segments + 1);
  const ffi::AnyBuffer bias = Arg(context, args, segments + 2);
  const ffi::AnyBuffer y = Ret(context, rets, 0);
  const ffi::AnyBuffer g = Ret(context, rets, 1);
  CheckRank(context, "part 0", first, 4);
  CheckRank(context, "w", w, 2);
  CheckRank(context, "bias", bias, 1);
  const ffi::DataType dtype = first.element_type();
  CheckFloat(context, "part 0", dtype);
  host::A2aGemmArgs call;
  host::Shape& shape = call.shape;
  shape.batch = first.dimensions()[0];
  shape.exchange =
      MakeExchange(context, first.dimensions()[3], LocalTokens(context, first.dimensions()[1]));
  shape.element_bytes = static_cast<int64_t>(ffi::ByteWidth(dtype));
  const HeadExchange& exchange = shape.exchange;
  const int64_t columns = exchange.fused_columns();
  for (int64_t seg = 0; seg < exchange.num_segments; ++seg) {
    const ffi::AnyBuffer part = Arg(context, args, static_cast<size_t>(seg) + 1);
    const std::string name = "part " + std::to_string(seg);
    CheckDims(context, name.c_str(), part,
              {shape.batch, exchange.tokens().global_tokens(), exchange.local_heads(seg),
               exchange.head_dim});
    CheckType(context, name.c_str(), part, dtype);
    call.parts[seg] = static_cast<const char*>(part.untyped_data());
  }
  call.type = ElementTypeOf(dtype);
  call.w_transposed = w_transposed != 0;
  call.width = w.dimensions()[call.w_transposed ? 0 : 1];
  CheckDims(context, "w", w,
            call.w_transposed ? std::vector<int64_t>{call.width, columns}
                              : std::vector<int64_t>{columns, call.width});
  const bool has_bias = bias.dimensions()[0] != 0;
  if (has_bias) CheckDims(context, "bias", bias, {call.width});
  CheckDims(context, "y", y, {shape.batch, exchange.local_tokens, call.width});
  if (want_gathered) {
    CheckDims(context, "g", g, {shape.batch, exchange.local_tokens, columns});
  } else {
    CheckDims(context, "g", g, {0});
  }
  CheckType(context, "w", w, dtype);
  CheckType(context, "bias", bias, dtype);
  CheckType(context, "y", y, dtype);
  CheckType(context, "g", g, dtype);
  call.w = w.untyped_data();
  call.bias = has_bias ? bias.untyped_data() : nullptr;
  call.y = y.untyped_data();
  call.g = want_gathered ? g.untyped_data() : nullptr;
  call.agreement = Agreement(context, shape, dtype)
                       .Add(call.width)
                       .Add(call.w_transposed)
                       .Add(has_bias)
                       .Add(want_gathered)
                       .value();
  return call;
}

ffi::Future HostA2aGemm(int32_t device_ordinal, ffi::RunId run_id, ffi::RemainingArgs args,
                        ffi::RemainingRets rets, int64_t group, int64_t token_order,
                        ffi::Span<const int64_t> heads, int64_t w_transposed,
                        int64_t want_gathered) {
  CallContext context = {kTarget, group, token_order, heads, device_ordinal, run_id.run_id, {}};
  return RunHandler(context, rets, [&]() -> Runner {
    const host::A2aGemmArgs call = Read(context, args, rets, w_transposed, want_gathered, true);
    return [handle = context.handle, call] { return host::RunA2aGemm(handle, call); };
  });
}

#if defined(JAX_ULYSSES_HAS_CUDA)
ffi::Error CudaA2aGemm(CUstream_st* stream, int32_t device_ordinal, ffi::RemainingArgs args,
                       ffi::RemainingRets rets, int64_t group, int64_t token_order,
                       ffi::Span<const int64_t> heads, int64_t w_transposed,
                       int64_t want_gathered) {
  CallContext context = {kTarget, group, token_order, heads, device_ordinal, 0, {}};
  return RunEnqueue(context, [&] {
    const host::A2aGemmArgs call = Read(context, args, rets, w_transposed, want_gathered, false);
    return cuda::LaunchA2aGemm(kTarget, context.handle, ProgramRank(args), call, stream);
  });
}
#endif

}  // namespace
}  // namespace jax_ulysses

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxUlyssesHostA2aGemm, jax_ulysses::HostA2aGemm,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::DeviceOrdinal>()
                                  .Ctx<xla::ffi::RunId>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<int64_t>("group")
                                  .Attr<int64_t>("token_order")
                                  .Attr<xla::ffi::Span<const int64_t>>("heads")
                                  .Attr<int64_t>("w_transposed")
                                  .Attr<int64_t>("want_gathered"));

#if defined(JAX_ULYSSES_HAS_CUDA)
XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxUlyssesCudaA2aGemm, jax_ulysses::CudaA2aGemm,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<CUstream_st*>>()
                                  .Ctx<xla::ffi::DeviceOrdinal>()

                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<int64_t>("group")
                                  .Attr<int64_t>("token_order")
                                  .Attr<xla::ffi::Span<const int64_t>>("heads")
                                  .Attr<int64_t>("w_transposed")
                                  .Attr<int64_t>("want_gathered"),
                              {xla::ffi::Traits::kCmdBufferCompatible});
#endif
