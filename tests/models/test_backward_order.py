# SPDX-License-Identifier: Apache-2.0
"""``weights_first`` changes no number, and fixes the order of two gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_ulysses.models import weights_first
from jax_ulysses.models.transformer import SwiGLU


def _layers(dtype):
    """A norm, and the layer after it whose weights come first."""
    rngs = nnx.Rngs(0)
    norm = nnx.RMSNorm(8, dtype=dtype, rngs=rngs)
    return norm, nnx.Linear(8, 6, dtype=dtype, rngs=rngs)


def _loss(layers, x, ordered):
    norm, linear = layers
    hidden = norm(x)
    if ordered:
        linear, hidden = weights_first(linear, hidden)
    return jnp.sum(jnp.sin(linear(hidden)).astype(jnp.float32))


def _value_and_grads(dtype, ordered):
    graph, state = nnx.split(_layers(dtype))
    x = jax.random.normal(jax.random.key(1), (4, 8), dtype)

    def loss(state, x):
        return _loss(nnx.merge(graph, state), x, ordered)

    return jax.value_and_grad(loss, argnums=(0, 1)), (state, x)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_values_and_gradients_are_the_same_bits(dtype):
    plain, operands = _value_and_grads(dtype, ordered=False)
    ordered, _ = _value_and_grads(dtype, ordered=True)
    expected = jax.tree.leaves(jax.jit(plain)(*operands))
    found = jax.tree.leaves(jax.jit(ordered)(*operands))
    # The loss, the norm's scale, kernel and bias, x.
    assert len(found) == 5
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype == theirs.dtype
        assert np.abs(np.asarray(theirs, np.float32)).max() > 0
        np.testing.assert_array_equal(mine, theirs)


def _barriers(jaxpr):
    return [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "optimization_barrier"]


def test_what_came_before_waits_for_the_gradients_of_the_weights():
    ordered, operands = _value_and_grads(jnp.bfloat16, ordered=True)
    jaxpr = jax.make_jaxpr(ordered)(*operands).jaxpr
    (barrier,) = _barriers(jaxpr)
    # Bias, kernel and activations, none of them as a float32 copy.
    shapes = {v.aval.shape: v.aval.dtype for v in barrier.invars}
    assert shapes == dict.fromkeys([(6,), (8, 6), (4, 8)], jnp.bfloat16)
    # The kernel's gradient goes in as a product, and nothing else uses either operand.
    made = {out: eqn for eqn in jaxpr.eqns for out in eqn.outvars}
    at = jaxpr.eqns.index(barrier)
    used = [set(map(id, eqn.invars)) for eqn in jaxpr.eqns[at + 1 :]]
    for operand in barrier.invars:
        assert made[operand] in jaxpr.eqns[:at]
        assert not any(id(operand) in operands for operands in used)
    results = {id(out) for out in barrier.outvars}
    assert any(results & operands for operands in used)


def test_without_it_there_is_no_such_order():
    plain, operands = _value_and_grads(jnp.bfloat16, ordered=False)
    assert not _barriers(jax.make_jaxpr(plain)(*operands).jaxpr)


def test_the_feed_forward_layer_orders_its_second_product():
    graph, state = nnx.split(SwiGLU(8, 24, dtype=jnp.float32, rngs=nnx.Rngs(0)))

    def loss(state, x):
        return nnx.merge(graph, state)(x).sum()

    x = jnp.ones((1, 4, 8))
    jaxpr = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(state, x).jaxpr
    (barrier,) = _barriers(jaxpr)
    assert {v.aval.shape for v in barrier.invars} == {(24, 8), (1, 4, 24)}


def test_what_has_no_gradient_goes_through():
    weights = {
        "kernel": jax.random.normal(jax.random.key(1), (8, 6)),
        "columns": jnp.arange(3),
        "key": jax.random.key(2),
    }
    x = jax.random.normal(jax.random.key(3), (4, 8))

    def loss(weights, x, ordered):
        if ordered:
            weights, x = weights_first(weights, x)
        y = (x @ weights["kernel"])[:, weights["columns"]]
        return jnp.sum(y * jax.random.normal(weights["key"], y.shape))

    gradient = jax.grad(loss, (0, 1), allow_int=True)
    expected, found = (
        jax.tree.leaves(gradient(weights, x, ordered)) for ordered in (False, True)
    )
    assert len(found) == 4
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype == theirs.dtype
        if mine.dtype != jax.dtypes.float0:
            np.testing.assert_array_equal(mine, theirs)
