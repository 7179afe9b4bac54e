# SPDX-License-Identifier: Apache-2.0
# Compile options of our own targets. Not for headers of others: those are SYSTEM includes.

add_library(jax_ulysses_options INTERFACE)
target_compile_options(
  jax_ulysses_options
  INTERFACE
    $<$<COMPILE_LANGUAGE:CXX>:-Wall
    -Wextra
    -Wconversion
    -Wno-sign-conversion
    -Wshadow
    $<$<BOOL:${JAX_ULYSSES_WERROR}>:-Werror>
    # One rounding per operation on every machine: results must not depend on the target's FMA.
    -ffp-contract=off
    -fvisibility=hidden>)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
# The handlers' matrix products are plain loops; they need the vectoriser.
string(REPLACE "-O2" "-O3" CMAKE_CXX_FLAGS_RELWITHDEBINFO "${CMAKE_CXX_FLAGS_RELWITHDEBINFO}")

if(JAX_ULYSSES_SANITIZE)
  add_compile_options(-fsanitize=${JAX_ULYSSES_SANITIZE} -g -fno-omit-frame-pointer)
  add_link_options(-fsanitize=${JAX_ULYSSES_SANITIZE})
endif()
