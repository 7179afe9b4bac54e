# SPDX-License-Identifier: Apache-2.0
"""Results are rounded once, at the end: with bfloat16 values where twice would show.

Between 256 and 512 bfloat16 numbers lie 2 apart, so 256 + 0.5 is lost if it is rounded
before what follows is added. Tolerances would not notice.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_ulysses as ju
from tests.helpers.worlds import world

RANKS, TOKENS, HEADS, HEAD_DIM = 4, 8, 4, 2


def _run(w, function, specs, *operands):
    placed = w.place([jnp.asarray(o, jnp.bfloat16) for o in operands], specs[0])
    out = jax.jit(w.shard_map(function, *specs))(*placed)
    return jax.tree.map(lambda a: np.asarray(a, np.float32), out)


def _rows(first, rest):
    """[1, S, C] whose columns are one large value, and small ones."""
    x = np.full((1, TOKENS, HEADS * HEAD_DIM), rest, np.float32)
    x[..., 0] = first
    return x


def _qkv(w, name, x, weight, bias=None):
    def call(x, weight, *bias):
        return ju.qkv_proj_a2a(
            x,
            weight,
            *bias,
            axis_name=w.axis,
            num_heads=HEADS,
            num_kv_heads=HEADS,
            implementation=name,
        )

    given = (x, weight) if bias is None else (x, weight, bias)
    specs = (w.tokens, *(P(),) * (len(given) - 1)), (w.heads,) * 3
    return _run(w, call, specs, *given)


def _out(w, name, a, weight, bias=None):
    def call(a, weight, *bias):
        return ju.a2a_out_proj(a, weight, *bias, axis_name=w.axis, implementation=name)

    a = a.reshape(1, TOKENS, HEADS, HEAD_DIM)
    given = (a, weight) if bias is None else (a, weight, bias)
    specs = (w.heads, *(P(),) * (len(given) - 1)), w.tokens
    return (_run(w, call, specs, *given),)


@pytest.mark.parametrize("project", [_qkv, _out])
def test_the_bias_is_added_before(project, implementation):
    w = world(f"cp{RANKS}")
    columns = 3 * HEADS * HEAD_DIM if project is _qkv else 6
    weight = np.ones((HEADS * HEAD_DIM, columns))
    # 256 + 7 / 16 - 256.
    results = project(
        w,
        implementation.on(w),
        _rows(256, 0.0625),
        weight,
        np.full(columns, -256),
    )
    for result in results:
        np.testing.assert_array_equal(result, 0.4375)


@pytest.mark.parametrize("project", [_qkv, _out])
def test_products_are_added_up_wide(project, implementation):
    w = world(f"cp{RANKS}")
    columns = 3 * HEADS * HEAD_DIM if project is _qkv else 6
    weight = np.ones((HEADS * HEAD_DIM, columns))
    for result in project(w, implementation.on(w), _rows(256, 0.5), weight):
        # 256 + 7 / 2 = 259.5, of which bfloat16 makes 260; term by term it keeps 256.
        np.testing.assert_array_equal(result, 260)


def test_copies_of_a_replicated_head_are_added_up_wide(implementation):
    w = world(f"cp{RANKS}")
    name = implementation.on(w)

    def call(x, ct):
        def scatter(x):
            return ju.scatter_heads(x, w.axis, implementation=name)

        _, back = jax.vjp(scatter, x)
        return back(ct)[0]

    x = np.zeros((1, TOKENS, 1, HEAD_DIM))
    # Of each of the four copies, 256 + 3 / 2 = 257.5, which becomes 258.
    ct = np.full((1, TOKENS, RANKS, HEAD_DIM), 0.5)
    ct[:, :, 1] = 256
    result = _run(w, call, ((w.tokens, w.heads), w.tokens), x, ct)
    np.testing.assert_array_equal(result, 258)


def test_gradients_of_parameters_are_summed_over_ranks_wide(implementation):
    w = world(f"cp{RANKS}")
    name = implementation.on(w)

    def call(x, weight, bias, ct):
        def project(weight, bias):
            return ju.q_proj_a2a(
                x, weight, bias, axis_name=w.axis, num_heads=HEADS, implementation=name
            )

        _, back = jax.vjp(project, weight, bias)
        return back(ct)

    # One token of each rank counts: 256 of the first rank and 0.5 of each other one.
    counts = np.zeros((1, TOKENS, 1))
    counts[:, :: TOKENS // RANKS] = 0.5
    counts[:, 0] = 256
    columns = HEADS * HEAD_DIM
    operands = (
        np.ones((1, TOKENS, 3)),
        np.zeros((3, columns)),
        np.zeros(columns),
        np.broadcast_to(counts[..., None], (1, TOKENS, HEADS, HEAD_DIM)),
    )
    specs = (w.tokens, P(), P(), w.heads), (P(), P())
    for result in _run(w, call, specs, *operands):
        np.testing.assert_array_equal(result, 258)
    # XLA widens sums of bfloat16 on CPUs by itself, so the program has to say it.
    given = [
        w.abstract(a.shape, "bfloat16", s)
        for a, s in zip(operands, specs[0], strict=True)
    ]
    text = jax.jit(w.shard_map(call, *specs)).lower(*given).as_text()
    summed = re.findall(r"all_reduce.*?\}\) : \(tensor<(\S+)>\)", text, re.DOTALL)
    assert sorted(summed) == [f"3x{columns}xf32", f"{columns}xf32"]
