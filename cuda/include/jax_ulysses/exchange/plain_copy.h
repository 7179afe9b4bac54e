// SPDX-License-Identifier: Apache-2.0
// Plain copies by a warp, for what bulk copies cannot do.
#ifndef JAX_ULYSSES_EXCHANGE_PLAIN_COPY_H_
#define JAX_ULYSSES_EXCHANGE_PLAIN_COPY_H_

#include "jax_ulysses/exchange/strip.h"
#include "jax_ulysses/exchange/test_hooks.h"
#include "jax_ulysses/ptx/async.h"

namespace jax_ulysses {

template <class Unit>
JU_D void CopyRow(char* dest, const char* source, int32_t bytes) {
  for (int32_t i = static_cast<int32_t>(threadIdx.x % 32); i < bytes / int32_t{sizeof(Unit)};
       i += 32) {
    reinterpret_cast<Unit*>(dest)[i] = reinterpret_cast<const Unit*>(source)[i];
  }
}

template <bool kTest, class Work>
JU_D void CopyPlain(Work& work, const TestHooks& hooks) {
  Strip strip;
  while (work.Next(strip)) {
    const bool first =
        TestHooks::FlagsFirst<kTest>(hooks) || TestHooks::Removed<kTest>(hooks, kEdgeHandOff);
    auto signal = [&] {
      __syncwarp();
      if (strip.signal != kNoSignal && threadIdx.x % 32 == 0) work.Signal(strip.signal);
    };
    if (first) signal();
    if constexpr (kTest) {
      if (strip.remote) hooks.Throttle(strip.rows * strip.row_bytes, threadIdx.x % 32 == 0);
    }
    for (int32_t row = 0; row < strip.rows; ++row) {
      char* dest = strip.dest + static_cast<int64_t>(row) * strip.dest_pitch;
      const char* source = strip.source + static_cast<int64_t>(row) * strip.source_pitch;
      const uint64_t bits = reinterpret_cast<uint64_t>(dest) | reinterpret_cast<uint64_t>(source) |
                            static_cast<uint64_t>(strip.row_bytes);
      if (bits % 8 == 0) {
        CopyRow<uint64_t>(dest, source, strip.row_bytes);
      } else if (bits % 4 == 0) {
        CopyRow<uint32_t>(dest, source, strip.row_bytes);
      } else if (bits % 2 == 0) {
        CopyRow<uint16_t>(dest, source, strip.row_bytes);
      } else {
        CopyRow<uint8_t>(dest, source, strip.row_bytes);
      }
    }
    // The release of lane 0 covers the stores of all lanes, which are before the barrier.
    if (!first) signal();
  }
  __syncwarp();
}

}  // namespace jax_ulysses

#endif  // JAX_ULYSSES_EXCHANGE_PLAIN_COPY_H_
