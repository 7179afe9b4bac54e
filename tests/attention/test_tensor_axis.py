# SPDX-License-Identifier: Apache-2.0
"""What ``tensor_axis`` needs of mesh and operands; test_values.py has values."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jax_ulysses as ju
from tests.helpers.worlds import abstract, world

W = world("dp2cp2tp2-explicit")
HEADS, KV_HEADS, HEAD_DIM, D_MODEL = 4, 2, 4, 12
SPECS = {
    "x": W.tokens,
    "w_qkv": P(None, "tp"),
    "w_out": P("tp"),
    "b_out": P(),
}
SHAPES = {
    "x": (2, 8, D_MODEL),
    "w_qkv": (D_MODEL, (HEADS + 2 * KV_HEADS) * HEAD_DIM),
    "w_out": (HEADS * HEAD_DIM, D_MODEL),
    "b_out": (D_MODEL,),
}


def _trace(specs=None, shapes=None, tensor_axis="tp", b_out_dtype="float32", **kwargs):
    specs, shapes = SPECS | (specs or {}), SHAPES | (shapes or {})

    def local(x, w_qkv, w_out, b_out):
        return ju.ulysses_attention(
            x,
            ju.AttentionParams(w_qkv, w_out, b_out=b_out),
            axis_name="cp",
            num_heads=HEADS // 2,
            num_kv_heads=KV_HEADS // 2,
            tensor_axis=tensor_axis,
            **kwargs,
        )

    operands = [
        W.abstract(shapes[n], b_out_dtype if n == "b_out" else "float32", spec)
        for n, spec in specs.items()
    ]
    return jax.eval_shape(
        W.shard_map(local, tuple(specs.values()), W.tokens), *operands
    )


def test_plain_call_traces():
    assert _trace().shape == (2, 8, D_MODEL)


@pytest.mark.parametrize("axis", ["model", "cp"])
def test_an_axis_that_cannot_be(axis):
    with pytest.raises(ValueError, match=f"tensor_axis='{axis}' must be a mesh axis"):
        _trace(tensor_axis=axis)


def test_the_axis_of_the_batch():
    with pytest.raises(ValueError, match=r"'dp': x \(local shape .*sharded on it"):
        _trace(tensor_axis="dp")


@pytest.mark.parametrize("name", ["w_qkv", "w_out"])
def test_weights_that_are_not_split(name):
    """All ranks would do the same heads, and the sum would be tp times too large."""
    shape = list(SHAPES[name])
    shape[1 if name == "w_qkv" else 0] //= 2
    with pytest.raises(ValueError, match=f"'tp': {name} .*is replicated over it"):
        _trace({name: P()}, {name: tuple(shape)})


def test_a_bias_that_is_split():
    with pytest.raises(ValueError, match="'tp': b_out .*sharded on it"):
        _trace({"b_out": P("tp")}, {"b_out": (2 * D_MODEL,)})


def test_a_bias_that_would_be_broadcast():
    with pytest.raises(ValueError, match=r"b_out must have shape \(12,\), got \(1,\)"):
        _trace(shapes={"b_out": (1,)})


def test_a_bias_of_another_dtype():
    with pytest.raises(ValueError, match="b_out has dtype bfloat16 but x has float32"):
        _trace(b_out_dtype="bfloat16")


def test_weights_that_are_sharded_over_the_sequence_axis():
    """With H given they no longer pass for weights of narrower heads."""
    shapes = {"w_qkv": (D_MODEL, 2 * SHAPES["w_qkv"][1]), "w_out": (32, D_MODEL)}
    assert _trace(shapes=shapes).shape == (2, 8, D_MODEL)
    with pytest.raises(ValueError, match=r"32 columns, expected 16 \(4 heads .* of"):
        _trace(shapes=shapes, head_dim=HEAD_DIM)


def test_an_axis_of_one_rank():
    mesh = jax.make_mesh((2, 1), ("cp", "tp"), devices=jax.devices()[:2])
    specs = P(None, "cp")
    x = abstract(mesh, (1, 4, 8), spec=specs)

    def local(x):
        return ju.ulysses_attention(
            x,
            ju.AttentionParams(jnp.zeros((8, 24)), jnp.zeros((8, 8))),
            axis_name="cp",
            num_heads=2,
            tensor_axis="tp",
        )

    mapped = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=specs)
    assert jax.eval_shape(mapped, x).shape == x.shape
