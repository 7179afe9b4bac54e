# SPDX-License-Identifier: Apache-2.0
# The CUDA kernels. CUDA must be an enabled language and CMAKE_CUDA_ARCHITECTURES 90a.
#
#   jax_ulysses_add_cuda_kernels(<target> DEF <kernels.def> TEST <true|false>)
#     a static library of one object per line of the .def file
#   jax_ulysses_add_cuda()
#     target jax_ulysses_cuda: the library behind launch.h
#   jax_ulysses_add_gpu_tests(), with JAX_ULYSSES_GPU_TESTS=ON
#     programs launch_test, fused_test, exchange_test, huge_test, fused_bench, ring_bench and, for
#     several GPUs, devices_test and devices_bench; they need H100s or H200s to run
#
# CUTLASS is headers only, from JAX_ULYSSES_CUTLASS_INCLUDE or from the Python package
# nvidia-cutlass of the build environment.

set(JAX_ULYSSES_CUTLASS_INCLUDE "" CACHE PATH "Include folder of CUTLASS 4.2")
option(JAX_ULYSSES_GPU_TESTS "Build the tests and benchmarks of the kernels" OFF)

function(_jax_ulysses_find_cutlass)
  if(JAX_ULYSSES_CUTLASS_INCLUDE)
    return()
  endif()
  find_package(Python3 COMPONENTS Interpreter QUIET)
  # Without importing the package, whose dependencies are not needed.
  execute_process(
    COMMAND
      ${Python3_EXECUTABLE} -c
      "import importlib.util as u; s = u.find_spec('cutlass_library'); print(s.submodule_search_locations[0] + '/source/include' if s else '', end='')"
    OUTPUT_VARIABLE found ERROR_QUIET)
  if(NOT EXISTS "${found}/cutlass/cutlass.h")
    message(FATAL_ERROR "CUTLASS not found: install nvidia-cutlass==4.2.0.0 (--no-deps is enough) "
                        "or set JAX_ULYSSES_CUTLASS_INCLUDE")
  endif()
  set(JAX_ULYSSES_CUTLASS_INCLUDE "${found}" CACHE PATH "Include folder of CUTLASS 4.2" FORCE)
endfunction()

function(_jax_ulysses_cuda_options target)
  target_include_directories(${target} PRIVATE cuda)
  target_include_directories(${target} SYSTEM PRIVATE ${JAX_ULYSSES_CUTLASS_INCLUDE})
  target_link_libraries(${target} PRIVATE jax_ulysses_core)
  set_target_properties(${target} PROPERTIES CUDA_STANDARD 17 CUDA_STANDARD_REQUIRED ON
                                             POSITION_INDEPENDENT_CODE ON)
  # Without NDEBUG ptxas serialises wgmma (C7510) and the kernels run at half speed. It calls that
  # "info", so the launcher looks for it. Spills are errors as well.
  set_target_properties(${target} PROPERTIES CUDA_COMPILER_LAUNCHER
                                             "${PROJECT_SOURCE_DIR}/tools/gpu_strict_compile.sh")
  target_compile_options(
    ${target}
    PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:-DNDEBUG
            -O3
            --expt-relaxed-constexpr
            -Xptxas=--warn-on-spills,--warning-as-error>)
endfunction()

function(jax_ulysses_add_cuda_kernels target)
  cmake_parse_arguments(arg "" "DEF;TEST" "" ${ARGN})
  _jax_ulysses_find_cutlass()
  add_library(${target} STATIC)
  set_property(TARGET ${target} PROPERTY LINKER_LANGUAGE CUDA)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${arg_DEF}")
  file(STRINGS "${arg_DEF}" lines REGEX "^JU_KERNEL")
  foreach(line IN LISTS lines)
    string(REGEX MATCH "^JU_KERNEL\\((.*), (.*), (.*), (.*), (.*)\\)$" matched "${line}")
    if(NOT matched)
      message(FATAL_ERROR "${arg_DEF}: cannot read '${line}'")
    endif()
    set(name "${CMAKE_MATCH_1}${CMAKE_MATCH_2}_${CMAKE_MATCH_3}x${CMAKE_MATCH_4}${CMAKE_MATCH_5}")
    if(arg_TEST)
      set(name "Test${name}")
    endif()
    if(CMAKE_MATCH_1 STREQUAL "A2aGemm")
      set(source cuda/instantiations/a2a_gemm.cu)
    else()
      set(source cuda/instantiations/gemm_a2a.cu)
    endif()
    if(CMAKE_MATCH_2 STREQUAL "Bf16")
      set(element cutlass::bfloat16_t)
    else()
      set(element cutlass::half_t)
    endif()
    if(CMAKE_MATCH_5 STREQUAL "t")
      set(transposed true)
    else()
      set(transposed false)
    endif()
    # One object library each, because they share a source and differ in definitions.
    add_library(${target}_${name} OBJECT ${source})
    _jax_ulysses_cuda_options(${target}_${name})
    target_compile_definitions(
      ${target}_${name}
      PRIVATE JU_NAME=${name} JU_ELEMENT=${element} JU_TRANSPOSED=${transposed}
              JU_ROWS=${CMAKE_MATCH_3} JU_COLUMNS=${CMAKE_MATCH_4} JU_TEST=${arg_TEST})
    target_sources(${target} PRIVATE $<TARGET_OBJECTS:${target}_${name}>)
  endforeach()
endfunction()

function(jax_ulysses_add_cuda)
  find_package(CUDAToolkit REQUIRED)
  jax_ulysses_add_cuda_kernels(
    jax_ulysses_cuda_kernels DEF "${PROJECT_SOURCE_DIR}/cuda/instantiations/kernels.def" TEST false)
  add_library(jax_ulysses_cuda STATIC cuda/kernels/checks.cc cuda/kernels/launch.cc
                                      cuda/kernels/registry.cc cuda/kernels/sm90_exchange.cu)
  _jax_ulysses_cuda_options(jax_ulysses_cuda)
  target_link_libraries(jax_ulysses_cuda PUBLIC jax_ulysses_core CUDA::cudart_static
                                         PRIVATE jax_ulysses_cuda_kernels)
  if(JAX_ULYSSES_GPU_TESTS)
    jax_ulysses_add_gpu_tests()
  endif()
endfunction()

function(jax_ulysses_add_gpu_tests)
  set(def "${PROJECT_SOURCE_DIR}/cuda/tests/gpu/test_kernels.def")
  jax_ulysses_add_cuda_kernels(jax_ulysses_test_kernels DEF "${def}" TEST true)
  add_library(jax_ulysses_test_support STATIC cuda/kernels/checks.cc
                                              cuda/tests/gpu/entry_exchange.cu)
  _jax_ulysses_cuda_options(jax_ulysses_test_support)
  foreach(program IN ITEMS fused_test exchange_test huge_test fused_bench devices_test devices_bench
                           pure_bench)
    add_executable(${program} cuda/tests/gpu/${program}.cu)
    _jax_ulysses_cuda_options(${program})
    target_link_libraries(${program} PRIVATE jax_ulysses_test_kernels jax_ulysses_test_support)
  endforeach()
  add_executable(ring_bench cuda/tests/gpu/ring_bench.cu)
  _jax_ulysses_cuda_options(ring_bench)
  add_executable(launch_test cuda/tests/gpu/launch_test.cu)
  _jax_ulysses_cuda_options(launch_test)
  target_link_libraries(launch_test PRIVATE jax_ulysses_cuda)
endfunction()
