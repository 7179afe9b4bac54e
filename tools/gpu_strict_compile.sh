#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Runs a compile command and fails if ptxas reports what would halve the speed of a kernel but only
# calls "info": C7510 (wgmma serialised) or C7508 (setmaxnreg ignored). CMake's launcher for CUDA.
# Goes through ccache where that is installed: it repeats ptxas's reports together with the object.
log=$(mktemp) || exit 1
$(command -v ccache) "$@" >"$log" 2>&1
status=$?
cat "$log" >&2
if [ $status -eq 0 ] && grep -qE 'C7510|C7508' "$log"; then
  echo "error: ptxas reported C7510 or C7508 (is NDEBUG defined?)" >&2
  status=1
fi
rm -f "$log"
exit $status
