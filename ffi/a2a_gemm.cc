// SPDX-License-Identifier: Apache-2.0
// CPU handler of jax_ulysses.a2a_gemm.v1.
#include "host/a2a_gemm.h"

#include "handler.h"
#include "handlers.h"

namespace jax_ulysses {
namespace {

ffi::Future A2aGemm(int32_t device_ordinal, ffi::RunId run_id, ffi::RemainingArgs args,
                    ffi::RemainingRets rets, int64_t group, int64_t token_order,
                    ffi::Span<const int64_t> heads, int64_t w_transposed) {
  CallContext context = {
      "jax_ulysses.a2a_gemm.v1", group, token_order, heads, device_ordinal, run_id.run_id, {}};
  return RunHandler(context, rets, [&]() -> Runner {
    const size_t segments = heads.size();
    if (segments == 0) throw ArgumentError("heads is empty");
    CheckCount("operands", args.size(), segments + 2);
    CheckCount("results", rets.size(), 2);
    const ffi::AnyBuffer first = Arg(context, args, 0);
    const ffi::AnyBuffer w = Arg(context, args, segments);
    const ffi::AnyBuffer bias = Arg(context, args, segments + 1);
    const ffi::AnyBuffer y = Ret(context, rets, 0);
    const ffi::AnyBuffer g = Ret(context, rets, 1);
    CheckRank(context, "operand 0", first, 4);
    CheckRank(context, "w", w, 2);
    CheckRank(context, "bias", bias, 1);
    const ffi::DataType dtype = first.element_type();
    CheckFloat(context, "operand 0", dtype);
    host::A2aGemmArgs call;
    host::Shape& shape = call.shape;
    shape.batch = first.dimensions()[0];
    shape.exchange =
        MakeExchange(context, first.dimensions()[3], LocalTokens(context, first.dimensions()[1]));
    shape.element_bytes = static_cast<int64_t>(ffi::ByteWidth(dtype));
    const HeadExchange& exchange = shape.exchange;
    const int64_t columns = exchange.fused_columns();
    for (int64_t seg = 0; seg < exchange.num_segments; ++seg) {
      const ffi::AnyBuffer part = Arg(context, args, static_cast<size_t>(seg));
      const std::string name = "operand " + std::to_string(seg);
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
    CheckDims(context, "g", g, {shape.batch, exchange.local_tokens, columns});
    CheckType(context, "w", w, dtype);
    CheckType(context, "bias", bias, dtype);
    CheckType(context, "y", y, dtype);
    CheckType(context, "g", g, dtype);
    call.w = w.untyped_data();
    call.bias = has_bias ? bias.untyped_data() : nullptr;
    call.y = y.untyped_data();
    call.g = g.untyped_data();
    call.agreement = Agreement(context, shape, dtype)
                         .Add(call.width)
                         .Add(call.w_transposed)
                         .Add(has_bias)
                         .value();
    return [handle = context.handle, call] { return host::RunA2aGemm(handle, call); };
  });
}

}  // namespace
}  // namespace jax_ulysses

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxUlyssesHostA2aGemm, jax_ulysses::A2aGemm,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::DeviceOrdinal>()
                                  .Ctx<xla::ffi::RunId>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<int64_t>("group")
                                  .Attr<int64_t>("token_order")
                                  .Attr<xla::ffi::Span<const int64_t>>("heads")
                                  .Attr<int64_t>("w_transposed"));
