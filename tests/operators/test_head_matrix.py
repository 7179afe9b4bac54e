# SPDX-License-Identifier: Apache-2.0
"""Hq x Hkv x P: every cell equals the oracle, or is a ValueError while tracing."""

import re

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_ulysses as ju
from tests.helpers import oracle
from tests.helpers.worlds import abstract, world

QUERY_HEADS = (1, 2, 3, 4, 6, 7, 8, 12, 20, 24, 28, 30, 32, 40)
KV_HEADS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 20, 40)
D_MODEL, HEAD_DIM = 3, 2


def _allowed(n: int, k: int, ranks: int) -> bool:
    """The rule, written down once more."""
    return n % k == 0 and n % ranks == 0 and (k % ranks == 0 or ranks % k == 0)


def _operands(n, k, ranks):
    rng = np.random.default_rng(n * 100 + k)
    x = rng.normal(size=(1, ranks, D_MODEL)).astype(np.float32)
    w = rng.normal(size=(D_MODEL, (n + 2 * k) * HEAD_DIM)).astype(np.float32)
    return x, w


@pytest.mark.user_case(3, 8)
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_cells_that_fit_equal_the_oracle(ranks, implementation):
    w = world(f"cp{ranks}")
    name = implementation.on(w)
    cells = [(n, k) for n in QUERY_HEADS for k in KV_HEADS if _allowed(n, k, ranks)]
    # Compiled in a few programs: the cells are tiny and compilation is the cost.
    # With peers each call has its own: independent calls are another test's subject.
    size = 1 if implementation.needs_peers else 16
    for start in range(0, len(cells), size):
        chunk = cells[start : start + size]

        def local(operands, chunk=chunk):
            return [
                ju.qkv_proj_a2a(
                    x,
                    weight,
                    axis_name="cp",
                    num_heads=n,
                    num_kv_heads=k,
                    implementation=name,
                )
                for (x, weight), (n, k) in zip(operands, chunk)
            ]

        values = [_operands(n, k, ranks) for n, k in chunk]
        placed = [w.place(v, (w.tokens, P())) for v in values]
        specs = ([(w.tokens, P())] * len(chunk),)
        results = jax.jit(w.shard_map(local, specs, w.heads))(placed)
        for (n, k), (x, weight), result in zip(chunk, values, results):
            expected = oracle.qkv_proj(x, weight, None, (n, k, k), ranks)
            for a, e in zip(result, expected, strict=True):
                assert oracle.rel_l2(a, e) < 1e-6, (n, k, ranks)


@pytest.mark.user_case(3, 8, 39)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_other_cells_are_refused_before_lowering(ranks, implementation):
    w = world(f"cp{ranks}")
    name = implementation.on(w)
    refused = [(n, k) for n in QUERY_HEADS for k in KV_HEADS]
    refused = [cell for cell in refused if not _allowed(*cell, ranks)]
    assert len(refused) > 50
    for n, k in refused:

        def local(x, weight, n=n, k=k):
            return ju.qkv_proj_a2a(
                x,
                weight,
                axis_name="cp",
                num_heads=n,
                num_kv_heads=k,
                implementation=name,
            )

        mapped = jax.jit(w.shard_map(local, (w.tokens, P()), (w.heads,) * 3))
        placed = w.place(_operands(n, k, ranks), (w.tokens, P()))
        with pytest.raises(ValueError) as caught:
            mapped.trace(*placed)
        text = str(caught.value)
        assert f"N={n}, num_kv_heads K={k}, P={ranks}" in text
        assert re.search(r"must be a multiple of", text), text


def _abstract(mesh, x, w):
    return abstract(mesh, x, spec=P(None, "cp")), abstract(mesh, w)


@pytest.mark.user_case(3)
@pytest.mark.parametrize(("ranks", "n", "k"), [(10, 40, 8), (16, 40, 8), (4, 32, 6)])
def test_reported_cells(ranks, n, k):
    """Ranks that this machine does not have, on an abstract mesh."""
    mesh = jax.sharding.AbstractMesh((ranks,), ("cp",))

    def local(x, w):
        return ju.qkv_proj_a2a(x, w, axis_name="cp", num_heads=n, num_kv_heads=k)

    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=(P(None, "cp"), P()), out_specs=P(None, None, "cp")
    )
    shapes = (1, ranks, 4), (4, (n + 2 * k) * 2)
    with pytest.raises(ValueError, match=rf"N={n}, .*K={k}, P={ranks}"):
        jax.eval_shape(mapped, *_abstract(mesh, *shapes))


@pytest.mark.parametrize(
    ("ranks", "n", "k"), [(10, 40, 10), (20, 40, 10), (20, 40, 20)]
)
def test_reported_cells_that_fit(ranks, n, k):
    mesh = jax.sharding.AbstractMesh((ranks,), ("cp",))

    def local(x, w):
        return ju.qkv_proj_a2a(x, w, axis_name="cp", num_heads=n, num_kv_heads=k)

    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=(P(None, "cp"), P()), out_specs=P(None, None, "cp")
    )
    shapes = (1, ranks, 4), (4, (n + 2 * k) * 2)
    q, key, _ = jax.eval_shape(mapped, *_abstract(mesh, *shapes))
    assert q.shape == (1, ranks, n, 2)
    assert key.shape == (1, ranks, max(k, ranks), 2)
