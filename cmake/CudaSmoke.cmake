# SPDX-License-Identifier: Apache-2.0
# The CUDA part. For now: layout, schedule and protocol compiled for sm_90a, so that the headers
# which the kernels will use stay clean device code.

if(JAX_ULYSSES_CUDA STREQUAL "OFF")
  return()
endif()
include(CheckLanguage)
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
  if(JAX_ULYSSES_CUDA STREQUAL "ON")
    message(FATAL_ERROR "JAX_ULYSSES_CUDA=ON, but no nvcc was found")
  endif()
  message(STATUS "jax_ulysses: no nvcc, the CUDA part is not built")
  return()
endif()

set(CMAKE_CUDA_ARCHITECTURES 90a)
enable_language(CUDA)
add_library(jax_ulysses_device_smoke STATIC cuda/tests/device_smoke.cu)
target_link_libraries(jax_ulysses_device_smoke PRIVATE jax_ulysses_core)
set_target_properties(jax_ulysses_device_smoke PROPERTIES CUDA_STANDARD 17)
target_compile_options(
  jax_ulysses_device_smoke
  PRIVATE
    $<$<COMPILE_LANGUAGE:CUDA>:-DNDEBUG
    --Werror=all-warnings
    # Lambdas of the waits are called on the device, and the maps are constexpr for both sides.
    --expt-relaxed-constexpr
    -Xcompiler=-Wall,-Wextra,-Werror>)
