// SPDX-License-Identifier: Apache-2.0
// Handlers of jax_ulysses.exchange.v1: operands rank and one part a segment.
#include "host/exchange.h"

#if defined(JAX_ULYSSES_HAS_CUDA)
#include "cuda/calls.h"
#endif
#include "handler.h"
#include "handlers.h"

namespace jax_ulysses {
namespace {

constexpr const char* kTarget = "jax_ulysses.exchange.v1";

// `readable`: operands lie in memory of the host.
host::ExchangeArgs Read(const CallContext& context, ffi::RemainingArgs args,
                        ffi::RemainingRets rets, int64_t direction, int64_t sum_replicas,
                        bool readable) {
  const auto& heads = context.heads;
  CheckCount("operands", args.size(), heads.size() + 1);
  CheckCount("results", rets.size(), heads.size());
  if (heads.size() == 0) throw ArgumentError("heads is empty");
  if (direction != 0 && direction != 1) {
    throw ArgumentError("direction is " + std::to_string(direction) +
                        ", expected 0 (scatter) or 1 (gather)");
  }
  CheckRankOperand(context, Arg(context, args, 0), readable);
  const bool gather = direction == 1;
  const ffi::AnyBuffer first = Arg(context, args, 1);
  CheckRank(context, "part 0", first, 4);
  const ffi::DataType dtype = first.element_type();
  host::ExchangeArgs call;
  host::Shape& shape = call.shape;
  shape.batch = first.dimensions()[0];
  const int64_t tokens = first.dimensions()[1];
  shape.exchange =
      MakeExchange(context, first.dimensions()[3], gather ? LocalTokens(context, tokens) : tokens);
  shape.element_bytes = static_cast<int64_t>(ffi::ByteWidth(dtype));
  call.type = ElementTypeOf(dtype);
  call.gather = gather;
  call.sum_replicas = sum_replicas != 0;
  if (call.sum_replicas) CheckFloat(context, "a sum over replicas", dtype);
  const HeadExchange& exchange = shape.exchange;
  for (int64_t seg = 0; seg < exchange.num_segments; ++seg) {
    const size_t i = static_cast<size_t>(seg);
    const ffi::AnyBuffer in = Arg(context, args, i + 1);
    const ffi::AnyBuffer out = Ret(context, rets, i);
    const std::vector<int64_t> sequence_shard = {shape.batch, exchange.local_tokens,
                                                 exchange.heads[seg], exchange.head_dim};
    const std::vector<int64_t> head_shard = {shape.batch, exchange.tokens().global_tokens(),
                                             exchange.local_heads(seg), exchange.head_dim};
    CheckDims(context, ("part " + std::to_string(i)).c_str(), in,
              gather ? head_shard : sequence_shard);
    CheckDims(context, ("result " + std::to_string(i)).c_str(), out,
              gather ? sequence_shard : head_shard);
    CheckType(context, ("part " + std::to_string(i)).c_str(), in, dtype);
    CheckType(context, ("result " + std::to_string(i)).c_str(), out, dtype);
    call.in[seg] = static_cast<const char*>(in.untyped_data());
    call.out[seg] = static_cast<char*>(out.untyped_data());
  }
  call.agreement = Agreement(context, shape, dtype).Add(direction).Add(sum_replicas).value();
  return call;
}

ffi::Future HostExchange(int32_t device_ordinal, ffi::RunId run_id, ffi::RemainingArgs args,
                         ffi::RemainingRets rets, int64_t group, int64_t token_order,
                         ffi::Span<const int64_t> heads, int64_t direction, int64_t sum_replicas) {
  CallContext context = {kTarget, group, token_order, heads, device_ordinal, run_id.run_id, {}};
  return RunHandler(context, rets, [&]() -> Runner {
    const host::ExchangeArgs call = Read(context, args, rets, direction, sum_replicas, true);
    return [handle = context.handle, call] { return host::RunExchange(handle, call); };
  });
}

#if defined(JAX_ULYSSES_HAS_CUDA)
ffi::Error CudaExchange(CUstream_st* stream, int32_t device_ordinal, ffi::RemainingArgs args,
                        ffi::RemainingRets rets, int64_t group, int64_t token_order,
                        ffi::Span<const int64_t> heads, int64_t direction, int64_t sum_replicas) {
  CallContext context = {kTarget, group, token_order, heads, device_ordinal, 0, {}};
  return RunEnqueue(context, [&] {
    const host::ExchangeArgs call = Read(context, args, rets, direction, sum_replicas, false);
    return cuda::LaunchExchange(kTarget, context.handle, ProgramRank(args), call, stream);
  });
}
#endif

}  // namespace
}  // namespace jax_ulysses

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxUlyssesHostExchange, jax_ulysses::HostExchange,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::DeviceOrdinal>()
                                  .Ctx<xla::ffi::RunId>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<int64_t>("group")
                                  .Attr<int64_t>("token_order")
                                  .Attr<xla::ffi::Span<const int64_t>>("heads")
                                  .Attr<int64_t>("direction")
                                  .Attr<int64_t>("sum_replicas"));

#if defined(JAX_ULYSSES_HAS_CUDA)
XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxUlyssesCudaExchange, jax_ulysses::CudaExchange,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<CUstream_st*>>()
                                  .Ctx<xla::ffi::DeviceOrdinal>()

                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<int64_t>("group")
                                  .Attr<int64_t>("token_order")
                                  .Attr<xla::ffi::Span<const int64_t>>("heads")
                                  .Attr<int64_t>("direction")
                                  .Attr<int64_t>("sum_replicas"),
                              {xla::ffi::Traits::kCmdBufferCompatible});
#endif
