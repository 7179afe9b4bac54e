# SPDX-License-Identifier: Apache-2.0
"""Around the kernels: exchange, token order, copies of heads, gradients, collectives.

The kernels themselves are replaced by plain dots (``on_cpu``), so that all ranks can
run on CPU devices; tests/pallas/test_kernels.py has the kernels.
"""

import dataclasses

import jax
import numpy as np
import pytest

import jax_ulysses as ju
from jax_ulysses import blocks, group
from jax_ulysses.spec import HeadExchange, Request
from tests.helpers import hlo
from tests.helpers.projection_cases import Case
from tests.helpers.worlds import world

OPERATORS = ("qkv_proj_a2a", "q_proj_a2a", "a2a_out_proj", "a2a_proj/features")


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("zigzag", [False, True], ids=["contiguous", "zigzag"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("operator", OPERATORS)
def test_operators(operator, batch, zigzag):
    """Results and all gradients."""
    w = world("cp4")
    Case(operator, batch, 6, 24, 8, 4, 10, zigzag=zigzag).check(w, "pallas")
    taken = ju.taken_implementations()
    name = operator.partition("/")[0]
    for operator in (name, f"{name}.backward"):
        assert taken[operator]["implementation"] == "pallas"


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(("ranks", "kv_heads"), [(1, 1), (4, 2), (8, 2), (8, 1)])
def test_replicated_heads(ranks, kv_heads):
    case = Case(heads=8, kv_heads=kv_heads, head_dim=4, dtype="bfloat16")
    case.check(world(f"cp{ranks}"), "pallas")


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("name", ["cp4-reversed", "dp2cp4-explicit", "tuple-swapped"])
def test_meshes(name):
    for operator in ("qkv_proj_a2a", "a2a_out_proj"):
        Case(operator, batch=4, kv_heads=2, zigzag=True).check(world(name), "pallas")


@pytest.mark.usefixtures("on_cpu")
def test_attention_layer():
    """The plain exchanges and the projections, by one name."""
    w = world("cp4")

    def layer(name):
        def call(x, w_qkv, w_out):
            params = ju.AttentionParams(w_qkv, w_out)
            kwargs = dict(axis_name="cp", num_heads=8, num_kv_heads=4)
            return ju.ulysses_attention(x, params, **kwargs, implementation=name)

        rng = np.random.default_rng(0)
        shapes = ((2, 16, 12), (12, 16 * 4), (32, 12))
        values = [rng.normal(size=s).astype(np.float32) for s in shapes]
        return w.run(call, values, (w.tokens, *[jax.P()] * 2), w.tokens)

    np.testing.assert_allclose(layer("pallas"), layer("xla"), rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("on_cpu")
def test_collectives():
    """One all-to-all a segment each way, and sums of weight gradients."""
    w, case = world("cp4"), Case(batch=1, kv_heads=8)
    call, (in_specs, out_specs) = case.call("cp", "pallas"), case.specs(w)
    operands = w.place(case.operands(4), in_specs)
    forward = hlo.of(jax.jit(w.shard_map(call, in_specs, out_specs)), *operands)
    assert forward.exchanges == 3
    assert not forward.others
    cts = w.place(case.cotangents(case.expected(case.operands(4), 4)), out_specs)
    both = hlo.of(w.vjp(call, in_specs, out_specs), operands, cts)
    assert both.exchanges == 6
    assert set(both.others) == {"all-reduce"}


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("operator", ["qkv_proj_a2a", "a2a_out_proj"])
def test_blocks_through_the_heap(operator, monkeypatch):
    """As on ranks that share a GPU, with the exchange handlers of ``host``."""
    w = world("cp4")
    monkeypatch.setattr(blocks.native, "cuda", blocks.native.host)
    ju.initialize(w.mesh, w.axes, 8 << 20)
    try:
        plan = dataclasses.replace(group.find(w.axes).plan, ranks_per_device=4)
        monkeypatch.setattr(blocks, "heap_plan", lambda ex: plan)
        case = Case(operator, 2, 6, 24, 8, 2, 10, zigzag=True)
        case.check(w, "pallas")
        (in_specs, out_specs), call = case.specs(w), case.call("cp", "pallas")
        operands = w.place(case.operands(4), in_specs)
        found = hlo.of(jax.jit(w.shard_map(call, in_specs, out_specs)), *operands)
        assert found.count["all-to-all"] == 0
        assert found.fused.total() == (3 if operator == "qkv_proj_a2a" else 1)
    finally:
        ju.finalize()


@pytest.mark.parametrize("dataflow", ["gemm_a2a", "a2a_gemm"])
def test_what_the_exchange_kernel_is_asked_for(dataflow):
    """One head a rank, as wide as a block; B * T rows."""
    scattered = dataflow == "gemm_a2a"
    x = (2, 6, 24) if scattered else (2, 24, 2, 10)
    request = Request(
        operator="any",
        dataflow=dataflow,
        exchange=HeadExchange((8, 2), 10, 4, ("cp",)),
        w_transposed=False,
        platform="cuda",
        dtype="bfloat16",
        shapes=(x, (24, 100)),
    )
    moved = blocks._moved(request)
    assert [r.shapes for r in moved] == [((1, 12, 4, 20),), ((1, 12, 4, 10),)]
    assert [(r.exchange.heads, r.exchange.head_dim) for r in moved] == [
        ((4,), 20),
        ((4,), 10),
    ]
