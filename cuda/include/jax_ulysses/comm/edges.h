// SPDX-License-Identifier: Apache-2.0
// The edges of the protocol, by name. A build may remove any of them (a template argument of
// RankProtocol): the negative controls, each of which must make a test fail.
#ifndef JAX_ULYSSES_COMM_EDGES_H_
#define JAX_ULYSSES_COMM_EDGES_H_

#include "jax_ulysses/base.h"

namespace jax_ulysses {

enum Edge : uint32_t {
  kEdgeNone = 0,
  kEdgeCreditWait = 1u << 0,     // do not wait for a free slot
  kEdgeDoneRelease = 1u << 1,    // publish "epoch finished" relaxed
  kEdgeEntryWait = 1u << 2,      // do not look at the peers' entries
  kEdgeTileWait = 1u << 3,       // do not wait for a tile
  kEdgeTileRelease = 1u << 4,    // publish a tile relaxed
  kEdgePieceWait = 1u << 5,      // do not wait for pieces
  kEdgePieceRelease = 1u << 6,   // count a piece relaxed
  kEdgeAcquire = 1u << 7,        // no fence after a successful poll
  kEdgeExitWait = 1u << 8,       // leave without waiting for the others to finish
  kEdgeAbortCheck = 1u << 9,     // ignore the abort word while waiting
  kEdgeDeadline = 1u << 10,      // wait for ever
  kEdgeAbortRelease = 1u << 11,  // raise the abort word relaxed
  // Only in kernels.
  kEdgeBulkComplete = 1u << 12,  // signal when a bulk store has been read, not when it is complete
  kEdgeProxyFence = 1u << 13,    // no proxy fence between an acquired flag and a bulk load
  kEdgeHandOff = 1u << 14,       // publisher does not wait for the storing warp
  kEdgeRing = 1u << 15,          // refill a shared-memory stage while it is still being read
  kEdgeArrivals = 1u << 16,      // the producer does not wait for the warp that watches arrivals
  kEdgeTilePlan = 1u << 17,      // neither plans nor their readers are waited for
  kEdgeTurn = 1u << 18,          // teams of consumers do not wait for each other
  kEdgeCopyFull = 1u << 19,      // copy a tile out of shared memory before it has been loaded
  kEdgeCopyRead = 1u << 20,      // load the next tile before the copy has read this one
  // As the template argument: the edges are taken from CallInfo::removed_edges.
  kEdgesAtRunTime = 1u << 31,
};

}  // namespace jax_ulysses

#endif  // JAX_ULYSSES_COMM_EDGES_H_
