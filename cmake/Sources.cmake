# SPDX-License-Identifier: Apache-2.0
# The files of the pure C++ targets. BUILD has the same lists; a test compares them.

set(JAX_ULYSSES_CORE_HEADERS
    cuda/include/jax_ulysses/base.h
    cuda/include/jax_ulysses/comm/edges.h
    cuda/include/jax_ulysses/comm/fault.h
    cuda/include/jax_ulysses/comm/heap_layout.h
    cuda/include/jax_ulysses/comm/host_memory.h
    cuda/include/jax_ulysses/comm/rank_protocol.h
    cuda/include/jax_ulysses/exchange/exchange_order.h
    cuda/include/jax_ulysses/exchange/fault_mailbox.h
    cuda/include/jax_ulysses/exchange/geometry.h
    cuda/include/jax_ulysses/exchange/output_tiles.h
    cuda/include/jax_ulysses/exchange/pull.h
    cuda/include/jax_ulysses/exchange/push.h
    cuda/include/jax_ulysses/exchange/sum_gathered.h
    cuda/include/jax_ulysses/exchange/test_hooks.h
    cuda/include/jax_ulysses/exchange/tile_order.h
    cuda/include/jax_ulysses/heuristics.h
    cuda/include/jax_ulysses/layout/head_exchange.h
    cuda/include/jax_ulysses/layout/token_order.h
    cuda/include/jax_ulysses/launch.h
    cuda/include/jax_ulysses/schedule/a2a_gemm_pieces.h
    cuda/include/jax_ulysses/schedule/gemm_a2a_tiles.h)

set(JAX_ULYSSES_HOST_SOURCES
    ffi/call_order.cc
    ffi/group.cc
    ffi/heap.cc
    ffi/host/a2a_gemm.cc
    ffi/host/call.cc
    ffi/host/exchange.cc
    ffi/host/gemm_a2a.cc
    ffi/host/psum.cc
    ffi/line.cc)
set(JAX_ULYSSES_HOST_HEADERS
    ffi/call_order.h
    ffi/group.h
    ffi/heap.h
    ffi/line.h
    ffi/host/a2a_gemm.h
    ffi/host/blocks.h
    ffi/host/call.h
    ffi/host/exchange.h
    ffi/host/gemm.h
    ffi/host/gemm_a2a.h
    ffi/host/numeric.h
    ffi/host/psum.h
    ffi/host/push.h)

# What touches XLA or Python. Not in BUILD: jaxlib's headers and nanobind come from Python wheels.
set(JAX_ULYSSES_MODULE_SOURCES ffi/a2a_gemm.cc ffi/exchange.cc ffi/gemm_a2a.cc ffi/handler.cc
                               ffi/module.cc ffi/psum.cc)

# With JAX_ULYSSES_HAS_CUDA.
set(JAX_ULYSSES_CUDA_SOURCES ffi/cuda/calls.cc ffi/cuda/cuda_heap.cc ffi/cuda/records.cc)

# Each is cuda/tests/<name>.cc with its own main().
set(JAX_ULYSSES_TESTS
    call_order_test
    exchange_order_test
    group_test
    head_exchange_test
    heuristics_test
    kernel_orders_test
    negative_controls_test
    numeric_test
    operators_test
    protocol_test
    schedule_test)
set(JAX_ULYSSES_TEST_HEADERS cuda/tests/check.h cuda/tests/operators_world.h cuda/tests/world.h)
