// SPDX-License-Identifier: Apache-2.0
// Shapes of the value tests: tails in every dimension, both token orders, batches, replicas.
#ifndef JAX_ULYSSES_TESTS_GPU_TEST_SHAPES_H_
#define JAX_ULYSSES_TESTS_GPU_TEST_SHAPES_H_

#include "world.cuh"

namespace jax_ulysses::testing {

inline std::vector<Shape> GemmA2aShapes() {
  std::vector<Shape> shapes;
  auto add = [&](int p, int b, int t, std::vector<int> heads, int h, int d, bool zigzag = false,
                 bool bias = false) {
    Shape s;
    s.ranks = p, s.batch = b, s.tokens = t, s.heads = std::move(heads), s.head_dim = h;
    s.model = d, s.zigzag = zigzag, s.bias = bias;
    shapes.push_back(s);
  };
  for (int p : {2, 4, 8}) {
    add(p, 1, 512, {16, 8, 8}, 128, 1024);
    add(p, 2, 256, {16, 8, 8}, 128, 512, false, true);  // bias, tiles follow runs
    add(p, 2, 256, {16, 8, 8}, 64, 512, true, true);    // zigzag, tiles follow runs
    add(p, 1, 1000, {8, 8}, 80, 264, true, true);       // zigzag, tails everywhere
    add(p, 1, 512, {8, 8, 8}, 64, 512, false, true);    // P = 8: tiles of three destinations
    add(p, 2, 130, {8, 8, 8}, 96, 200, false, true);    // rows straddle batches
    add(p, 3, 6, {16}, 64, 64, true);                   // tiny
    add(p, 1, 1, {8}, 128, 128);                        // one token
  }
  add(8, 1, 512, {16, 4, 4}, 128, 1024, false, true);  // replicas
  add(4, 2, 150, {8, 2, 2}, 64, 320, true, true);
  add(8, 1, 300, {8, 1, 1}, 128, 512, false, true);
  add(4, 1, 2048, {32, 8, 8}, 128, 4096);
  return shapes;
}

inline std::vector<Shape> A2aGemmShapes() {
  std::vector<Shape> shapes;
  auto add = [&](int p, int b, int t, std::vector<int> heads, int h, int d, bool zigzag = false,
                 bool bias = false, bool gathered = false) {
    Shape s;
    s.ranks = p, s.batch = b, s.tokens = t, s.heads = std::move(heads), s.head_dim = h;
    s.model = d, s.zigzag = zigzag, s.bias = bias, s.gathered = gathered;
    shapes.push_back(s);
  };
  for (int p : {2, 4, 8}) {
    add(p, 1, 512, {16}, 128, 1024);
    add(p, 2, 256, {16}, 128, 512, false, true, true);
    add(p, 2, 256, {16}, 64, 512, true, true, true);
    add(p, 1, 1000, {8}, 80, 264, true, true);
    add(p, 2, 130, {8}, 96, 200, false, true, true);
    add(p, 1, 512, {16, 8, 8}, 128, 1024, false, false, true);  // backward of QKV
    add(p, 3, 6, {16}, 64, 64, true);
    add(p, 1, 1, {8}, 128, 128);
  }
  // Replicas: more K blocks over the same rows of w, and sums in the gathered operand.
  add(8, 1, 512, {16, 4, 4}, 128, 1024);
  add(8, 1, 512, {16, 4, 4}, 128, 1024, false, false, true);
  add(4, 2, 150, {8, 2, 2}, 64, 320, true, true, true);
  add(8, 2, 256, {8, 1, 2}, 96, 256, true, false, true);
  add(4, 1, 2048, {32}, 128, 4096);
  // Each CTA copies some of the steps of K, of several tiles.
  add(2, 1, 2048, {16, 8, 8}, 128, 2560, false, false, true);
  add(4, 1, 1000, {8, 4, 4}, 80, 1304, true, true, true);
  return shapes;
}

}  // namespace jax_ulysses::testing

#endif  // JAX_ULYSSES_TESTS_GPU_TEST_SHAPES_H_
