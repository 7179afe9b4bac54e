// SPDX-License-Identifier: Apache-2.0
// The CUDA operators as plain C++: describe a call of one rank, ask whether it can be done, launch
// it. No CUTLASS, no XLA, no allocation, no synchronisation, no read of device memory.
#ifndef JAX_ULYSSES_LAUNCH_H_
#define JAX_ULYSSES_LAUNCH_H_

#include <string>

#include "jax_ulysses/base.h"
#include "jax_ulysses/comm/rank_protocol.h"
#include "jax_ulysses/exchange/fault_mailbox.h"
#include "jax_ulysses/exchange/geometry.h"
#include "jax_ulysses/exchange/test_hooks.h"
#include "jax_ulysses/layout/head_exchange.h"

struct CUstream_st;

namespace jax_ulysses {

enum class ElementType : int32_t { kBf16 = 0, kF16 = 1 };

// Element types that can be summed; kNone where bytes are only moved.
enum class SumType : int32_t { kNone = 0, kF32 = 1, kBf16 = 2, kF16 = 3 };

// Output tile of a CTA. kAuto lets heuristics.h choose.
enum class TilePolicy : int32_t {
  kAuto = 0,
  k128x256 = 1,
  k128x128 = 2,
  k64x128 = 3,
  k128x192 = 4
};

// Why something was refused or failed; empty is success.
struct Status {
  enum class Code {
    kOk,
    kInvalid,      // the arguments contradict each other
    kUnsupported,  // another implementation has to do this
    kCuda,         // a CUDA call failed
  };
  Code code = Code::kOk;
  std::string text;
  bool ok() const { return code == Code::kOk; }
};

// What both fused operators need. `info.rank` is the rank.
struct FusedCall {
  CallInfo info;
  HeadExchange exchange;
  int64_t batch = 1;  // B
  ElementType type = ElementType::kBf16;
  bool w_transposed = false;
  const void* w = nullptr;
  const void* bias = nullptr;       // or null
  FaultMailbox* mailbox = nullptr;  // or null; an address that the device can write
  TilePolicy tile = TilePolicy::kAuto;
  int32_t sm_budget = 0;    // CTAs, one an SM; 0 takes all SMs
  int32_t comm_ctas = 0;    // CTAs whose spare warp communicates; 0 chooses
  bool communicate = true;  // false: a plain GEMM on whatever lies in the slots
  bool compute = true;      // false, for benchmarks: a2a_gemm only pushes
  TestHooks hooks;          // ignored by kernels built without them
};

// y = x @ w + bias; the columns of y go to the ranks that own their heads.
struct GemmA2aCall : FusedCall {
  const void* x = nullptr;            // [B,T,D]
  int64_t depth = 0;                  // D
  void* out[kMaxFusedSegments] = {};  // per segment [B,S,local,H]
};

// y = gathered @ w + bias, where rank r contributes the heads that it holds.
struct A2aGemmCall : FusedCall {
  const void* parts[kMaxFusedSegments] = {};  // per segment [B,S,local,H]
  int64_t width = 0;                          // N: columns of y
  void* y = nullptr;                          // [B,T,N]
  void* gathered = nullptr;                   // [B,T,C], or null if it is not wanted
};

// The exchange alone: sequence shards [B,T,M,H] to head shards [B,S,local,H], or back.
struct ExchangeCall {
  CallInfo info;
  HeadExchange exchange;
  int64_t batch = 1;
  int64_t element_bytes = 1;
  bool gather = false;
  SumType sum_replicas = SumType::kNone;  // of a gather: adds the replicas of a head
  const void* in[kMaxFusedSegments] = {};
  void* out[kMaxFusedSegments] = {};
  FaultMailbox* mailbox = nullptr;
  int32_t sm_budget = 0;
  TestHooks hooks;
};

// Sum over the ranks of a vector, in place of a collective where ranks share a GPU. `out` is not
// `in`. Every rank gets the same bits.
struct PsumCall {
  CallInfo info;
  SumType type = SumType::kF32;
  int64_t count = 0;
  const void* in = nullptr;
  void* out = nullptr;
  FaultMailbox* mailbox = nullptr;
  int32_t sm_budget = 0;
  TestHooks hooks;
};

// Bytes of one slot that the call needs.
int64_t SlotBytes(const GemmA2aCall& call);
int64_t SlotBytes(const A2aGemmCall& call);
int64_t SlotBytes(const ExchangeCall& call);
int64_t SlotBytes(const PsumCall& call);

// Whether Launch would do it, with the reason if not. Needs shapes only: pointers may be null.
Status CanImplement(const GemmA2aCall& call);
Status CanImplement(const A2aGemmCall& call);
Status CanImplement(const ExchangeCall& call);
Status CanImplement(const PsumCall& call);

// Enqueues the call on `stream` of the current device.
Status Launch(const GemmA2aCall& call, CUstream_st* stream);
Status Launch(const A2aGemmCall& call, CUstream_st* stream);
Status Launch(const ExchangeCall& call, CUstream_st* stream);
Status Launch(const PsumCall& call, CUstream_st* stream);

// Loads every kernel on the current device. Before the first launch of a group: loading lazily
// while a peer spins can deadlock in the driver.
Status Prepare();

}  // namespace jax_ulysses

#endif  // JAX_ULYSSES_LAUNCH_H_
