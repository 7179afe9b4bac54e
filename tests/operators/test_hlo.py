# SPDX-License-Identifier: Apache-2.0
"""What the compiled programs communicate: how often, how many bytes, nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_ulysses as ju
from tests.helpers import hlo
from tests.helpers.projection_cases import Case
from tests.helpers.worlds import world

CASES = {
    "split": Case(batch=2, kv_heads=8, dtype="float32"),
    "replicated": Case(batch=2, kv_heads=2, dtype="float32", zigzag=True),
    "query only": Case("q_proj_a2a", bias=False),
    "out": Case("a2a_out_proj", batch=2),
    "features": Case("a2a_proj/features", bias=False),
}


def _payload_bytes(case: Case, ranks: int) -> int:
    """Bytes that one rank's exchange receives: all its heads, whole sequence."""
    local = sum(max(m // ranks, 1) for m in case.segments)
    length = case.tokens * ranks
    return case.batch * length * local * case.head_dim * jnp.dtype(case.dtype).itemsize


@pytest.mark.user_case(31)
@pytest.mark.parametrize("key", CASES)
def test_projections(key, implementation):
    """One exchange forward, one back, and sums of weight gradients."""
    case, w = CASES[key], world("cp4")
    call = case.call(w.axis, implementation.on(w))
    in_specs, out_specs = case.specs(w)
    operands = w.place(case.operands(4), in_specs)
    forward = hlo.of(jax.jit(w.shard_map(call, in_specs, out_specs)), *operands)
    assert forward.exchanges == 1
    assert not forward.others

    cts = case.cotangents(case.expected(case.operands(4), 4))
    cts = w.place(cts, out_specs) if isinstance(cts, tuple) else w.put(cts, out_specs)
    both = hlo.of(w.vjp(call, in_specs, out_specs), operands, cts)
    assert both.exchanges == 2
    # One sum for the weight, one for the bias; XLA may join them into one.
    assert set(both.others) == {"all-reduce"}
    weight, *bias = operands[1:]
    reduced = weight.size + sum(b.size for b in bias)
    assert sum(both.sizes["all-reduce"]) == reduced * 4
    assert both.count["all-reduce"] <= len(operands) - 1
    if implementation.name == "xla":
        payload = _payload_bytes(case, 4)
        assert forward.sizes["all-to-all"] == [payload]
        assert both.sizes["all-to-all"] == [payload] * 2


@pytest.mark.user_case(31)
def test_gradient_of_activations_alone_reduces_nothing(implementation):
    case, w = CASES["replicated"], world("cp4")
    call = case.call(w.axis, implementation.on(w))
    in_specs, out_specs = case.specs(w)
    x, *rest = w.place(case.operands(4), in_specs)
    cts = w.place(case.cotangents(case.expected(case.operands(4), 4)), out_specs)

    def back(x, cts):
        mapped = w.shard_map(call, in_specs, out_specs)
        return jax.vjp(lambda x: mapped(x, *rest), x)[1](cts)

    found = hlo.of_function(back, x, cts)
    assert found.exchanges == 1
    assert not found.others


@pytest.mark.user_case(31)
@pytest.mark.parametrize("fn", [ju.scatter_heads, ju.gather_heads])
def test_exchanges(fn, implementation):
    w = world("cp4")
    name = implementation.on(w)
    specs = (w.tokens, w.heads)
    if fn is ju.gather_heads:
        specs = specs[::-1]
    x = np.zeros((2, 16, 8, 3), jnp.bfloat16)

    def call(x):
        return fn(x, "cp", implementation=name)

    both = w.vjp(call, specs[:1], specs[1])
    found = hlo.of(both, (w.put(x, specs[0]),), w.put(x, specs[1]))
    assert found.exchanges == 2
    assert not found.others


@pytest.mark.user_case(22, 31)
def test_attention_layer(implementation):
    """Two exchanges a layer forward and two back; the sequence is never gathered."""
    w = world("dp2cp4-explicit")
    name = implementation.on(w)
    n, k, h, d, length = 8, 2, 4, 12, 16
    shapes = ((2, length, d), (d, (n + 2 * k) * h), (n * h, d))
    specs = (w.tokens, P(), P())
    local_shapes = []

    def call(x, w_qkv, w_out):
        local_shapes.append(x.shape)
        params = ju.AttentionParams(w_qkv, w_out)
        return ju.ulysses_attention(
            x,
            params,
            axis_name="cp",
            num_heads=n,
            num_kv_heads=k,
            implementation=name,
        )

    values = w.place([np.ones(s, np.float32) for s in shapes], specs)
    forward = hlo.of(jax.jit(w.shard_map(call, specs, w.tokens)), *values)
    assert forward.exchanges == 2
    assert not forward.others
    both = hlo.of(w.vjp(call, specs, w.tokens), values, values[0])
    assert both.exchanges == 4
    assert set(both.others) == {"all-reduce"}
    assert both.count["all-reduce"] <= 2
    assert set(local_shapes) == {(1, length // 4, d)}
    if implementation.name == "xla":
        qkv = length * (n // 4 + 2) * h * 4
        assert forward.sizes["all-to-all"] == [qkv, length * (n // 4) * h * 4]


@pytest.mark.user_case(15)
def test_side_inputs_cost_one_gather(implementation):
    """Positions, segments and padding travel together as integers."""
    w = world("cp4")
    name = implementation.on(w)

    def call(x, w_qkv, w_out, ids):
        return ju.ulysses_attention(
            x,
            ju.AttentionParams(w_qkv, w_out),
            axis_name="cp",
            num_heads=4,
            positions=ids,
            segment_ids=ids,
            padding_mask=ids > 0,
            implementation=name,
        )

    specs = (w.tokens, P(), P(), w.tokens)
    values = [np.ones(s, np.float32) for s in ((1, 8, 6), (6, 48), (16, 6))]
    values = w.place([*values, np.ones((1, 8), np.int32)], specs)
    found = hlo.of(jax.jit(w.shard_map(call, specs, w.tokens)), *values)
    assert found.exchanges == 2
    assert found.others == {"all-gather": 1}
    assert found.sizes["all-gather"] == [8 * 3 * 4]


def test_parser_sees_every_kind():
    """The counts above would be worthless if the parser missed a collective."""
    w = world("cp4")
    x = w.put(np.ones((8, 8), np.float32), P("cp"))

    def call(x):
        a = jax.lax.all_to_all(x, "cp", 1, 1, tiled=True)
        b = jax.lax.all_gather(x, "cp", tiled=True)
        c = jax.lax.psum_scatter(b, "cp", tiled=True)
        d = jax.lax.ppermute(x, "cp", [(i, (i + 1) % 4) for i in range(4)])
        e = jax.lax.psum(x * 2, "cp")
        return a + c + d + e

    found = hlo.of(jax.jit(w.shard_map(call, P("cp"), P("cp"))), x)
    assert found.exchanges == 1
    assert {k for k, n in found.others.items() if n} >= {
        "all-gather",
        "collective-permute",
        "all-reduce",
    }
