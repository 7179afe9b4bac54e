// SPDX-License-Identifier: Apache-2.0
// What the handlers share: reading buffers with errors that name the numbers, and turning the
// outcome of a call into an FFI error.
#ifndef JAX_ULYSSES_FFI_HANDLER_H_
#define JAX_ULYSSES_FFI_HANDLER_H_

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

// The attributes that every target has, and where the call runs.
struct CallContext {
  const char* target;
  int64_t session;
  int64_t token_order;
  ffi::Span<const int64_t> heads;
  int32_t device_ordinal;
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

// Runs `body` (CallStatus()) with exceptions turned into errors; on any error the floating point
// results are filled with NaN, so that nothing can pass for a result.
template <class Body>
ffi::Error RunHandler(CallContext& context, ffi::RemainingRets rets, Body&& body);

void PoisonResults(ffi::RemainingRets rets);
ffi::Error ToError(const host::CallStatus& status);

template <class Body>
ffi::Error RunHandler(CallContext& context, ffi::RemainingRets rets, Body&& body) {
  ffi::Error error = ffi::Error::Success();
  try {
    try {
      context.handle = FindRank(context.session, context.device_ordinal);
    } catch (const std::exception& missing) {
      PoisonResults(rets);
      return ffi::Error(ffi::ErrorCode::kFailedPrecondition,
                        std::string(context.target) + ": " + missing.what());
    }
    error = ToError(body());
  } catch (const ArgumentError& wrong) {
    error = ffi::Error(ffi::ErrorCode::kInvalidArgument,
                       std::string(context.target) + ": " + wrong.what());
  } catch (const std::exception& failure) {
    error =
        ffi::Error(ffi::ErrorCode::kInternal, std::string(context.target) + ": " + failure.what());
  }
  if (error.failure()) PoisonResults(rets);
  return error;
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
