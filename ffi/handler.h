// SPDX-License-Identifier: Apache-2.0
// What the handlers share: reading buffers with errors that name the numbers, and turning the
// outcome of a call into an FFI error.
#ifndef JAX_ULYSSES_FFI_HANDLER_H_
#define JAX_ULYSSES_FFI_HANDLER_H_

#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "group.h"
#include "host/blocks.h"
#include "host/call.h"
#include "host/numeric.h"
#include "xla/ffi/api/ffi.h"

namespace jax_ulysses {

namespace ffi = xla::ffi;

// Wrong arguments of a call. Handlers turn it into kInvalidArgument.
class ArgumentError : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

class MissingGroupError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The attributes that every target has, and where the call runs.
struct CallContext {
  const char* target;
  int64_t session;
  int64_t token_order;
  ffi::Span<const int64_t> heads;
  int32_t device_ordinal;
  // 0 in CUDA handlers: it differs between processes, and CUDA graphs would keep an old one.
  int64_t run_id;
  RankHandle handle;
};

std::string DimsText(ffi::AnyBuffer buffer);
host::ElementType ElementTypeOf(ffi::DataType dtype);

// Throws ArgumentError with `name`, the dims found and what was expected.
void CheckRank(const CallContext& context, const char* name, ffi::AnyBuffer buffer, size_t rank);
void CheckDims(const CallContext& context, const char* name, ffi::AnyBuffer buffer,
               const std::vector<int64_t>& expected);
void CheckType(const CallContext& context, const char* name, ffi::AnyBuffer buffer,
               ffi::DataType expected);
void CheckFloat(const CallContext& context, const char* name, ffi::DataType dtype);

// The mapping of a call, checked. `head_dim` H and `local_tokens` T come from buffers.
HeadExchange MakeExchange(const CallContext& context, int64_t head_dim, int64_t local_tokens);

// T of a head shard with `global_tokens` rows, checked to divide.
int64_t LocalTokens(const CallContext& context, int64_t global_tokens);

// Fields that all ranks must agree on. The run id keeps ranks of different executions apart.
host::Hash Agreement(const CallContext& context, const host::Shape& shape, ffi::DataType dtype);

// Operand 0 of every target: the program's idea of the rank, int32 [1]. It differs from the group's
// where the mesh of the program lists its devices in another order than that of initialize. Unless
// it is `readable` here, the kernel compares.
void CheckRankOperand(const CallContext& context, ffi::AnyBuffer buffer, bool readable);

// Where that operand lies, after CheckRankOperand.
const int32_t* ProgramRank(ffi::RemainingArgs args);

using Runner = std::function<host::CallStatus()>;

// Fills in context.handle. Throws MissingGroupError.
void FindHandle(CallContext& context);

ffi::Future SubmitCall(const CallContext& context, ffi::RemainingRets rets, Runner run);
ffi::Future Failed(const CallContext& context, ffi::RemainingRets rets, ffi::ErrorCode code,
                   const std::string& text);

// Checks the call with `prepare`, which returns what runs it (a std::function<CallStatus()>), and
// submits that. Exceptions become errors; with any error the floating point results are filled with
// NaN, so that nothing can pass for a result.
template <class Prepare>
ffi::Future RunHandler(CallContext& context, ffi::RemainingRets rets, Prepare&& prepare) {
  try {
    FindHandle(context);
    context.handle.line->CountCall();
    return SubmitCall(context, rets, prepare());
  } catch (const MissingGroupError& missing) {
    return Failed(context, rets, ffi::ErrorCode::kFailedPrecondition, missing.what());
  } catch (const ArgumentError& wrong) {
    return Failed(context, rets, ffi::ErrorCode::kInvalidArgument, wrong.what());
  } catch (const std::exception& failure) {
    return Failed(context, rets, ffi::ErrorCode::kInternal, failure.what());
  }
}

// The same for a handler that only enqueues: `enqueue` returns an ffi::Error. Results lie in device
// memory and stay as they are.
template <class Enqueue>
ffi::Error RunEnqueue(CallContext& context, Enqueue&& enqueue) {
  auto failed = [&](ffi::ErrorCode code, const std::exception& error) {
    return ffi::Error(code, std::string(context.target) + ": " + error.what());
  };
  try {
    FindHandle(context);
    context.handle.line->CountCall();
    return enqueue();
  } catch (const MissingGroupError& missing) {
    return failed(ffi::ErrorCode::kFailedPrecondition, missing);
  } catch (const ArgumentError& wrong) {
    return failed(ffi::ErrorCode::kInvalidArgument, wrong);
  } catch (const std::exception& failure) {
    return failed(ffi::ErrorCode::kInternal, failure);
  }
}

inline ffi::AnyBuffer Arg(const CallContext&, ffi::RemainingArgs args, size_t index) {
  auto buffer = args.get<ffi::AnyBuffer>(index);
  if (!buffer) throw ArgumentError("operand " + std::to_string(index) + " is missing");
  return *buffer;
}

inline ffi::AnyBuffer Ret(const CallContext&, ffi::RemainingRets rets, size_t index) {
  auto buffer = rets.get<ffi::AnyBuffer>(index);
  if (!buffer) throw ArgumentError("result " + std::to_string(index) + " is missing");
  return **buffer;
}

inline void CheckCount(const char* what, size_t found, size_t expected) {
  if (found != expected) {
    throw ArgumentError("has " + std::to_string(found) + " " + what + ", expected " +
                        std::to_string(expected));
  }
}

}  // namespace jax_ulysses

#endif  // JAX_ULYSSES_FFI_HANDLER_H_
