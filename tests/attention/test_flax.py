# SPDX-License-Identifier: Apache-2.0
"""``UlyssesAttention`` under Flax's own transformations and inside Linen."""

import jax
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from flax.nnx import bridge

from jax_ulysses.models import UlyssesAttention
from tests.helpers import oracle
from tests.helpers.attention_cases import LayerCase
from tests.helpers.worlds import world


@pytest.mark.user_case(32)
def test_scan_over_stacked_layers():
    """nnx.scan over three layers equals three calls."""
    w = world("dp2cp4-explicit")
    case = LayerCase()

    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def make(rngs):
        return UlyssesAttention(12, 8, 2, 4, mesh=w.mesh, rngs=rngs)

    layers = make(nnx.Rngs(0))
    graph, state = nnx.split(layers)

    @nnx.jit
    def scanned(layers, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def body(x, layer):
            return x + layer(x)

        return body(x, layers)

    @jax.jit
    def unrolled(state, x):
        for i in range(3):
            x = x + nnx.merge(graph, jax.tree.map(lambda v, i=i: v[i], state))(x)
        return x

    with jax.set_mesh(w.mesh):
        x = w.put(case.x(), w.tokens)
        assert oracle.rel_l2(scanned(layers, x), unrolled(state, x)) < 1e-6


def test_linen_bridge():
    w, case = world("dp2cp4-explicit"), LayerCase()

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            layer = bridge.to_linen(
                UlyssesAttention, 12, 8, 2, 4, rope_theta=100.0, name="attention"
            )
            return layer(x)

    with jax.set_mesh(w.mesh):
        x = w.put(case.x(), w.tokens)
        variables = Block().init(jax.random.key(0), x)
        weights = variables["params"]["attention"]
        assert weights["w_qkv"].shape == (12, 48)
        out = jax.jit(Block().apply)(variables, x)
        params = {n: np.asarray(v) for n, v in weights.items()}
    expected = case.oracle(case.x(), params, {}, {}).out
    assert oracle.rel_l2(out, expected) < 3e-6
