// SPDX-License-Identifier: Apache-2.0
// Test builds of the GEMM -> all-to-all kernels: with hooks, and with a whole world in one launch.
#include "kernels/sm90_entry.cuh"

#ifndef JU_NAME
#error "JU_NAME, JU_ELEMENT, JU_TRANSPOSED, JU_ROWS and JU_COLUMNS come from the build"
#endif
JU_INSTANTIATE(GemmA2a, JU_NAME, JU_ELEMENT, JU_TRANSPOSED, JU_ROWS, JU_COLUMNS, true)
