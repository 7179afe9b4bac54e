# SPDX-License-Identifier: Apache-2.0
"""Modules that were made alike are alike to Flax and JAX."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_ulysses.models import UlyssesAttention
from tests.helpers.attention_cases import LayerCase
from tests.helpers.modules import module_of
from tests.helpers.worlds import world


def _attention(query, key, value, **_):
    return jnp.broadcast_to(value.mean(1, keepdims=True), query.shape)


def _make(seed=0, **kwargs):
    return UlyssesAttention(16, 4, 2, rngs=nnx.Rngs(seed), **kwargs)


OPTIONS = {
    "plain": {},
    "everything": dict(
        window=3,
        rope_theta=None,
        qk_norm=True,
        use_bias=True,
        sinks=True,
        attention_fn=_attention,
        implementation=("cuda", "xla"),
    ),
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_equal_graphs(options):
    module = _make(**options)
    graph = nnx.graphdef(module)
    assert nnx.graphdef(_make(1, **options)) == graph
    assert nnx.graphdef(copy.deepcopy(module)) == graph
    assert nnx.graphdef(nnx.eval_shape(lambda: _make(**options))) == graph
    assert nnx.graphdef(_make(causal=False)) != graph


def test_a_list_of_implementations():
    """What a graph holds is hashed, and a list cannot be."""
    graph = nnx.graphdef(_make(implementation=["cuda", "xla"]))
    assert graph == nnx.graphdef(_make(implementation=("cuda", "xla")))
    with pytest.raises(ValueError, match="implementation='nccl': expected"):
        _make(implementation="nccl")


def test_an_average_of_weights():
    """Over two modules at once, as exponential moving averages are taken."""
    mean = jax.tree.map(lambda x, y: (x + y) / 2, _make(0), _make(1))
    expected = (_make(0).w_qkv[...] + _make(1).w_qkv[...]) / 2
    np.testing.assert_array_equal(mean.w_qkv[...], expected)


def test_jit_traces_once_for_all():
    w, case = world("dp2cp4-explicit"), LayerCase()
    traced = []

    @nnx.jit
    def call(module, x):
        traced.append(1)
        return module(x)

    x = w.put(case.x(), w.tokens)
    results = [call(module_of(case, w), x) for _ in range(3)]
    assert len(traced) == 1
    np.testing.assert_array_equal(results[0], results[2])


def test_cross_attention_has_no_scale_of_keys():
    """Its keys come ready; a scale would never be used."""
    module = _make(cross_attention=True, qk_norm=True)
    assert module.k_norm is None
    assert module.q_norm is not None
