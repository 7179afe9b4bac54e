// SPDX-License-Identifier: Apache-2.0
// What a CopyRing moves. It comes from a `Work`:
//   static constexpr bool kSignals        Signal is called
//   bool Next(Strip&)                     whole warp; false at the end. May wait for other ranks.
//   void Signal(int32_t)                  lane 0; the bytes of the strip with that signal, and of
//                                         all before it, have been written
#ifndef JAX_ULYSSES_EXCHANGE_STRIP_H_
#define JAX_ULYSSES_EXCHANGE_STRIP_H_

#include "jax_ulysses/base.h"

namespace jax_ulysses {

inline constexpr int32_t kNoSignal = -1;

// `rows` rows of `row_bytes` bytes. Everything is a multiple of 16 bytes.
struct Strip {
  const char* source = nullptr;
  char* dest = nullptr;
  int32_t rows = 0;
  int32_t row_bytes = 0;
  int32_t source_pitch = 0;
  int32_t dest_pitch = 0;
  int32_t signal = kNoSignal;
  bool remote = false;  // crosses the link
};

// What of a strip has been loaded into a stage, and where it goes.
struct Chunk {
  char* dest;
  int32_t rows;
  int32_t row_bytes;
  int32_t pitch;
  int32_t signal;
};

}  // namespace jax_ulysses

#endif  // JAX_ULYSSES_EXCHANGE_STRIP_H_
