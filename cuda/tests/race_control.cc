// SPDX-License-Identifier: Apache-2.0
// Built with ThreadSanitizer only: runs one world without one memory-ordering edge, named by the
// argument. ctest expects a race report from each, and none from "complete".
#include <cstdio>
#include <cstring>

#include "world.h"

namespace jax_ulysses::testing {
namespace {

template <uint32_t kRemoved>
void RunWithout(Traffic traffic) {
  WorldOptions options;
  options.epochs = 60;
  options.traffic = traffic;
  // One slot and no handshake: what the credit orders is then not ordered by anything else.
  options.num_slots = 1;
  options.handshake = false;
  World<kRemoved>(options).Run();
}

int Run(const char* edge) {
  if (std::strcmp(edge, "complete") == 0) {
    RunWithout<kEdgeNone>(Traffic::kMixed);
  } else if (std::strcmp(edge, "tile_release") == 0) {
    RunWithout<kEdgeTileRelease>(Traffic::kPull);
  } else if (std::strcmp(edge, "piece_release") == 0) {
    RunWithout<kEdgePieceRelease>(Traffic::kPush);
  } else if (std::strcmp(edge, "done_release") == 0) {
    RunWithout<kEdgeDoneRelease>(Traffic::kPull);
  } else if (std::strcmp(edge, "acquire") == 0) {
    // This binary is built a second time with JAX_ULYSSES_RELAXED_POLLS for it.
    RunWithout<kEdgeAcquire>(Traffic::kMixed);
  } else {
    std::fprintf(stderr, "unknown edge %s\n", edge);
    return 2;
  }
  std::printf("race_control %s: done\n", edge);
  return 0;
}

}  // namespace
}  // namespace jax_ulysses::testing

int main(int argc, char** argv) { return argc == 2 ? jax_ulysses::testing::Run(argv[1]) : 2; }
