# SPDX-License-Identifier: Apache-2.0
"""Sums over ranks: by XLA or over the heap, chosen by rule, and differentiated."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_ulysses as ju
from jax_ulysses import group, report
from tests.helpers import hlo
from tests.helpers.projection_cases import Case
from tests.helpers.worlds import World, world

WORKSPACE_BYTES = 1 << 20
BOTH = ("dp", "cp")


@pytest.fixture
def w():
    """Groups along both axes of a dp 2 x cp 4 mesh."""
    found = world("dp2cp4-explicit")
    for axis in BOTH:
        ju.initialize(found.mesh, axis, WORKSPACE_BYTES)
    yield found
    ju.finalize()


def _pretend_shared(monkeypatch, *axes):
    """As if the ranks of these groups shared one device."""
    for axis in axes:
        made = group._groups[(axis,)]
        shared = dataclasses.replace(made.report, ranks_per_device=8)
        monkeypatch.setitem(
            group._groups, (axis,), dataclasses.replace(made, report=shared)
        )


def _compile(w, fn, in_specs, out_specs, *values):
    mapped = jax.jit(w.shard_map(fn, in_specs, out_specs))
    placed = w.place(values, in_specs)
    return mapped(*placed), hlo.of(mapped, *placed)


@pytest.mark.parametrize("axes", ["cp", "dp", BOTH])
def test_values_and_types(w, axes):
    x = np.random.default_rng(0).standard_normal((2, 4, 37)).astype(np.float32)
    tree = lambda x: {"a": x, "b": (2 * x[..., :3], x[..., :0])}  # noqa: E731
    summed = axes if axes is BOTH else (axes,)
    rest = [None if a in summed else a for a in BOTH]
    out, text = _compile(
        w,
        lambda x: ju.psum(tree(x), axes, via="heap"),
        (P(*BOTH),),
        P(*rest),
        x,
    )
    expected = x.sum(tuple(BOTH.index(a) for a in summed), keepdims=True)
    np.testing.assert_allclose(out["a"], expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(out["b"][0], 2 * expected[..., :3], rtol=1e-6, atol=1e-6)
    assert out["b"][1].size == 0
    # All ranks hold the same bits, not only nearly.
    copies = {}
    for shard in out["a"].addressable_shards:
        copies.setdefault(str(shard.index), set()).add(np.asarray(shard.data).tobytes())
    assert all(len(c) == 1 for c in copies.values())
    # One call a group for the whole tree.
    assert text.fused == {"jax_ulysses.psum.v1": len(summed)}
    assert not text.count


@pytest.mark.parametrize("via", ["xla", "heap"])
def test_gradient_is_that_of_lax_psum(w, via):
    x = np.random.default_rng(1).standard_normal((2, 4, 5)).astype(np.float32)

    def gradient(psum):
        def loss(x):
            return jnp.sum(jnp.sin(psum(jnp.square(x), BOTH)))

        return jax.grad(loss)

    mine, _ = _compile(
        w, gradient(lambda *a: ju.psum(*a, via=via)), (P(*BOTH),), P(*BOTH), x
    )
    theirs, _ = _compile(w, gradient(jax.lax.psum), (P(*BOTH),), P(*BOTH), x)
    np.testing.assert_allclose(mine, theirs, rtol=1e-6, atol=1e-6)
    total = np.square(x).sum((0, 1))
    np.testing.assert_allclose(mine, np.cos(total) * 2 * x, rtol=1e-5, atol=1e-5)


def _count(w, **settings):
    """Heap sums and XLA's all-reduces of a sum over both axes."""
    x = np.ones((2, 4, 5), np.float32)
    with ju.settings(**settings):
        out, text = _compile(w, lambda x: ju.psum(x, BOTH), (P(*BOTH),), P(), x)
    assert np.all(np.asarray(out) == 8)
    return text.fused.total(), text.count["all-reduce"]


def test_auto_takes_xla_unless_ranks_share_a_device(w, monkeypatch):
    assert _count(w) == (0, 1)
    assert _count(w, reductions="heap") == (2, 0)
    _pretend_shared(monkeypatch, "cp")
    assert _count(w) == (1, 1)
    _pretend_shared(monkeypatch, "dp")
    assert _count(w) == (2, 0)
    assert _count(w, reductions="xla") == (0, 1)


