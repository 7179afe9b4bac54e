// SPDX-License-Identifier: Apache-2.0
#include "cuda/calls.h"

#include <chrono>
#include <mutex>
#include <thread>
#include <type_traits>

#include "cuda/runtime.h"
#include "jax_ulysses/launch.h"

namespace jax_ulysses::cuda {
namespace {

namespace ffi = xla::ffi;

Status Unsupported(const std::string& text) { return {Status::Code::kUnsupported, text}; }

Status CheckSegments(const HeadExchange& exchange) {
  if (exchange.num_segments <= kMaxFusedSegments) return {};
  return Unsupported("has " + std::to_string(exchange.num_segments) +
                     " segments, the kernels take " + std::to_string(kMaxFusedSegments));
}

Status SetType(host::ElementType type, FusedCall& call) {
  if (type == host::ElementType::kBf16) {
    call.type = ElementType::kBf16;
  } else if (type == host::ElementType::kF16) {
    call.type = ElementType::kF16;
  } else {
    return Unsupported("multiplies bfloat16 and float16 only");
  }
  return {};
}

SumType SumTypeOf(host::ElementType type) {
  switch (type) {
    case host::ElementType::kF32:
      return SumType::kF32;
    case host::ElementType::kBf16:
      return SumType::kBf16;
    case host::ElementType::kF16:
      return SumType::kF16;
    default:
      return SumType::kNone;
  }
}

// The calls, from their arguments; info, mailbox and budget come later.
Status Translate(const host::ExchangeArgs& args, ExchangeCall& call) {
  const HeadExchange& exchange = args.shape.exchange;
  const Status status = CheckSegments(exchange);
  if (!status.ok()) return status;
  call.exchange = exchange;
  call.batch = args.shape.batch;
  call.element_bytes = args.shape.element_bytes;
  call.gather = args.gather;
  bool replicated = false;
  for (int64_t seg = 0; seg < exchange.num_segments; ++seg) {
    replicated = replicated || exchange.is_replicated(seg);
    call.in[seg] = args.in[seg];
    call.out[seg] = args.out[seg];
  }
  if (!args.gather || !args.sum_replicas || !replicated) return {};
  call.sum_replicas = SumTypeOf(args.type);
  if (call.sum_replicas != SumType::kNone) return {};
  return Unsupported("sums replicated heads of float32, bfloat16 and float16 only");
}

Status Translate(const host::GemmA2aArgs& args, GemmA2aCall& call) {
  Status status = CheckSegments(args.shape.exchange);
  if (status.ok()) status = SetType(args.type, call);
  if (!status.ok()) return status;
  call.exchange = args.shape.exchange;
  call.batch = args.shape.batch;
  call.w_transposed = args.w_transposed;
  call.w = args.w;
  call.bias = args.bias;
  call.x = args.x;
  call.depth = args.depth;
  for (int64_t seg = 0; seg < call.exchange.num_segments; ++seg) call.out[seg] = args.out[seg];
  return {};
}

Status Translate(const host::A2aGemmArgs& args, A2aGemmCall& call) {
  Status status = CheckSegments(args.shape.exchange);
  if (status.ok()) status = SetType(args.type, call);
  if (!status.ok()) return status;
  call.exchange = args.shape.exchange;
  call.batch = args.shape.batch;
  call.w_transposed = args.w_transposed;
  call.w = args.w;
  call.bias = args.bias;
  call.width = args.width;
  call.y = args.y;
  call.gathered = args.g;
  for (int64_t seg = 0; seg < call.exchange.num_segments; ++seg) call.parts[seg] = args.parts[seg];
  return {};
}

Status Translate(const host::PsumArgs& args, PsumCall& call) {
  call.type = SumTypeOf(args.type);
  if (call.type == SumType::kNone) {
    return Unsupported("sums vectors of float32, bfloat16 and float16 only");
  }
  call.count = args.count;
  call.in = args.in;
  call.out = args.out;
  return {};
}

ffi::Error ToError(const char* target, const Status& status) {
  ffi::ErrorCode code = ffi::ErrorCode::kInternal;
  switch (status.code) {
    case Status::Code::kOk:
      return ffi::Error::Success();
    case Status::Code::kInvalid:
      code = ffi::ErrorCode::kInvalidArgument;
      break;
    case Status::Code::kUnsupported:
      code = ffi::ErrorCode::kUnimplemented;
      break;
    case Status::Code::kCuda:
      break;
  }
  return ffi::Error(code, std::string(target) + ": " + status.text);
}

template <class Call, class Args>
ffi::Error Enqueue(const char* target, const RankHandle& handle, const int32_t* program_rank,
                   Operator op, const Args& args, CUstream_st* stream) {
  Line& line = *handle.line;
  // Shut waits for this lock: no launch comes after the heaps have been given back.
  std::lock_guard<std::mutex> one_call(line.call_mutex(handle.rank));
  const std::string closed = line.closed_text();
  if (!closed.empty()) return ffi::Error(ffi::ErrorCode::kAborted, closed);
  Call call;
  Status status = Translate(args, call);
  if (!status.ok()) return ToError(target, status);
  call.info = line.MakeCall(handle.rank, op, args.agreement);
  call.info.program_rank = program_rank;
  call.mailbox = line.heap().mailbox(handle.rank);
  call.sm_budget = line.sm_budget();
  if constexpr (std::is_base_of_v<FusedCall, Call>) call.comm_ctas = line.comm_ctas();
  const InjectedFault injected = line.TakeInjected(handle.rank);
  switch (injected.kind) {
    case Injection::kNone:
      break;
    case Injection::kShape:
      call.info.agreement ^= 1;
      break;
    case Injection::kDelay:
      std::this_thread::sleep_for(std::chrono::milliseconds(injected.value));
      break;
    case Injection::kSkip:
    case Injection::kThrow:
      return ffi::Error(ffi::ErrorCode::kInternal,
                        "injected fault: this rank did not take part in the call");
  }
  status = Launch(call, stream);
  // Else the error would turn up in the next call of the CUDA runtime.
  if (status.code == Status::Code::kCuda) (void)cudaGetLastError();
  return ToError(target, status);
}

host::ElementType TypeOf(const std::string& dtype) {
  if (dtype == "float32") return host::ElementType::kF32;
  if (dtype == "float64") return host::ElementType::kF64;
  if (dtype == "bfloat16") return host::ElementType::kBf16;
  if (dtype == "float16") return host::ElementType::kF16;
  return host::ElementType::kOther;
}

template <class Call, class Args>
std::string WhyNot(const Question& question, const Args& args) {
  Call call;
  Status status = Translate(args, call);
  if (status.ok()) {
    call.info.layout = KernelLayout(static_cast<int32_t>(question.num_ranks), question.slot_bytes,
                                    question.num_slots);
    call.sm_budget = static_cast<int32_t>(question.sm_budget);
    status = CanImplement(call);
  }
  return status.text;
}

}  // namespace

ffi::Error LaunchExchange(const char* target, const RankHandle& handle, const int32_t* program_rank,
                          const host::ExchangeArgs& args, CUstream_st* stream) {
  const Operator op = args.gather ? Operator::kGather : Operator::kScatter;
  return Enqueue<ExchangeCall>(target, handle, program_rank, op, args, stream);
}

ffi::Error LaunchGemmA2a(const char* target, const RankHandle& handle, const int32_t* program_rank,
                         const host::GemmA2aArgs& args, CUstream_st* stream) {
  return Enqueue<GemmA2aCall>(target, handle, program_rank, Operator::kGemmA2a, args, stream);
}

ffi::Error LaunchA2aGemm(const char* target, const RankHandle& handle, const int32_t* program_rank,
                         const host::A2aGemmArgs& args, CUstream_st* stream) {
  return Enqueue<A2aGemmCall>(target, handle, program_rank, Operator::kA2aGemm, args, stream);
}

ffi::Error LaunchPsum(const char* target, const RankHandle& handle, const int32_t* program_rank,
                      const host::PsumArgs& args, CUstream_st* stream) {
  return Enqueue<PsumCall>(target, handle, program_rank, Operator::kPsum, args, stream);
}

std::string WhyNot(const Question& question) {
  if (question.heads.size() > static_cast<size_t>(kMaxSegments)) return "too many segments";
  host::Shape shape;
  shape.batch = question.batch;
  shape.element_bytes = question.element_bytes;
  shape.exchange.num_ranks = question.num_ranks;
  shape.exchange.head_dim = question.head_dim;
  shape.exchange.token_order = static_cast<TokenOrder>(question.token_order);
  shape.exchange.local_tokens = question.local_tokens;
  shape.exchange.num_segments = static_cast<int64_t>(question.heads.size());
  for (size_t i = 0; i < question.heads.size(); ++i) shape.exchange.heads[i] = question.heads[i];
  const host::ElementType type = TypeOf(question.dtype);
  if (question.dataflow == "gemm_a2a") {
    host::GemmA2aArgs args;
    args.shape = shape;
    args.type = type;
    args.depth = question.width;
    args.w_transposed = question.w_transposed;
    return WhyNot<GemmA2aCall>(question, args);
  }
  if (question.dataflow == "a2a_gemm") {
    host::A2aGemmArgs args;
    args.shape = shape;
    args.type = type;
    args.width = question.width;
    args.w_transposed = question.w_transposed;
    // Any aligned address says that the result is wanted.
    alignas(16) static char wanted[16];
    args.g = question.want_gathered ? wanted : nullptr;
    return WhyNot<A2aGemmCall>(question, args);
  }
  host::ExchangeArgs args;
  args.shape = shape;
  args.type = type;
  args.gather = question.dataflow == "gather";
  args.sum_replicas = true;  // the stricter case
  return WhyNot<ExchangeCall>(question, args);
}

}  // namespace jax_ulysses::cuda
