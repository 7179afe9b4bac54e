// SPDX-License-Identifier: Apache-2.0
// What ranks tell each other about their heaps: made here, checked there.
#ifndef JAX_ULYSSES_FFI_CUDA_RECORDS_H_
#define JAX_ULYSSES_FFI_CUDA_RECORDS_H_

#include <string>
#include <vector>

#include "heap.h"

namespace jax_ulysses::cuda {

// A member for messages.
std::string Name(const Member& member);

// A record of a heap of this process, without address and handle.
HeapRecord MakeRecord(const Member& member, const HeapLayout& layout, int64_t deadline_ms);
bool IsOwnProcess(const HeapRecord& record);

// Throws unless `records` are one line of ranks that can form a group with `own`: UnavailableError
// for ranks on other hosts, std::runtime_error for everything else.
void CheckRecords(const std::vector<HeapRecord>& records, const HeapRecord& own);

}  // namespace jax_ulysses::cuda

#endif  // JAX_ULYSSES_FFI_CUDA_RECORDS_H_