def test_one_group_for_both_axes_is_preferred(w):
    ju.initialize(w.mesh, BOTH, WORKSPACE_BYTES)
    assert _count(w, reductions="heap") == (1, 0)


def test_an_axis_of_one_rank_has_nothing_to_sum():
    """No group is needed along it and no collective of XLA; only the type changes."""
    shape, axes = (2, 2, 1), ("dp", "cp", "tp")
    mesh = jax.make_mesh(shape, axes, devices=jax.devices()[:4])
    found = World("dp2cp2tp1", mesh)
    x = np.random.default_rng(2).standard_normal((2, 2, 5)).astype(np.float32)
    total = x.sum((0, 1))

    def loss(x):
        return jnp.sum(jnp.sin(ju.psum(x, axes, via="heap")))

    for axis in BOTH:
        ju.initialize(mesh, axis, WORKSPACE_BYTES)
    try:
        spec = P("dp", "cp", "tp")
        value, text = _compile(found, loss, (spec,), P(), x)
        np.testing.assert_allclose(value, np.sin(total).sum(), rtol=1e-5)
        assert text.fused.total() == 2
        assert not text.count
        gradient, _ = _compile(found, jax.grad(loss), (spec,), spec, x)
        expected = np.broadcast_to(np.cos(total), x.shape)
        np.testing.assert_allclose(gradient, expected, rtol=1e-5)
    finally:
        ju.finalize()


def test_gradients_of_replicated_weights_go_over_the_heap(w, monkeypatch):
    """What ``jax.grad`` sums for a replicated weight, without a collective of XLA."""
    _pretend_shared(monkeypatch, *BOTH)
    case = Case(kv_heads=2)
    operands = case.operands(4)
    in_specs, out_specs = case.specs(w)
    cts = case.cotangents(case.expected(operands, 4))
    expected = case.expected_gradients(operands, cts, 4)
    fn = case.call(w.axis, "host")

    def gradients(operands, cts):
        return jax.vjp(fn, *operands)[1](cts)

    mapped = jax.jit(w.shard_map(gradients, (in_specs, out_specs), in_specs))
    placed = (w.place(operands, in_specs), w.place(cts, out_specs))
    case.assert_close(mapped(*placed), expected, 3e-6, "gradient")
    text = hlo.of(mapped, *placed)
    assert not text.count, text.count
    # Weight and bias, each over cp and dp.
    assert text.fused["jax_ulysses.psum.v1"] == 4


@pytest.mark.parametrize("operator", ["qkv_proj_a2a", "a2a_out_proj"])
def test_gradients_from_outside_shard_map(w, operator):
    with ju.settings(reductions="heap"):
        Case(operator, kv_heads=2).check(w, "host")


def test_refusals(w):
    x = np.ones((2, 4, 5), np.float32)

    def run(fn, x=x, spec=P(*BOTH)):
        jax.eval_shape(w.shard_map(fn, (spec,), P(*BOTH)), w.put(x, spec))

    with pytest.raises(ValueError, match=r"array 0 of x .* replicated over axis 'cp'"):
        run(lambda x: ju.psum(x, "cp"), spec=P("dp"))
    with pytest.raises(ValueError, match="reductions='nccl': expected one of"):
        run(lambda x: ju.psum(x, "cp", via="nccl"))
    with pytest.raises(NotImplementedError, match=r"float64 on cpu, not int32"):
        run(lambda x: ju.psum(x.astype(int), "cp", via="heap"))
    ju.finalize()
    with pytest.raises(NotImplementedError, match=r"no peer group .* along \['cp'\]"):
        run(lambda x: ju.psum(x, "cp", via="heap"))


def test_report_names_the_parts_of_the_heap(w):
    found = ju.initialize(w.mesh, "cp", WORKSPACE_BYTES)
    assert found.ranks_per_device == 1
    assert found.sm_budget is None
    assert found.workspace_bytes == WORKSPACE_BYTES
    assert found.heap_bytes > WORKSPACE_BYTES
    text = report.describe(found)
    flags = (found.heap_bytes - WORKSPACE_BYTES) / 2**20
    assert f"2 slots of 0.5 MiB for data, {flags:.1f} MiB of flags" in text
    assert "P=4, 2 lines" in text
