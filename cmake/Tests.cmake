# SPDX-License-Identifier: Apache-2.0
# C++ tests, under ctest. JAX_ULYSSES_TEST_SCALE=10 in the environment runs them ten times as long.

foreach(name IN LISTS JAX_ULYSSES_TESTS)
  add_executable(${name} cuda/tests/${name}.cc)
  target_include_directories(${name} PRIVATE cuda/tests)
  target_link_libraries(${name} PRIVATE jax_ulysses_host jax_ulysses_options)
  # Value-based controls would only be slower under a sanitizer, and their removed edges are races.
  if(NOT (JAX_ULYSSES_SANITIZE AND name STREQUAL "negative_controls_test"))
    add_test(NAME ${name} COMMAND ${name})
    set_tests_properties(${name} PROPERTIES TIMEOUT 600 ENVIRONMENT
                                            "TSAN_OPTIONS=halt_on_error=1 exitcode=66")
  endif()
endforeach()

# Each memory-ordering edge removed: ThreadSanitizer must report the race, and none when complete.
if(JAX_ULYSSES_SANITIZE STREQUAL "thread")
  add_executable(race_control cuda/tests/race_control.cc)
  add_executable(race_control_relaxed cuda/tests/race_control.cc)
  target_compile_definitions(race_control_relaxed PRIVATE JAX_ULYSSES_RELAXED_POLLS)
  foreach(name IN ITEMS race_control race_control_relaxed)
    target_include_directories(${name} PRIVATE cuda/tests)
    target_link_libraries(${name} PRIVATE jax_ulysses_host jax_ulysses_options)
  endforeach()
  add_test(NAME race_control_complete COMMAND race_control complete)
  foreach(edge IN ITEMS tile_release piece_release done_release)
    add_test(NAME race_control_${edge} COMMAND race_control ${edge})
    set_tests_properties(race_control_${edge} PROPERTIES PASS_REGULAR_EXPRESSION "data race")
  endforeach()
  add_test(NAME race_control_acquire COMMAND race_control_relaxed acquire)
  set_tests_properties(race_control_acquire PROPERTIES PASS_REGULAR_EXPRESSION "data race")
endif()
