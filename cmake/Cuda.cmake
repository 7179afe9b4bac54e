# SPDX-License-Identifier: Apache-2.0
# The CUDA part. Where there is nvcc, layout, schedule and protocol are compiled for sm_90a, so that
# the headers which the kernels use stay clean device code; where CUTLASS is found as well, the
# kernels are built and JAX_ULYSSES_HAS_CUDA is set.

set(JAX_ULYSSES_HAS_CUDA FALSE)
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
if(JAX_ULYSSES_CUDA STREQUAL "AUTO")
  # Of an older one nobody knows whether it can: a plain install must not fail because of it.
  execute_process(COMMAND ${CMAKE_CUDA_COMPILER} --version OUTPUT_VARIABLE nvcc_version)
  string(REGEX MATCH "release ([0-9]+)" nvcc_version "${nvcc_version}")
  if(NOT CMAKE_MATCH_1 OR CMAKE_MATCH_1 LESS 13)
    message(STATUS "jax_ulysses: nvcc ${nvcc_version} is older than 13, the CUDA part is not built "
                   "(JAX_ULYSSES_CUDA=ON tries)")
    return()
  endif()
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
    # Lambdas of the waits are called on the device, and the maps are constexpr for both sides.
    --expt-relaxed-constexpr
    -Xcompiler=-Wall,-Wextra>)
if(JAX_ULYSSES_WERROR)
  target_compile_options(
    jax_ulysses_device_smoke
    PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:--Werror=all-warnings -Xcompiler=-Werror>)
endif()

include(cuda_kernels)
if(JAX_ULYSSES_CUDA STREQUAL "AUTO" AND NOT JAX_ULYSSES_CUTLASS_INCLUDE)
  find_package(Python3 COMPONENTS Interpreter QUIET)
  execute_process(
    COMMAND ${Python3_EXECUTABLE} -c
            "import importlib.util as u, sys; sys.exit(u.find_spec('cutlass_library') is None)"
    RESULT_VARIABLE no_cutlass ERROR_QUIET)
  if(no_cutlass)
    message(STATUS "jax_ulysses: no CUTLASS, the CUDA kernels are not built "
                   "(install nvidia-cutlass==4.2.0.0 or set JAX_ULYSSES_CUTLASS_INCLUDE)")
    return()
  endif()
endif()
jax_ulysses_add_cuda()
set(JAX_ULYSSES_HAS_CUDA TRUE)
