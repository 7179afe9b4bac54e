// SPDX-License-Identifier: Apache-2.0
// Handlers of jax_ulysses.psum.v1: operands rank and vectors of any shape; a result for each. All
// vectors travel in the order of the operands, so that ranks cannot swap two of one size.
#include "host/psum.h"

#include <vector>

#if defined(JAX_ULYSSES_HAS_CUDA)
#include "cuda/calls.h"
#endif
#include "handler.h"
#include "handlers.h"

namespace jax_ulysses {
namespace {

constexpr const char* kTarget = "jax_ulysses.psum.v1";

// The calls that sum all vectors: what does not fit into a slot goes in parts. `readable`: operands
// lie in memory of the host. `context.heads` holds the vectors' element counts.
std::vector<host::PsumArgs> Read(const CallContext& context, ffi::RemainingArgs args,
                                 ffi::RemainingRets rets, bool readable) {
  const auto& counts = context.heads;
  CheckCount("operands", args.size(), counts.size() + 1);
  CheckCount("results", rets.size(), counts.size());
  CheckRankOperand(context, Arg(context, args, 0), readable);
  host::Hash hash;
  for (const char* c = context.target; *c != 0; ++c) hash.Add(*c);
  hash.Add(context.run_id);
  std::vector<host::PsumArgs> calls;
  for (size_t i = 0; i < counts.size(); ++i) {
    const std::string name = "vector " + std::to_string(i);
    const ffi::AnyBuffer in = Arg(context, args, i + 1);
    const ffi::AnyBuffer out = Ret(context, rets, i);
    const ffi::DataType dtype = in.element_type();
    CheckFloat(context, name.c_str(), dtype);
    CheckType(context, ("result " + std::to_string(i)).c_str(), out, dtype);
    const int64_t count = static_cast<int64_t>(in.element_count());
    if (count != counts.begin()[i] || static_cast<int64_t>(out.element_count()) != count) {
      throw ArgumentError(name + " has dims " + DimsText(in) + " and result " + DimsText(out) +
                          ", expected " + std::to_string(counts.begin()[i]) + " elements");
    }
    host::PsumArgs call;
    call.type = ElementTypeOf(dtype);
    call.element_bytes = static_cast<int64_t>(ffi::ByteWidth(dtype));
    const HeapLayout& layout = context.handle.line->layout();
    const int64_t capacity = host::PsumCapacity(layout, call.element_bytes);
    if (capacity == 0 && count > 0) {
      throw ArgumentError("slots of " + std::to_string(layout.slot_bytes) + " bytes hold no part " +
                          "of a vector of " + std::to_string(layout.num_ranks) + " ranks");
    }
    for (int64_t begin = 0; begin < count; begin += capacity) {
      call.count = count - begin < capacity ? count - begin : capacity;
      call.in = static_cast<const char*>(in.untyped_data()) + begin * call.element_bytes;
      call.out = static_cast<char*>(out.untyped_data()) + begin * call.element_bytes;
      call.agreement = hash.Add(static_cast<int64_t>(i))
                           .Add(static_cast<int64_t>(dtype))
                           .Add(begin)
                           .Add(count)
                           .value();
      calls.push_back(call);
    }
  }
  return calls;
}

ffi::Future HostPsum(int32_t device_ordinal, ffi::RunId run_id, ffi::RemainingArgs args,
                     ffi::RemainingRets rets, int64_t group, ffi::Span<const int64_t> counts) {
  CallContext context = {kTarget, group, 0, counts, device_ordinal, run_id.run_id, {}};
  return RunHandler(context, rets, [&]() -> Runner {
    return [handle = context.handle, calls = Read(context, args, rets, true)] {
      host::CallStatus status;
      for (const host::PsumArgs& call : calls) {
        status = host::RunPsum(handle, call);
        if (!status.ok()) break;
      }
      return status;
    };
  });
}

#if defined(JAX_ULYSSES_HAS_CUDA)
ffi::Error CudaPsum(CUstream_st* stream, int32_t device_ordinal, ffi::RemainingArgs args,
                    ffi::RemainingRets rets, int64_t group, ffi::Span<const int64_t> counts) {
  CallContext context = {kTarget, group, 0, counts, device_ordinal, 0, {}};
  return RunEnqueue(context, [&] {
    for (const host::PsumArgs& call : Read(context, args, rets, false)) {
      ffi::Error error = cuda::LaunchPsum(kTarget, context.handle, ProgramRank(args), call, stream);
      if (error.failure()) return error;
    }
    return ffi::Error::Success();
  });
}
#endif

}  // namespace
}  // namespace jax_ulysses

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxUlyssesHostPsum, jax_ulysses::HostPsum,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::DeviceOrdinal>()
                                  .Ctx<xla::ffi::RunId>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<int64_t>("group")
                                  .Attr<xla::ffi::Span<const int64_t>>("counts"));

#if defined(JAX_ULYSSES_HAS_CUDA)
XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxUlyssesCudaPsum, jax_ulysses::CudaPsum,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<CUstream_st*>>()
                                  .Ctx<xla::ffi::DeviceOrdinal>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<int64_t>("group")
                                  .Attr<xla::ffi::Span<const int64_t>>("counts"),
                              {xla::ffi::Traits::kCmdBufferCompatible});
#endif
