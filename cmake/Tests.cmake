# SPDX-License-Identifier: Apache-2.0
# C++ tests, under ctest. JAX_ULYSSES_TEST_SCALE=10 in the environment runs them ten times as long.

function(jax_ulysses_test name)
  add_executable(${name} cuda/tests/${name}.cc)
  target_include_directories(${name} PRIVATE cuda/tests)
  target_link_libraries(${name} PRIVATE jax_ulysses_host jax_ulysses_options)
  add_test(NAME ${name} COMMAND ${name})
  set_tests_properties(${name} PROPERTIES TIMEOUT 600)
endfunction()

jax_ulysses_test(head_exchange_test)
jax_ulysses_test(schedule_test)
