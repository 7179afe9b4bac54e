// SPDX-License-Identifier: Apache-2.0
// Compiled for the device, never run: every header that kernels share with the host must stay clean
// device code. The memory operations here are the plainest that nvcc accepts; the kernels bring
// their own.
#include "jax_ulysses/comm/rank_protocol.h"
#include "jax_ulysses/schedule/a2a_gemm_pieces.h"
#include "jax_ulysses/schedule/gemm_a2a_tiles.h"

namespace jax_ulysses {

struct SmokeMemory {
  template <class T>
  __device__ static T LoadRelaxed(const T* p) {
    return *static_cast<const volatile T*>(p);
  }
  __device__ static void StoreRelaxed(uint32_t* p, uint32_t v) {
    *static_cast<volatile uint32_t*>(p) = v;
  }
  template <class T>
  __device__ static void StoreRelease(T* p, T v) {
    __threadfence_system();
    *static_cast<volatile T*>(p) = v;
  }
  __device__ static void AddRelaxed(uint32_t* p, uint32_t v) { atomicAdd_system(p, v); }
  __device__ static void AddRelease(uint32_t* p, uint32_t v) {
    __threadfence_system();
    atomicAdd_system(p, v);
  }
  __device__ static uint32_t Exchange(uint32_t* p, uint32_t v) { return atomicExch(p, v); }
  __device__ static void AcquireFence() { __threadfence_system(); }
  __device__ static void Pause(int) { __nanosleep(64); }
  __device__ static uint64_t NowNs() {
    uint64_t now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
  }
};

__global__ void SmokeKernel(CallInfo call, HeadExchange exchange, int64_t batch, int64_t* out) {
  RankProtocol<SmokeMemory> protocol(call);
  if (!protocol.WaitSlotFree()) return;
  protocol.PublishEntry();
  if (!protocol.WaitEntries()) return;
  const GemmA2aTiles tiles(exchange, call.rank, batch, 128, 128, 4);
  const A2aGemmPieces pieces(exchange.num_ranks, call.rank, batch * exchange.local_tokens, 128, 16,
                             4);
  for (int64_t i = 0; i < tiles.num_tiles(); ++i) {
    const GemmTile tile = tiles.Made(i);
    protocol.PublishTile(static_cast<int>(tile.dest), tile.flag);
    *out += exchange.Owner(tile.fused_begin).first_rank;
  }
  for (int64_t i = 0; i < tiles.num_pulls(); ++i) {
    const GemmTile tile = tiles.Pulled(i);
    if (!protocol.WaitTile(static_cast<int>(tile.source), tile.flag)) return;
  }
  for (int64_t i = 0; i < pieces.num_pieces(); ++i) {
    const Piece piece = pieces.Pushed(i);
    protocol.PublishPiece(static_cast<int>(piece.dest), piece.block);
    *out += exchange.tokens().GlobalRow(piece.dest, piece.row_begin);
  }
  for (int64_t source = 0; source < exchange.num_ranks; ++source) {
    if (!protocol.WaitPieces(static_cast<int>(source), 0, 1)) return;
    protocol.TakePieces(static_cast<int>(source), 0, 1);
  }
  if (!protocol.Finish(true)) *out = protocol.ReadFault().peer;
}

}  // namespace jax_ulysses
