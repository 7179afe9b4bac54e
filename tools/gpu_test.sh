#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Builds and runs the GPU tests of the kernels (all ranks on one GPU; an H100 or H200). Every
# program has a time limit. Usage: tools/gpu_test.sh [quick|full|bench|devices] [build folder]
set -u
what=${1:-quick}
build=${2:-build/gpu}
root=$(cd "$(dirname "$0")/.." && pwd)
# A folder with the programs alone was built elsewhere.
if [ -f "$build/CMakeCache.txt" ] || [ ! -x "$build/fused_test" ]; then
  cmake -S "$root" -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DJAX_ULYSSES_CUDA=ON \
    -DJAX_ULYSSES_GPU_TESTS=ON ${JAX_ULYSSES_CUTLASS_INCLUDE:+-DJAX_ULYSSES_CUTLASS_INCLUDE="$JAX_ULYSSES_CUTLASS_INCLUDE"} &&
    cmake --build "$build" --target launch_test fused_test exchange_test huge_test fused_bench pure_bench devices_test devices_bench ring_bench || exit 1
fi
failed=0
run() {
  limit=$1
  shift
  echo "== $*"
  timeout "$limit" "$@" || { failed=$((failed + 1)); echo "== failed: $*"; }
}
# What must not come out well: a negative control that may hang, or leave the GPU with an error.
run_bad() {
  limit=$1
  shift
  echo "== must fail: $*"
  timeout -k 5 "$limit" "$@"
  rc=$?
  echo "exit code $rc (1: seen; 124 or 137: it hung)"
  case $rc in 1 | 124 | 137) ;; *) failed=$((failed + 1)); echo "== failed: $*" ;; esac
}
sanitizer=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
case $what in
quick)
  run 120 "$build/fused_test" check
  run 60 "$build/exchange_test" check
  run 60 "$build/fused_test" stress 100
  run 60 "$build/fused_test" faults
  ;;
full)
  run 120 "$build/launch_test"
  run 180 "$build/fused_test" check
  run 60 "$build/exchange_test" check
  run 120 "$build/huge_test"
  run 60 "$build/exchange_test" stress 100
  run 180 "$build/fused_test" stress 2000
  run 60 "$build/fused_test" graph
  run 120 "$build/fused_test" streams 1000
  run 60 "$build/fused_test" faults
  run 60 "$build/exchange_test" faults
  run 120 "$build/fused_test" negative 30
  run 120 "$build/exchange_test" negative 30
  run 60 "$build/fused_test" far 20
  run 60 "$build/exchange_test" far 20
  run 20 "$build/fused_test" turn
  run_bad 10 "$build/fused_test" turn 1
  run_bad 10 "$build/fused_test" turn 2
  for tool in memcheck racecheck synccheck; do
    run 120 "$sanitizer" --error-exitcode 1 --tool $tool "$build/fused_test" small
    run 200 "$sanitizer" --error-exitcode 1 --tool $tool "$build/fused_test" small 2
    run 120 "$sanitizer" --error-exitcode 1 --tool $tool "$build/exchange_test" small
  done
  ;;
devices)
  # The kernels are loaded before any of them spins.
  CUDA_MODULE_LOADING=EAGER
  export CUDA_MODULE_LOADING
  run 200 "$build/devices_test" 2000
  run 200 "$build/devices_bench" 40
  ;;
bench)
  run 300 "$build/fused_bench" 30
  run 200 "$build/pure_bench" 30
  ;;
*)
  echo "unknown: $what" >&2
  exit 2
  ;;
esac
echo "gpu_test $what: $failed failed"
[ "$failed" -eq 0 ]
