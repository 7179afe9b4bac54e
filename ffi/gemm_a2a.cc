// SPDX-License-Identifier: Apache-2.0
// CPU handler of jax_ulysses.gemm_a2a.v1.
#include "host/gemm_a2a.h"

#include "handler.h"
#include "handlers.h"

namespace jax_ulysses {
namespace {

ffi::Future GemmA2a(int32_t device_ordinal, ffi::RunId run_id, ffi::AnyBuffer x, ffi::AnyBuffer w,
                    ffi::AnyBuffer bias, ffi::RemainingRets rets, int64_t group,
                    int64_t token_order, ffi::Span<const int64_t> heads, int64_t head_dim,
                    int64_t w_transposed) {
  CallContext context = {
      "jax_ulysses.gemm_a2a.v1", group, token_order, heads, device_ordinal, run_id.run_id, {}};
  return RunHandler(context, rets, [&]() -> Runner {
    CheckCount("results", rets.size(), heads.size());
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
    call.agreement = Agreement(context, shape, dtype)
                         .Add(call.depth)
                         .Add(call.w_transposed)
                         .Add(has_bias)
                         .value();
    return [handle = context.handle, call] { return host::RunGemmA2a(handle, call); };
  });
}

}  // namespace
}  // namespace jax_ulysses

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxUlyssesHostGemmA2a, jax_ulysses::GemmA2a,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::DeviceOrdinal>()
                                  .Ctx<xla::ffi::RunId>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .RemainingRets()
                                  .Attr<int64_t>("group")
                                  .Attr<int64_t>("token_order")
                                  .Attr<xla::ffi::Span<const int64_t>>("heads")
                                  .Attr<int64_t>("head_dim")
                                  .Attr<int64_t>("w_transposed"));
