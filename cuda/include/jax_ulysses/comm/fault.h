// SPDX-License-Identifier: Apache-2.0
// What is known about a failed call. Plain integers, because the record crosses ranks through the
// heap; the text is made on the host.
#ifndef JAX_ULYSSES_COMM_FAULT_H_
#define JAX_ULYSSES_COMM_FAULT_H_

#include "jax_ulysses/base.h"

namespace jax_ulysses {

enum class Operator : uint32_t {
  kNone = 0,
  kScatter = 1,
  kGather = 2,
  kGemmA2a = 3,
  kA2aGemm = 4,
  kPsum = 5,
};

enum class FaultKind : uint32_t {
  kNone = 0,
  kCreditTimeout = 1,  // peer did not finish an earlier epoch, so no slot became free
  kEntryTimeout = 2,   // peer did not enter this epoch
  kTileTimeout = 3,    // tile of peer did not become ready
  kPieceTimeout = 4,   // pieces of a row block (tile) of peer did not arrive
  kExitTimeout = 5,    // peer did not finish this epoch
  kDisagreement = 6,   // peer entered this epoch with another operator, shape or type
  kThrown = 7,         // the rank itself failed (host exception)
  kClosed = 8,         // the group was destroyed during the call
  kRankMismatch = 9,   // the program counts the devices in another order than the group
};

// `tile` is the tile or row block of a wait, -1 where it means nothing.
struct Fault {
  FaultKind kind = FaultKind::kNone;
  int32_t rank = -1;  // who noticed
  int32_t peer = -1;  // whom it waited for
  Operator op = Operator::kNone;
  int32_t tile = -1;
  uint32_t epoch = 0;
  // kDisagreement: agreement hash of the peer. kRankMismatch: what the program calls this rank.
  uint32_t detail = 0;
};

}  // namespace jax_ulysses

#endif  // JAX_ULYSSES_COMM_FAULT_H_
