// SPDX-License-Identifier: Apache-2.0
// Compiled once for every line of a kernels.def, with these definitions from the build:
// JU_NAME, JU_ELEMENT, JU_TRANSPOSED, JU_ROWS, JU_COLUMNS, JU_TEST.
#include "kernels/sm90_entry.cuh"

JU_INSTANTIATE(GemmA2a, JU_NAME, JU_ELEMENT, JU_TRANSPOSED, JU_ROWS, JU_COLUMNS, JU_TEST)
