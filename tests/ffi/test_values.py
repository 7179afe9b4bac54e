# SPDX-License-Identifier: Apache-2.0
"""Values of the CPU handlers on eight devices, against plain numpy."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P

from jax_ulysses.ffi import targets
from tests.helpers import mapping_oracle

# Relative L2 error of one rounding of the result, with room for float32 sums over D.
TOLERANCE = {"float32": 2e-6, "float64": 1e-14, "bfloat16": 4e-3, "float16": 6e-4}
HEADS = [(8,), (8, 8, 8), (16, 8, 8), (8, 2, 2), (8, 4, 1)]
B, T, H, D = 2, 6, 5, 24

SEQUENCE = P("dp", "cp")
HEAD = P("dp", None, "cp")


def _random(shape, dtype="float32", seed=0):
    values = np.random.default_rng(seed).standard_normal(shape)
    return np.asarray(jnp.asarray(values, dtype))


def _wide(x):
    return np.asarray(x).astype(np.float64)


def _error(result, expected):
    scale = np.linalg.norm(expected)
    return np.linalg.norm(_wide(result) - expected) / (scale if scale else 1.0)


def _shape(world, heads, head_dim=H):
    """(B, S, [local heads times P per segment]) of the global arrays."""
    local = [targets.local_heads(m, world.num_ranks) for m in heads]
    return (
        B * world.num_lines,
        T * world.num_ranks,
        [n * world.num_ranks for n in local],
    )


def _keywords(world, heads, zigzag):
    return dict(
        group=world.session,
        axis_name="cp",
        heads=heads,
        num_ranks=world.num_ranks,
        token_order=int(zigzag),
    )


@pytest.mark.parametrize("zigzag", [False, True])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_exchange_moves_every_element(make_world, num_ranks, heads, zigzag):
    world = make_world(num_ranks)
    batch, length, _ = _shape(world, heads)
    keywords = _keywords(world, heads, zigzag)
    parts = [_random((batch, length, m, H), seed=i) for i, m in enumerate(heads)]

    def there_and_back(*parts):
        moved = targets.exchange(parts, **keywords, direction=targets.SCATTER)
        return moved, targets.exchange(moved, **keywords, direction=targets.GATHER)

    specs = [SEQUENCE] * len(heads)
    moved, back = world.run(
        there_and_back, specs, ((HEAD,) * len(heads), tuple(specs)), *parts
    )
    for part, there, again in zip(parts, moved, back):
        expected = mapping_oracle.scatter(part, num_ranks, zigzag)
        np.testing.assert_array_equal(np.asarray(there), expected)
        np.testing.assert_array_equal(np.asarray(again), part)


@pytest.mark.parametrize(
    "dtype", ["bool", "int8", "int32", "complex64", "complex128", "float8_e4m3fn"]
)
def test_exchange_takes_any_dtype(make_world, dtype):
    with jax.enable_x64(True):
        world = make_world(4)
        batch, length, _ = _shape(world, (8,))
        bits = np.random.default_rng(0).integers(0, 100, (batch, length, 8, H))
        part = np.asarray(jnp.asarray(bits).astype(dtype))

        def scatter(part):
            return targets.exchange(
                [part], **_keywords(world, (8,), False), direction=targets.SCATTER
            )[0]

        moved = np.asarray(world.run(scatter, [SEQUENCE], HEAD, part))
        expected = mapping_oracle.scatter(part, 4)
        assert moved.dtype == expected.dtype
        np.testing.assert_array_equal(moved, expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("zigzag", [False, True])
def test_gather_sums_replicas_once(make_world, zigzag, dtype):
    world = make_world(8)
    heads = (8, 2)
    batch, length, shown = _shape(world, heads)
    parts = [_random((batch, length, n, H), dtype, seed=n) for n in shown]

    def gather(*parts):
        return targets.exchange(
            parts,
            **_keywords(world, heads, zigzag),
            direction=targets.GATHER,
            sum_replicas=True,
        )

    summed = world.run(gather, [HEAD] * 2, (SEQUENCE,) * 2, *parts)
    for part, m, result in zip(parts, heads, summed):
        expected = mapping_oracle.gather(_wide(part), m, 8, zigzag)
        assert _error(result, expected) < TOLERANCE[dtype]
    # Summed in float32 and rounded once: equal to doing exactly that.
    exact = mapping_oracle.gather(np.float32(parts[1]), 2, 8, zigzag)
    np.testing.assert_array_equal(np.asarray(summed[1]), exact.astype(parts[1].dtype))


CASES = list(itertools.product([2, 4, 8], HEADS, [False, True]))


@pytest.mark.parametrize(("num_ranks", "heads", "zigzag"), CASES)
def test_gemm_a2a(make_world, num_ranks, heads, zigzag):
    _check_gemm_a2a(make_world(num_ranks), heads, zigzag, "float32", True, False)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("w_transposed", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_gemm_a2a_types(make_world, dtype, w_transposed, with_bias):
    with jax.enable_x64(dtype == "float64"):
        _check_gemm_a2a(make_world(4), (8, 4, 2), True, dtype, with_bias, w_transposed)


def _check_gemm_a2a(world, heads, zigzag, dtype, with_bias, w_transposed):
    batch, length, _ = _shape(world, heads)
    columns = sum(heads) * H
    x = _random((batch, length, D), dtype, 1)
    w = _random((columns, D) if w_transposed else (D, columns), dtype, 2)
    bias = _random((columns,), dtype, 3)

    def project(x, w, bias):
        return targets.gemm_a2a(
            x,
            w,
            bias if with_bias else None,
            **_keywords(world, heads, zigzag),
            head_dim=H,
            w_transposed=w_transposed,
        )

    specs = [SEQUENCE, P(), P()]
    results = world.run(project, specs, (HEAD,) * len(heads), x, w, bias)
    dense = _wide(x) @ (_wide(w).T if w_transposed else _wide(w))
    if with_bias:
        dense = dense + _wide(bias)
    begin = 0
    for m, result in zip(heads, results):
        segment = dense[..., begin : begin + m * H].reshape(batch, length, m, H)
        begin += m * H
        expected = mapping_oracle.scatter(segment, world.num_ranks, zigzag)
        assert result.dtype == x.dtype
        assert _error(result, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize(("num_ranks", "heads", "zigzag"), CASES)
def test_a2a_gemm(make_world, num_ranks, heads, zigzag):
    _check_a2a_gemm(make_world(num_ranks), heads, zigzag, "float32", True, False)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("w_transposed", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_a2a_gemm_types(make_world, dtype, w_transposed, with_bias):
    with jax.enable_x64(dtype == "float64"):
        _check_a2a_gemm(make_world(4), (8, 4, 2), True, dtype, with_bias, w_transposed)


def _check_a2a_gemm(world, heads, zigzag, dtype, with_bias, w_transposed):
    batch, length, shown = _shape(world, heads)
    columns = sum(heads) * H
    parts = [_random((batch, length, n, H), dtype, i) for i, n in enumerate(shown)]
    w = _random((D, columns) if w_transposed else (columns, D), dtype, 7)
    bias = _random((D,), dtype, 8)

    def project(w, bias, *parts):
        return targets.a2a_gemm(
            parts,
            w,
            bias if with_bias else None,
            **_keywords(world, heads, zigzag),
            w_transposed=w_transposed,
        )

    specs = [P(), P(), *[HEAD] * len(heads)]
    y, g = world.run(project, specs, (SEQUENCE, SEQUENCE), w, bias, *parts)
    gathered = np.concatenate(
        [
            mapping_oracle.gather(_wide(p), m, world.num_ranks, zigzag).reshape(
                batch, length, m * H
            )
            for p, m in zip(parts, heads)
        ],
        axis=-1,
    )
    assert _error(g, gathered) < TOLERANCE[dtype]
    # From the rounded g, as a weight gradient would use it.
    dense = _wide(g) @ (_wide(w).T if w_transposed else _wide(w))
    if with_bias:
        dense = dense + _wide(bias)
    assert y.dtype == w.dtype
    assert _error(y, dense) < TOLERANCE[dtype]


@pytest.mark.parametrize("length", [0, 1, 15, 70, 200])
def test_tails_of_rows(make_world, length):
    """Local lengths around tiles (64 rows), row blocks (64) and pieces (16)."""
    world = make_world(4)
    heads, head_dim, d = (4, 2), 33, 40
    x = _random((3 * world.num_lines, length * 4, d), seed=1)
    w = _random((d, sum(heads) * head_dim), seed=2)
    w_back = _random((sum(heads) * head_dim, d), seed=3)

    def there_and_back(x, w, w_back):
        keywords = _keywords(world, heads, False)
        parts = targets.gemm_a2a(x, w, **keywords, head_dim=head_dim)
        return parts, targets.a2a_gemm(parts, w_back, **keywords)

    parts, (y, g) = world.run(
        there_and_back,
        [SEQUENCE, P(), P()],
        ((HEAD, HEAD), (SEQUENCE, SEQUENCE)),
        x,
        w,
        w_back,
    )
    dense = _wide(x) @ _wide(w)
    segment = dense[..., : 4 * head_dim].reshape(*x.shape[:2], 4, head_dim)
    assert _error(parts[0], mapping_oracle.scatter(segment, 4)) < 2e-6
    # Two ranks hold the same KV head, so its gathered sum is twice the projection.
    dense[..., 4 * head_dim :] *= 2
    assert _error(g, dense) < 2e-6
    assert _error(y, _wide(g) @ _wide(w_back)) < 2e-6
