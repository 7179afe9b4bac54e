// SPDX-License-Identifier: Apache-2.0
#include "handler.h"

#include <sstream>

namespace jax_ulysses {
namespace {

std::string DimsText(const std::vector<int64_t>& dims) {
  std::string text = "[";
  for (size_t i = 0; i < dims.size(); ++i) text += (i ? "," : "") + std::to_string(dims[i]);
  return text + "]";
}

std::vector<int64_t> Dims(ffi::AnyBuffer buffer) {
  const auto dims = buffer.dimensions();
  return {dims.begin(), dims.end()};
}

std::string TypeText(ffi::DataType dtype) {
  std::ostringstream text;
  text << dtype;
  return text.str();
}

// A result buffer, without the call frame.
struct Output {
  host::ElementType type;
  void* data;
  int64_t count;

  void Poison() const { host::FillNan(type, data, count); }
};

std::vector<Output> Outputs(ffi::RemainingRets rets) {
  std::vector<Output> outputs;
  for (size_t i = 0; i < rets.size(); ++i) {
    auto buffer = rets.get<ffi::AnyBuffer>(i);
    if (!buffer) continue;
    outputs.push_back({ElementTypeOf((**buffer).element_type()), (**buffer).untyped_data(),
                       static_cast<int64_t>((**buffer).element_count())});
  }
  return outputs;
}

ffi::ErrorCode Code(host::CallError error) {
  switch (error) {
    case host::CallError::kSlotTooSmall:
      return ffi::ErrorCode::kResourceExhausted;
    case host::CallError::kAborted:
      return ffi::ErrorCode::kAborted;
    case host::CallError::kInternal:
    case host::CallError::kNone:
      break;
  }
  return ffi::ErrorCode::kInternal;
}

}  // namespace

std::string DimsText(ffi::AnyBuffer buffer) { return DimsText(Dims(buffer)); }

host::ElementType ElementTypeOf(ffi::DataType dtype) {
  switch (dtype) {
    case ffi::DataType::F32:
      return host::ElementType::kF32;
    case ffi::DataType::F64:
      return host::ElementType::kF64;
    case ffi::DataType::BF16:
      return host::ElementType::kBf16;
    case ffi::DataType::F16:
      return host::ElementType::kF16;
    default:
      return host::ElementType::kOther;
  }
}

void CheckRank(const CallContext&, const char* name, ffi::AnyBuffer buffer, size_t rank) {
  if (buffer.dimensions().size() == rank) return;
  throw ArgumentError(std::string(name) + " has dims " + DimsText(buffer) + ", expected " +
                      std::to_string(rank) + " dims");
}

void CheckDims(const CallContext&, const char* name, ffi::AnyBuffer buffer,
               const std::vector<int64_t>& expected) {
  if (Dims(buffer) == expected) return;
  throw ArgumentError(std::string(name) + " has dims " + DimsText(buffer) + ", expected " +
                      DimsText(expected));
}

void CheckType(const CallContext&, const char* name, ffi::AnyBuffer buffer,
               ffi::DataType expected) {
  if (buffer.element_type() == expected) return;
  throw ArgumentError(std::string(name) + " has dtype " + TypeText(buffer.element_type()) +
                      ", expected " + TypeText(expected));
}

void CheckFloat(const CallContext&, const char* name, ffi::DataType dtype) {
  if (ElementTypeOf(dtype) != host::ElementType::kOther) return;
  throw ArgumentError(std::string(name) + " has dtype " + TypeText(dtype) +
                      ", expected F32, BF16, F16 or F64");
}

void CheckRankOperand(const CallContext& context, ffi::AnyBuffer buffer, bool readable) {
  CheckType(context, "rank", buffer, ffi::DataType::S32);
  CheckDims(context, "rank", buffer, {1});
  if (!readable) return;
  const int32_t rank = *static_cast<const int32_t*>(buffer.untyped_data());
  if (rank == context.handle.rank) return;
  const std::string text =
      "device " + std::to_string(context.device_ordinal) + " is rank " + std::to_string(rank) +
      " in this program and rank " + std::to_string(context.handle.rank) +
      " in its group: the program runs on a mesh whose device order differs from the one given to "
      "initialize";
  // Ranks that are right would else wait for this one.
  CloseLine(context.handle.line, std::string(context.target) + ": " + text + ".");
  throw ArgumentError(text);
}

const int32_t* ProgramRank(ffi::RemainingArgs args) {
  return static_cast<const int32_t*>(args.get<ffi::AnyBuffer>(0)->untyped_data());
}

HeadExchange MakeExchange(const CallContext& context, int64_t head_dim, int64_t local_tokens) {
  HeadExchange exchange;
  exchange.num_ranks = context.handle.line->layout().num_ranks;
  exchange.head_dim = head_dim;
  exchange.local_tokens = local_tokens;
  exchange.token_order = static_cast<TokenOrder>(context.token_order);
  exchange.num_segments = static_cast<int64_t>(context.heads.size());
  if (context.heads.size() <= static_cast<size_t>(kMaxSegments)) {
    for (size_t i = 0; i < context.heads.size(); ++i) exchange.heads[i] = context.heads[i];
  }
  const std::string heads =
      DimsText(std::vector<int64_t>(context.heads.begin(), context.heads.end()));
  switch (exchange.Check()) {
    case LayoutError::kNone:
      break;
    case LayoutError::kNumRanks:
      throw ArgumentError("P is " + std::to_string(exchange.num_ranks));
    case LayoutError::kHeadDim:
      throw ArgumentError("head dimension H is " + std::to_string(head_dim));
    case LayoutError::kSegments:
      throw ArgumentError("heads " + heads + " has " + std::to_string(context.heads.size()) +
                          " segments, expected 1 to " + std::to_string(kMaxSegments));
    case LayoutError::kHeads:
      throw ArgumentError("heads " + heads + " with P=" + std::to_string(exchange.num_ranks) +
                          ": every count must be a multiple or a divisor of P");
    case LayoutError::kTokens:
      throw ArgumentError("T is " + std::to_string(local_tokens));
    case LayoutError::kZigzagOdd:
      throw ArgumentError("zigzag token order needs an even T, T is " +
                          std::to_string(local_tokens));
    case LayoutError::kTokenOrder:
      throw ArgumentError("token_order is " + std::to_string(context.token_order) +
                          ", expected 0 (contiguous) or 1 (zigzag)");
  }
  return exchange;
}

int64_t LocalTokens(const CallContext& context, int64_t global_tokens) {
  const int64_t ranks = context.handle.line->layout().num_ranks;
  if (global_tokens % ranks != 0) {
    throw ArgumentError("S=" + std::to_string(global_tokens) +
                        " is no multiple of P=" + std::to_string(ranks));
  }
  return global_tokens / ranks;
}

host::Hash Agreement(const CallContext& context, const host::Shape& shape, ffi::DataType dtype) {
  host::Hash hash;
  for (const char* c = context.target; *c != 0; ++c) hash.Add(*c);
  hash.Add(context.run_id).Add(static_cast<int64_t>(dtype)).Add(context.token_order);
  hash.Add(shape.batch).Add(shape.exchange.local_tokens).Add(shape.exchange.head_dim);
  hash.Add(shape.exchange.num_segments);
  for (int64_t m : context.heads) hash.Add(m);
  return hash;
}

void FindHandle(CallContext& context) {
  try {
    context.handle = FindRank(context.session, context.device_ordinal, context.run_id);
  } catch (const std::exception& missing) {
    throw MissingGroupError(missing.what());
  }
}

ffi::Future Failed(const CallContext& context, ffi::RemainingRets rets, ffi::ErrorCode code,
                   const std::string& text) {
  for (const Output& output : Outputs(rets)) output.Poison();
  ffi::Promise promise;
  ffi::Future future(promise);
  promise.SetError(ffi::Error(code, std::string(context.target) + ": " + text));
  return future;
}

ffi::Future SubmitCall(const CallContext& context, ffi::RemainingRets rets, Runner run) {
  ffi::Promise promise;
  ffi::Future future(promise);
  // XLA keeps an attribute's value once per call site of an executable, and hands every device and
  // execution the same address: that is the site's identity. Tests would see if it changed.
  const CallKey key = {context.run_id, context.heads.begin()};
  // Nothing of the call frame outlives the handler but the buffers themselves.
  Submit(context.handle, key,
         [run = std::move(run), outputs = Outputs(rets), promise, target = context.target] {
           host::CallStatus status;
           try {
             status = run();
           } catch (const std::exception& failure) {
             status = {host::CallError::kInternal, std::string(target) + ": " + failure.what()};
           }
           if (!status.ok()) {
             for (const Output& output : outputs) output.Poison();
           }
           return [promise, status]() mutable {
             if (status.ok()) {
               promise.SetAvailable();
             } else {
               promise.SetError(ffi::Error(Code(status.error), status.text));
             }
           };
         });
  return future;
}

}  // namespace jax_ulysses
