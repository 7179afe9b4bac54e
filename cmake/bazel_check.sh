#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Builds and runs BUILD's targets with Debian's bazel-bootstrap 4.2.3 and no network. That Bazel
# wants to fetch three repositories even for plain C++: rules_cc and rules_java (here: their rules
# are the built-in ones) and its coverage tools (here: empty). Works on a copy in build/bazel.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
work=$root/build/bazel
mkdir -p "$work/rules_cc/cc" "$work/rules_java/java" "$work/coverage"
rm -rf "$work/source"
mkdir "$work/source"
cp -r "$root/BUILD" "$root/LICENSE" "$root/cuda" "$root/ffi" "$work/source"
touch "$work/source/WORKSPACE"
for repository in rules_cc rules_java coverage; do touch "$work/$repository/WORKSPACE"; done
touch "$work/rules_cc/cc/BUILD" "$work/rules_java/java/BUILD"
for rule in binary import library test toolchain toolchain_suite; do
  echo "cc_$rule = native.cc_$rule"
done > "$work/rules_cc/cc/defs.bzl"
for rule in binary import library package_configuration plugin runtime test toolchain; do
  echo "java_$rule = native.java_$rule"
done > "$work/rules_java/java/defs.bzl"
for name in coverage_report_generator lcov_merger; do
  echo "filegroup(name = '$name', srcs = ['WORKSPACE'], visibility = ['//visibility:public'])"
done > "$work/coverage/BUILD"
cd "$work/source"
exec bazel --batch --output_user_root="$work/root" test \
  --override_repository=rules_cc="$work/rules_cc" \
  --override_repository=rules_java="$work/rules_java" \
  --override_repository=remote_coverage_tools="$work/coverage" \
  --jobs=2 --local_test_jobs=1 --test_output=errors "$@" //:all
