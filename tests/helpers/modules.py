# SPDX-License-Identifier: Apache-2.0
"""Builds a ``UlyssesAttention`` from a case."""

import jax.numpy as jnp
from flax import nnx

from jax_ulysses import TokenOrder
from jax_ulysses.models import UlyssesAttention
from tests.helpers.attention_cases import LayerCase


def module_of(case: LayerCase, w=None, implementation=None, **kwargs):
    """The module with the parameters of a case."""
    kwargs = {
        "causal": case.causal,
        "window": case.window,
        "rope_theta": case.rope_theta,
        "qk_norm": case.qk_norm,
        "use_bias": case.bias,
        "sinks": case.sinks,
        "cross_attention": bool(case.cross),
        "token_order": TokenOrder.ZIGZAG if case.zigzag else TokenOrder.CONTIGUOUS,
        "axis_name": "cp" if w is None else w.axis,
        "mesh": None if w is None else w.mesh,
        "implementation": implementation,
        **kwargs,
    }
    module = UlyssesAttention(
        case.d_model,
        case.heads,
        case.kv_heads,
        case.head_dim,
        rngs=nnx.Rngs(0),
        **kwargs,
    )
    for name, value in case.params().items():
        getattr(module, name)[...] = jnp.asarray(value)
    return module
