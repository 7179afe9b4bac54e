# SPDX-License-Identifier: Apache-2.0
"""Times of kernels go to the variants that launched them, or to none."""

import sys

import jax.numpy as jnp
import pytest


@pytest.fixture
def bench(root, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(root / "benchmarks"), *sys.path])
    import bench_pallas

    return bench_pallas


def _measured(bench, monkeypatch, change=lambda kernels: kernels):
    """Of "one", which launches a kernel of 1 ms, and "two", with two of 10 ms."""
    launched = []

    def kernel_times(calls):
        launched.clear()
        for call in calls:
            call()
        return change(list(launched)) if len(calls) > 1 else list(launched)

    def variant(*kernels):
        def run(x):
            launched.extend(kernels)
            return x

        return run

    monkeypatch.setattr(bench, "kernel_times", kernel_times)
    variants = {"one": variant(("a", 1.0)), "two": variant(("b", 10.0), ("c", 10.0))}
    return bench.measure(variants, (jnp.zeros(2),), rounds=5)


def test_every_kernel_counts_for_its_variant(bench, monkeypatch):
    assert _measured(bench, monkeypatch) == {"one": [1000.0] * 5, "two": [20000.0] * 5}


@pytest.mark.parametrize(
    "change", [lambda k: k[:-1], lambda k: [*k, ("b", 10.0)]], ids=["fewer", "more"]
)
def test_another_number_of_kernels_is_an_error(bench, monkeypatch, change):
    with pytest.raises(RuntimeError, match="another number of them than before"):
        _measured(bench, monkeypatch, change)
