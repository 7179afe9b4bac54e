# SPDX-License-Identifier: Apache-2.0
"""Arguments of ``ulysses_attention`` that cannot mean anything."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_ulysses as ju
from tests.helpers.attention_cases import LayerCase
from tests.helpers.worlds import world

W = world("cp4")
PLAIN = LayerCase(causal=False, rope_theta=None)


def _trace(case=PLAIN, operands=None, in_specs=None, **extra):
    operands = list(operands or case.operands(4))
    in_specs = in_specs or case.in_specs(W)
    placed = [
        v if s is None else W.put(v, s) for v, s in zip(operands, in_specs, strict=True)
    ]
    mapped = W.shard_map(case.call("cp", "xla", **extra), in_specs, W.tokens)
    return jax.eval_shape(mapped, *placed)


def _with(tokens=None, context=None, params=None):
    x, given, _, _ = PLAIN.operands(4)
    return x, {**given, **(params or {})}, tokens or {}, context or {}


KV = tuple(np.zeros((2, 5, 2, 4), np.float32) for _ in range(2))


def test_plain_call_traces():
    assert _trace().shape == (2, 16, 12)


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        (
            "segment_ids",
            np.zeros((2, 8), np.int32),
            r"\[B, T\] = \(2, 4\).*got \(2, 2\)",
        ),
        ("segment_ids", np.zeros((2, 16), np.float32), r"kind integer, got float32"),
        ("positions", np.zeros((2, 16), bool), r"positions .*kind integer, got bool"),
        (
            "padding_mask",
            np.zeros((2, 16), np.int32),
            r"padding_mask .*kind bool.*int32",
        ),
    ],
)
def test_per_token_inputs(name, value, match):
    with pytest.raises(ValueError, match=match):
        _trace(operands=_with(tokens={name: value}))


@pytest.mark.user_case(15)
def test_ids_of_full_length_on_every_rank_are_refused():
    ids = np.zeros((2, 4), np.int32)
    with pytest.raises(
        ValueError, match=r"segment_ids .* is replicated over axis 'cp'"
    ):
        _trace(
            operands=_with(tokens={"segment_ids": ids}),
            in_specs=(W.tokens, P(), P(), P()),
        )


@pytest.mark.parametrize(
    ("extra", "match"),
    [
        ({"window": 3}, "window has no meaning with cross_kv"),
        ({"segments": True}, "segment_ids has no meaning with cross_kv"),
        ({"joint": 2}, "joint_kv has no meaning with cross_kv"),
    ],
)
def test_cross_attention_excludes(extra, match):
    with pytest.raises(ValueError, match=match):
        _trace(LayerCase(causal=False, rope_theta=None, cross=5, **extra))


def test_causal_cross_attention():
    def call(x, w_qkv, w_out, key):
        return ju.ulysses_attention(
            x,
            ju.AttentionParams(w_qkv, w_out),
            axis_name="cp",
            num_heads=8,
            num_kv_heads=2,
            cross_kv=(key, key),
        )

    specs = (W.tokens, P(), P(), P())
    x, params, _, _ = LayerCase(cross=5, causal=False).operands(4)
    values = W.place((x, params["w_qkv"], params["w_out"], KV[0]), specs)
    with pytest.raises(ValueError, match="causal=True has no meaning with cross_kv"):
        jax.eval_shape(W.shard_map(call, specs, W.tokens), *values)


@pytest.mark.parametrize(
    ("key", "match"),
    [
        (np.zeros((2, 5, 4), np.float32), r"joint_kv must have shape \[B, L, K, H\]"),
        (np.zeros((2, 5, 8, 4), np.float32), r"= \(2, 5, 2, 4\), got \(2, 5, 8, 4\)"),
        (np.zeros((1, 5, 2, 4), np.float32), r"= \(2, 5, 2, 4\), got \(1, 5, 2, 4\)"),
        (np.zeros((2, 5, 2, 4), jnp.bfloat16), r"joint_kv has dtype bfloat16"),
    ],
)
def test_joint_keys(key, match):
    with pytest.raises(ValueError, match=match):
        _trace(operands=_with(context={"joint_kv": (key, key)}))


def test_joint_keys_that_differ_between_ranks():
    keys = tuple(np.zeros((2, 8, 2, 4), np.float32) for _ in range(2))
    with pytest.raises(ValueError, match=r"joint_kv differs between ranks of axis"):
        _trace(
            operands=_with(context={"joint_kv": keys}),
            in_specs=(W.tokens, P(), W.tokens, W.tokens),
        )


@pytest.mark.parametrize(
    ("params", "match"),
    [
        (
            {"sinks": np.zeros(7, np.float32)},
            r"sinks must have shape \(8,\), got \(7,\)",
        ),
        ({"q_norm": np.zeros(5, np.float32)}, r"QK-norm scale must have shape \(4,\)"),
        ({"b_out": np.zeros(5, np.float32)}, r"bias must have shape \(12,\)"),
        ({"w_out": np.zeros((31, 12), np.float32)}, r"w_out has 31 rows, expected 32"),
    ],
)
def test_parameters(params, match):
    with pytest.raises(ValueError, match=match):
        _trace(operands=_with(params=params))


def test_rope_needs_pairs():
    with pytest.raises(ValueError, match="head_dim must be even: 3"):
        _trace(LayerCase(head_dim=3, causal=False))
    with pytest.raises(ValueError, match="base theta=0 must be positive"):
        _trace(LayerCase(rope_theta=0, causal=False))


@pytest.mark.parametrize(
    "wrong", [{"heads": 8.0}, {"kv_heads": "2"}, {"kv_heads": True}]
)
def test_head_counts_are_whole_numbers(wrong):
    ((name, value),) = wrong.items()
    case = LayerCase(causal=False)
    operands = case.operands(4)
    with pytest.raises(
        ValueError, match=f"num_{name}={value!r} must be a whole number"
    ):
        _trace(dataclasses.replace(case, **wrong), operands)


@pytest.mark.user_case(23)
def test_replicated_activations():
    with pytest.raises(ValueError, match=r"x .* is replicated over axis 'cp'"):
        _trace(in_specs=(P(), P(), P(), P()))


@pytest.mark.user_case(25)
def test_check_vma_false():
    mapped = jax.shard_map(
        PLAIN.call("cp"),
        mesh=W.mesh,
        in_specs=PLAIN.in_specs(W),
        out_specs=W.tokens,
        check_vma=False,
    )
    operands = W.place(PLAIN.operands(4), PLAIN.in_specs(W))
    with pytest.raises(ValueError, match="ulysses_attention needs .*check_vma=True"):
        jax.eval_shape(mapped, *operands)
