# SPDX-License-Identifier: Apache-2.0
"""Payload dtypes in gradients, weights whose sum is deferred, and Flax's parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

import jax_ulysses as ju
from tests.helpers.projection_cases import Case
from tests.helpers.worlds import abstract, world

DTYPES = ("float32", "bfloat16", "float8_e4m3fn", "complex64")
# The sum of four copies is exact in all of these dtypes.
VALUES = (0.25, 0.5, 1.0, 2.0)


def _payload(heads, dtype):
    rng = np.random.default_rng(heads)
    x = rng.choice(VALUES, size=(2, 16, heads, 4))
    if dtype == "complex64":
        x = x + 1j * rng.choice(VALUES, size=x.shape)
    return jnp.asarray(x).astype(dtype)


def _pulled_back(w, x, ct, name):
    def scatter(x):
        return ju.scatter_heads(x, w.axis, implementation=name)

    @jax.jit
    def both(x, ct):
        out, back = jax.vjp(w.shard_map(scatter, (w.tokens,), w.heads), x)
        return out, back(ct)

    return both(w.put(x, w.tokens), w.put(ct, w.heads))


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradient_of_a_scatter(dtype, implementation):
    """The cotangent comes back as it is, imaginary parts and all."""
    w = world("cp4")
    x, ct = _payload(8, dtype), -_payload(8, dtype)
    out, (dx,) = _pulled_back(w, x, ct, implementation.on(w))
    np.testing.assert_array_equal(np.asarray(out), np.asarray(x))
    np.testing.assert_array_equal(np.asarray(dx), np.asarray(ct))


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradient_of_replicated_heads(dtype, implementation):
    w = world("cp4")
    x = _payload(2, dtype)
    copies = -_payload(4, dtype)
    name = implementation.on(w)
    if name == "host" and dtype in ("float8_e4m3fn", "complex64"):
        with pytest.raises(NotImplementedError, match=f"sums replicated .*not {dtype}"):
            _pulled_back(w, x, copies, name)
        name = ("host", "xla")
    out, (dx,) = _pulled_back(w, x, copies, name)
    np.testing.assert_array_equal(np.asarray(out), np.repeat(np.asarray(x), 2, 2))
    wide = np.asarray(copies.astype("complex64" if dtype == "complex64" else "float32"))
    total = wide.reshape(2, 16, 2, 2, 4).sum(3)
    np.testing.assert_array_equal(np.asarray(dx).astype(total.dtype), total)


@pytest.mark.parametrize("case", [Case(batch=2), Case("a2a_out_proj", batch=2)])
def test_gradient_of_a_weight_whose_sum_is_deferred(case, implementation):
    """Typed "reduced", as by ``lax.pcast``: the gradient is summed by who asked so."""
    w = world("cp4")
    operands = case.operands(w.num_ranks)
    in_specs, _ = case.specs(w)
    call = case.call(w.axis, implementation.on(w))

    def gradients(defer):
        def local(x, weight, *rest):
            def loss(weight):
                out = jax.tree.leaves(call(x, weight, *rest))
                return sum(jnp.sum(jnp.sin(y)) for y in out)

            if not defer:
                return jax.grad(loss)(weight)
            unreduced = jax.grad(loss)(lax.pcast(weight, w.axis, to="reduced"))
            assert jax.typeof(unreduced).mat.unreduced == {w.axis}
            return lax.psum(unreduced, w.axis)

        return w.shard_map(local, in_specs, P())

    placed = w.place(operands, in_specs)
    expected = jax.jit(gradients(False))(*placed)
    deferred = jax.jit(gradients(True))(*placed)
    np.testing.assert_allclose(deferred, expected, rtol=1e-5, atol=1e-5)


def test_activations_whose_sum_is_deferred_are_refused(implementation):
    """The bias would count once a term."""
    w = world("dp2cp4-explicit")
    case = Case(batch=2)
    call = case.call(w.axis, implementation.on(w))

    def local(x, *weights):
        terms = lax.pcast(lax.pcast(x, "dp", to="varying"), "dp", to="unreduced")
        return call(terms, *weights)

    in_specs = (P(None, "cp"), P(), P())
    mapped = w.shard_map(local, in_specs, (P(None, None, "cp"),) * 3)
    with pytest.raises(
        ValueError, match=r"qkv_proj_a2a: .*over \['dp'\] has yet to be"
    ):
        jax.eval_shape(mapped, *w.place(case.operands(w.num_ranks), in_specs))


def test_parameters_of_flax(implementation):
    """Passed as they are, without ``[...]``."""
    w, case = world("cp4"), Case(batch=2)
    operands = case.operands(w.num_ranks)
    in_specs, out_specs = case.specs(w)
    call = case.call(w.axis, implementation.on(w))

    def through_params(x, *weights):
        return call(x, *map(nnx.Param, weights))

    placed = w.place(operands, in_specs)
    for function in (call, through_params):
        result = jax.jit(w.shard_map(function, in_specs, out_specs))(*placed)
        if function is call:
            expected = result
    jax.tree.map(np.testing.assert_array_equal, result, expected)


def test_an_axis_of_one_rank_that_is_not_manual():
    mesh = jax.make_mesh((2, 1), ("dp", "cp"), devices=jax.devices()[:2])
    spec = P("dp")
    mapped = jax.shard_map(
        lambda x: ju.scatter_heads(x, "cp"),
        mesh=mesh,
        in_specs=spec,
        out_specs=spec,
        axis_names={"dp"},
    )
    with pytest.raises(
        ValueError, match=r"axes \['cp'\] are not manual.*P\(None, 'cp'"
    ):
        jax.eval_shape(mapped, abstract(mesh, (2, 4, 4, 2), spec=spec))


def test_another_axis_of_one_rank_need_not_be_manual():
    """XLA has nothing to gather over it."""
    mesh = jax.make_mesh((2, 1), ("cp", "tp"), devices=jax.devices()[:2])
    mapped = jax.shard_map(
        lambda x: ju.scatter_heads(x, "cp"),
        mesh=mesh,
        in_specs=P(None, "cp"),
        out_specs=P(None, None, "cp"),
        axis_names={"cp"},
    )
    operand = abstract(mesh, (2, 4, 4, 2), spec=P(None, "cp"))
    assert jax.eval_shape(mapped, operand).shape == (2, 4, 4, 2)
