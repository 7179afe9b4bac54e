# SPDX-License-Identifier: Apache-2.0
"""The benchmark of one rank: what it times computes what it should."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ulysses as ju


@pytest.fixture
def mesh():
    found = jax.make_mesh((1,), ("cp",), devices=jax.devices()[:1])
    ju.initialize(found, "cp", 16 << 20)
    yield found
    ju.finalize()


def test_calls_and_dots_agree(root, mesh, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(root / "benchmarks"), *sys.path])
    from bench_one_rank import calls_of

    geometry = {"heads": 4, "kv_heads": 2, "head_dim": 16, "d_model": 32}
    calls = calls_of(mesh, geometry, rows=24, native="host")
    assert [call[:4] for call in calls.values()] == [
        ("qkv_proj_a2a", 128, 32, "host"),
        ("qkv_proj_a2a", 128, 32, "dot"),
        ("a2a_out_proj", 32, 64, "host"),
        ("a2a_out_proj", 32, 64, "dot"),
    ]
    qkv, dot, out, out_dot = (call[-1]() for call in calls.values())
    joined = jnp.concatenate([part.reshape(1, 24, -1) for part in qkv], axis=-1)
    for actual, wanted in ((joined, dot), (out, out_dot)):
        actual, wanted = (np.asarray(x, np.float32) for x in (actual, wanted))
        assert np.linalg.norm(actual - wanted) <= 4e-3 * np.linalg.norm(wanted)
