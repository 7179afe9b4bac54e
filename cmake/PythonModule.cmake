# SPDX-License-Identifier: Apache-2.0
# The extension module jax_ulysses.ffi._targets: one binary for CPython 3.12 and later.

# SABIModule is found only where the interpreter's headers are complete; without it nanobind would
# quietly build a module for one version.
find_package(Python 3.12 REQUIRED COMPONENTS Interpreter Development.Module
                                             Development.SABIModule)
execute_process(
  COMMAND "${Python_EXECUTABLE}" -m nanobind --cmake_dir
  OUTPUT_STRIP_TRAILING_WHITESPACE
  OUTPUT_VARIABLE nanobind_ROOT COMMAND_ERROR_IS_FATAL ANY)
find_package(nanobind CONFIG REQUIRED)

# From jaxlib without importing jax, which need not be importable in a build environment.
execute_process(
  COMMAND
    "${Python_EXECUTABLE}" -c
    "import importlib.util as u, os; print(os.path.join(u.find_spec('jaxlib').submodule_search_locations[0], 'include'))"
  OUTPUT_STRIP_TRAILING_WHITESPACE
  OUTPUT_VARIABLE JAX_ULYSSES_FFI_INCLUDE_DIR COMMAND_ERROR_IS_FATAL ANY)
if(NOT EXISTS "${JAX_ULYSSES_FFI_INCLUDE_DIR}/xla/ffi/api/ffi.h")
  message(FATAL_ERROR "no xla/ffi/api/ffi.h in ${JAX_ULYSSES_FFI_INCLUDE_DIR}")
endif()

if(JAX_ULYSSES_HAS_CUDA)
  list(APPEND JAX_ULYSSES_MODULE_SOURCES ${JAX_ULYSSES_CUDA_SOURCES})
endif()
nanobind_add_module(_targets STABLE_ABI NB_STATIC NB_DOMAIN jax_ulysses
                    ${JAX_ULYSSES_MODULE_SOURCES})
target_include_directories(_targets SYSTEM PRIVATE "${JAX_ULYSSES_FFI_INCLUDE_DIR}")
target_link_libraries(_targets PRIVATE jax_ulysses_host jax_ulysses_options)
if(JAX_ULYSSES_HAS_CUDA)
  target_compile_definitions(_targets PRIVATE JAX_ULYSSES_HAS_CUDA)
  # The static CUDA runtime finds the driver when it is first used, so the module can be imported
  # where there is none. Its symbols stay inside: XLA brings a CUDA runtime of its own.
  target_link_libraries(_targets PRIVATE jax_ulysses_cuda CUDA::cudart_static)
  target_link_options(_targets PRIVATE -Wl,--exclude-libs,ALL)
endif()
# nanobind's own headers are not written for these two.
set_source_files_properties(ffi/module.cc PROPERTIES COMPILE_OPTIONS "-Wno-shadow;-Wno-conversion")
nanobind_add_stub(
  _targets_stub
  MODULE _targets
  OUTPUT _targets.pyi
  PYTHON_PATH $<TARGET_FILE_DIR:_targets>
  DEPENDS _targets)

install(TARGETS _targets LIBRARY DESTINATION jax_ulysses/ffi)
install(FILES "${CMAKE_CURRENT_BINARY_DIR}/_targets.pyi" DESTINATION jax_ulysses/ffi)
