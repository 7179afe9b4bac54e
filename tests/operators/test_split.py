# SPDX-License-Identifier: Apache-2.0
"""Backward passes in two halves: values, exchanges, and sums that stay in place."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jax_ulysses as ju
from tests.helpers import hlo, oracle
from tests.helpers.projection_cases import BACKWARD, Case
from tests.helpers.worlds import world

CASES = [
    Case(bias=False),
    Case(bias=False, kv_heads=2, zigzag=True),
    Case(bias=False, kv_heads=4, dtype="bfloat16", tokens=8, d_model=32, head_dim=16),
    Case("q_proj_a2a", bias=False, zigzag=True),
    Case("a2a_out_proj", bias=False),
    Case("a2a_out_proj", bias=False, zigzag=True, dtype="float16", tokens=8),
]
every_case = pytest.mark.parametrize("case", CASES, ids=lambda c: str(c)[5:60])


def _keywords(case, w, name):
    order = ju.TokenOrder.ZIGZAG if case.zigzag else ju.TokenOrder.CONTIGUOUS
    return {"axis_name": w.axis, "token_order": order, "implementation": name}


def _halves(case, w, name):
    """(saved input, weight, cotangents) -> input gradient; and what the GEMM takes."""
    keywords = _keywords(case, w, name)

    def bwd_input(x, weight, cts):
        if case.operator == "qkv_proj_a2a":
            heads = {"num_heads": case.heads, "num_kv_heads": case.kv_heads}
            dx, dy = ju.qkv_proj_a2a_bwd_input(*cts, weight, **heads, **keywords)
            return dx, x, dy
        if case.operator == "q_proj_a2a":
            dx, dy = ju.q_proj_a2a_bwd_input(cts, weight, **keywords)
            return dx, x, dy
        _, gathered = ju.a2a_out_proj_fwd(x, weight, **keywords)
        heads = {"num_heads": case.heads}
        return (
            ju.a2a_out_proj_bwd_input(cts, weight, **heads, **keywords),
            gathered,
            cts,
        )

    weight_half = {
        "qkv_proj_a2a": ju.qkv_proj_a2a_bwd_weight,
        "q_proj_a2a": ju.q_proj_a2a_bwd_weight,
        "a2a_out_proj": ju.a2a_out_proj_bwd_weight,
    }[case.operator]
    return bwd_input, weight_half


def _setup(case, w, implementation):
    name = implementation.on(w)
    operands = case.operands(w.num_ranks)
    cts = case.cotangents(case.expected(operands, w.num_ranks))
    (x_spec, w_spec), out_specs = case.specs(w)
    placed = w.place(operands, (x_spec, w_spec))
    specs = (x_spec, w_spec, out_specs)
    return name, operands, cts, specs, (*placed, _place_cts(w, cts, out_specs))


def _place_cts(w, cts, specs):
    return w.place(cts, specs) if isinstance(cts, tuple) else w.put(cts, specs)


@every_case
def test_both_halves_are_what_grad_computes(case, implementation):
    w = world("dp2cp4-explicit")
    name, operands, cts, specs, placed = _setup(case, w, implementation)
    bwd_input, bwd_weight = _halves(case, w, name)

    def split(x, weight, cts):
        dx, saved, dy = bwd_input(x, weight, cts)
        return dx, ju.psum(bwd_weight(saved, dy), ("dp", "cp"))

    def whole(x, weight, cts):
        return jax.vjp(case.call(w.axis, name), x, weight)[1](cts)

    out_specs = (specs[0], P())
    dx, dw = jax.jit(w.shard_map(split, specs, out_specs))(*placed)
    dx_whole, dw_whole = jax.jit(w.shard_map(whole, specs, out_specs))(*placed)
    # The same calls on the same operands.
    np.testing.assert_array_equal(np.asarray(dx), np.asarray(dx_whole))
    assert dw.dtype == jnp.float32
    assert oracle.rel_l2(dw, dw_whole) <= BACKWARD[case.dtype]
    expected = case.expected_gradients(operands, cts, w.num_ranks)
    assert oracle.rel_l2(dx, expected[0]) <= BACKWARD[case.dtype]
    assert oracle.rel_l2(dw, expected[1]) <= BACKWARD[case.dtype]


@every_case
def test_one_exchange_in_the_first_half_and_none_in_the_second(case, implementation):
    w = world("cp4")
    name, _, _, specs, placed = _setup(case, w, implementation)
    bwd_input, bwd_weight = _halves(case, w, name)
    is_out = case.operator == "a2a_out_proj"
    first = jax.jit(w.shard_map(bwd_input, specs, (specs[0], w.tokens, w.tokens)))
    # The forward call inside of ``bwd_input`` here makes what the weight needs.
    assert hlo.of(first, *placed).exchanges == 1 + is_out
    _, saved, dy = first(*placed)
    main = jnp.zeros((4, saved.shape[2], dy.shape[2]), jnp.float32)
    second = jax.jit(
        w.shard_map(
            lambda x, dy, main: bwd_weight(x, dy, accumulate_into=main[0])[None],
            (w.tokens, w.tokens, P("cp")),
            P("cp"),
        )
    )
    found = hlo.of(second, saved, dy, w.put(main, P("cp")))
    assert found.exchanges == 0
    assert not found.count


def _micro_batches(dtype, main_dtype, main_spec=P("cp")):
    """Weight gradients of two micro-batches, on 4 ranks, and a main gradient."""
    w = world("cp4")
    rng = np.random.default_rng(3)

    def draw(*shape):
        return np.asarray(jnp.asarray(rng.standard_normal(shape), dtype))

    saved = [(draw(2, 32, 24), draw(2, 32, 40)) for _ in range(2)]
    # The ranks' main gradients lie below each other.
    main = np.asarray(jnp.asarray(rng.standard_normal((4 * 24, 40)), main_dtype))

    def step(main, x, dy):
        return ju.qkv_proj_a2a_bwd_weight(x, dy, accumulate_into=main)

    specs = (main_spec, w.tokens, w.tokens)
    jitted = jax.jit(w.shard_map(step, specs, main_spec), donate_argnums=0)
    placed = [w.place(s, specs[1:]) for s in saved]

    def part(x, dy, rank):
        x, dy = (a[:, 8 * rank : 8 * rank + 8].astype(np.float64) for a in (x, dy))
        return np.einsum("btd,btc->dc", x, dy)

    parts = [np.concatenate([part(*pair, r) for r in range(4)]) for pair in saved]
    return jitted, w.put(main, main_spec), placed, main, parts


@pytest.mark.parametrize("main_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_micro_batches_are_added(dtype, main_dtype):
    jitted, placed_main, placed, main, parts = _micro_batches(dtype, main_dtype)
    result = placed_main
    for x, dy in placed:
        result = jitted(result, x, dy)
    assert result.dtype == main_dtype
    assert placed_main.is_deleted(), "it was copied, not donated"
    expected = main.astype(np.float64) + parts[0] + parts[1]
    tolerance = {"float32": 1e-6, "bfloat16": 4e-3}[main_dtype]
    assert oracle.rel_l2(result, expected) <= tolerance
    if main_dtype == "float32":
        # Beta is one: an accumulator that was ignored would be far off.
        assert oracle.rel_l2(result, parts[0] + parts[1]) > 0.01


def test_a_sum_in_bfloat16_is_rounded_once():
    """1 + (2**-8 + 2**-20) is above the middle; 1 + 2**-8 would be rounded to 1."""
    x = jnp.array([[[2.0**-8], [2.0**-20]]], "bfloat16")
    main = jnp.ones((1, 1), "bfloat16")
    result = ju.qkv_proj_a2a_bwd_weight(x, jnp.ones_like(x), accumulate_into=main)
    assert result.dtype == "bfloat16"
    assert float(result[0, 0]) == 1 + 2.0**-7


@pytest.mark.parametrize("main_dtype", ["float32", "bfloat16"])
def test_the_main_gradient_stays_in_place(main_dtype):
    jitted, placed_main, placed, main, _ = _micro_batches("bfloat16", main_dtype)
    compiled = jitted.lower(placed_main, *placed[0]).compile()
    text = compiled.as_text()
    assert re.search(r"input_output_alias=\{ \{\}: \(0, \{\}", text)
    short = {"float32": "f32", "bfloat16": "bf16"}[main_dtype]
    assert not re.search(rf"{short}\[24,40\]\S* copy\(", text)
    assert compiled.memory_analysis().alias_size_in_bytes == main.nbytes // 4
    # JAX's own memory from the first step on; NumPy's cannot be given away.
    result = jitted(placed_main, *placed[0])
    before = {s.data.unsafe_buffer_pointer() for s in result.addressable_shards}
    result = jitted(result, *placed[1])
    after = {s.data.unsafe_buffer_pointer() for s in result.addressable_shards}
    assert before == after


def test_micro_batches_in_a_scan(implementation):
    """What a pipeline stage does: all first halves, then all second halves."""
    w = world("cp4")
    case = Case(bias=False, kv_heads=2)
    name, operands, cts, specs, _ = _setup(case, w, implementation)
    bwd_input, bwd_weight = _halves(case, w, name)
    stack = lambda a: np.stack([a, 2 * a, -a])  # noqa: E731
    stacked = (stack(operands[0]), operands[1], tuple(stack(c) for c in cts))

    def stage(xs, weight, cts):
        def first(_, saved):
            dx, x, dy = bwd_input(saved[0], weight, saved[1])
            return None, (dx, x, dy)

        _, (dxs, xs, dys) = lax.scan(first, None, (xs, cts))
        main = jnp.zeros(weight.shape, jnp.float32)
        main = lax.pcast(main, "cp", to="varying")
        main, _ = lax.scan(
            lambda m, s: (bwd_weight(*s, accumulate_into=m), None), main, (xs, dys)
        )
        return dxs, ju.psum(main, "cp")

    in_specs = (P(None, *specs[0]), P(), tuple(P(None, *s) for s in specs[2]))
    placed = (*w.place(stacked[:2], in_specs[:2]), w.place(stacked[2], in_specs[2]))
    mapped = jax.jit(w.shard_map(stage, in_specs, (in_specs[0], P())))
    dxs, dw = mapped(*placed)
    dx, expected = case.expected_gradients(operands, cts, 4)
    for found, factor in zip(np.asarray(dxs), (1, 2, -1)):
        assert oracle.rel_l2(found, factor * dx) < 3e-6
    # Both the input and the cotangent of a micro-batch have its factor.
    assert oracle.rel_l2(dw, (1 + 4 + 1) * expected) < 3e-6
