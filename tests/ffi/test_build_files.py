# SPDX-License-Identifier: Apache-2.0
"""BUILD lists the same files as CMake, and both list what is there."""

import ast
import pathlib
import re
import subprocess
import sys

import pytest


@pytest.fixture(scope="module")
def cmake_lists(root):
    text = (root / "cmake" / "Sources.cmake").read_text()
    text = re.sub(r"#.*", "", text)
    return {
        name: values.split()
        for name, values in re.findall(r"set\((\w+)\s+([^)]*)\)", text)
    }


@pytest.fixture(scope="module")
def build_targets(root):
    """Target name -> {attribute: list}, and the names of the test loop under "tests".

    BUILD's syntax is a subset of Python's.
    """
    tree = ast.parse((root / "BUILD").read_text())
    targets = {}
    for statement in tree.body:
        call = getattr(statement, "value", None)
        if isinstance(call, ast.ListComp):
            targets["tests"] = ast.literal_eval(call.generators[0].iter)
        elif isinstance(call, ast.Call) and call.func.id in ("cc_library", "cc_test"):
            keywords = {k.arg: k.value for k in call.keywords}
            targets[ast.literal_eval(keywords["name"])] = {
                key: ast.literal_eval(keywords[key])
                for key in ("srcs", "hdrs")
                if key in keywords
            }
    return targets


@pytest.mark.parametrize(
    ("target", "attribute", "variable"),
    [
        ("jax_ulysses_core", "hdrs", "JAX_ULYSSES_CORE_HEADERS"),
        ("jax_ulysses_host", "srcs", "JAX_ULYSSES_HOST_SOURCES"),
        ("jax_ulysses_host", "hdrs", "JAX_ULYSSES_HOST_HEADERS"),
        ("jax_ulysses_test_support", "hdrs", "JAX_ULYSSES_TEST_HEADERS"),
    ],
)
def test_build_matches_cmake(build_targets, cmake_lists, target, attribute, variable):
    assert sorted(build_targets[target][attribute]) == sorted(cmake_lists[variable])


def test_tests_match(build_targets, cmake_lists):
    assert sorted(build_targets["tests"]) == sorted(cmake_lists["JAX_ULYSSES_TESTS"])


def test_every_target_is_compared(build_targets):
    assert set(build_targets) == {
        "jax_ulysses_core",
        "jax_ulysses_host",
        "jax_ulysses_test_support",
        "tests",
    }


@pytest.mark.parametrize("value", ["1", "on", "Off", "YES"])
def test_cuda_is_auto_on_or_off(root, tmp_path, value):
    """Else "1" would mean AUTO, and a build without kernels would go unnoticed."""
    cmake = pathlib.Path(sys.executable).with_name("cmake")
    if not cmake.is_file():
        pytest.skip("needs cmake beside Python")
    command = [cmake, "-S", root, "-B", tmp_path, f"-DJAX_ULYSSES_CUDA={value}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert f"JAX_ULYSSES_CUDA={value} must be AUTO, ON or OFF" in done.stderr


def test_lists_are_complete(root, cmake_lists):
    """A new source that no list names would be built nowhere."""
    listed = {f for name, files in cmake_lists.items() for f in files if "/" in f}
    listed |= {f"cuda/tests/{name}.cc" for name in cmake_lists["JAX_ULYSSES_TESTS"]}
    # Built with ThreadSanitizer only, and not by Bazel.
    listed.add("cuda/tests/race_control.cc")
    found = {
        str(path.relative_to(root))
        for pattern in ("ffi/**/*.cc", "cuda/tests/*.cc", "ffi/host/*.h")
        for path in root.glob(pattern)
    }
    assert found <= listed
    assert all((root / f).is_file() for f in listed)
