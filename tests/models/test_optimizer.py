# SPDX-License-Identifier: Apache-2.0
"""Which parameters decay."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from jax_ulysses.models import Transformer, UlyssesAttention, optimizer, presets


def _by_name(module):
    marks = jax.tree_util.tree_flatten_with_path(
        optimizer._decayed(nnx.state(module, nnx.Param))
    )[0]
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): m for path, m in marks
    }


def test_matrices_of_an_attention_layer_and_nothing_else():
    layer = UlyssesAttention(
        16, 4, use_bias=True, qk_norm=True, sinks=True, rngs=nnx.Rngs(0)
    )
    decayed = {name.split("/")[0] for name, mark in _by_name(layer).items() if mark}
    assert decayed == {"w_qkv", "w_out"}
    assert len(_by_name(layer)) == 7


def test_matrices_of_a_model_and_nothing_else():
    """Also where layers are stacked, so that scales have two dimensions."""
    config = dataclasses.replace(
        presets.get_preset("tiny").model, qk_norm=True, num_layers=2
    )
    marks = _by_name(Transformer(config, rngs=nnx.Rngs(0)))
    for name, mark in marks.items():
        is_scale = any(part in name for part in ("norm", "bias"))
        assert mark != is_scale, name
    assert any(marks.values())
    assert not all(marks.values())


def test_without_gradients_only_matrices_shrink(train_config):
    params = {"scale": jnp.ones((2, 3)), "kernel": jnp.ones((2, 3))}
    optimizer_ = optimizer.make_optimizer(train_config(steps=4))
    state = optimizer_.init(params)
    zeros = jax.tree.map(jnp.zeros_like, params)
    # The learning rate of the very first step is zero.
    for _ in range(2):
        updates, state = optimizer_.update(zeros, state, params)
    assert (updates["kernel"] < 0).all()
    assert (updates["scale"] == 0).all()
