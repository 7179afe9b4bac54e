# SPDX-License-Identifier: Apache-2.0
"""Attention functions of the user's own: what they get, what is refused."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ulysses as ju
from jax_ulysses.local_attention import build_mask, local_attention, normalise_window
from tests.helpers import oracle
from tests.helpers.attention_cases import LayerCase
from tests.helpers.worlds import world

W = world("cp4")


def _trace(case, attention_fn):
    """Traces only; most refusals need no compilation."""
    operands = W.place(case.operands(4), case.in_specs(W))
    fn = case.call("cp", "xla", attention_fn=attention_fn)
    jax.eval_shape(W.shard_map(fn, case.in_specs(W), W.tokens), *operands)


def test_gets_all_tokens_of_its_heads(implementation):
    seen = {}

    def attention(query, key, value, *, is_causal):
        seen.update(q=query.shape, k=key.shape, v=value.shape, is_causal=is_causal)
        return local_attention(query, key, value, is_causal=is_causal)

    case = LayerCase()
    case.check(W, implementation.on(W), attention_fn=attention)
    q, kv = (2, 16, 2, 4), (2, 16, 1, 4)
    assert seen == {"q": q, "k": kv, "v": kv, "is_causal": True}


def test_unused_features_are_not_passed():
    def attention(query, key, value):
        return query

    _trace(LayerCase(causal=False), attention)


@pytest.mark.user_case(13, 15, 20)
@pytest.mark.parametrize(
    ("features", "lacking"),
    [
        ({}, "is_causal"),
        ({"causal": False, "window": 3}, "local_window_size"),
        ({"causal": False, "padding": True}, "mask"),
        ({"causal": False, "segments": True}, "mask"),
        ({"causal": False, "joint": 2}, "mask"),
        ({"causal": False, "sinks": True}, "sinks"),
    ],
)
def test_missing_keyword_is_refused(features, lacking):
    """A mask is never dropped silently."""

    def plain(query, key, value):
        return query

    with pytest.raises(
        NotImplementedError, match=rf"'plain' takes no .*\['{lacking}'\]"
    ):
        _trace(LayerCase(**features), plain)


@pytest.mark.parametrize("shape", [(2, 4, 2, 4), (2, 17, 2, 4), (2, 16, 2, 8)])
def test_wrong_result_shape_is_refused(shape):
    def wrong(query, key, value, is_causal):
        return jnp.zeros(shape, query.dtype)

    with pytest.raises(ValueError, match=f"returned shape {re.escape(str(shape))}"):
        _trace(LayerCase(), wrong)


@pytest.mark.user_case(23)
def test_exchange_inside_attention_is_refused():
    """A wrapper registered twice would exchange twice."""

    def nested(query, key, value, **features):
        batch, length, heads, head_dim = query.shape
        x = query.reshape(batch, length, heads * head_dim)
        eye = jnp.eye(heads * head_dim)
        params = ju.AttentionParams(jnp.concatenate([eye] * 3, 1), eye)
        y = ju.ulysses_attention(x, params, axis_name="cp", num_heads=heads)
        return y.reshape(query.shape)

    with pytest.raises(ValueError, match="exchange would be applied twice"):
        _trace(LayerCase(), nested)
    _trace(LayerCase(), None)  # The guard does not stick.


def test_guard_does_not_stick_after_an_error():
    class Stop(Exception):
        pass

    def fails(query, key, value, **features):
        raise Stop

    with pytest.raises(Stop):
        _trace(LayerCase(), fails)
    _trace(LayerCase(), None)


def test_partial_and_keyword_functions_are_understood(implementation):
    case = LayerCase(sinks=True, window=3)
    fn = functools.partial(local_attention, implementation="xla")
    case.check(W, implementation.on(W), attention_fn=fn, backward=False)

    def any_keyword(*qkv, **features):
        return local_attention(*qkv, **features)

    case.check(W, implementation.name, attention_fn=any_keyword, backward=False)


@pytest.mark.parametrize(
    ("features", "n", "k"),
    [
        ({"is_causal": True}, 4, 2),
        ({"is_causal": True, "local_window_size": (2, 0)}, 4, 4),
        ({"local_window_size": (2, 1)}, 4, 1),
    ],
)
def test_sinks_keep_flags_and_masks(features, n, k):
    """Sinks turn flags into a mask; together with one given they still hold."""
    rng = np.random.default_rng(0)
    q = rng.normal(size=(2, 7, n, 4)).astype(np.float32)
    key, value = (rng.normal(size=(2, 7, k, 4)).astype(np.float32) for _ in range(2))
    sinks = rng.normal(size=(n,)).astype(np.float32)
    given = rng.random((2, 1, 7, 7)) < 0.7
    left, right = features.get("local_window_size", (7, 7))
    distance = np.arange(7)[:, None] - np.arange(7)
    sees = (distance <= left) & (distance >= -right) & given[:, 0]
    if features.get("is_causal"):
        sees &= distance >= 0
    expected = oracle.Attention(q, key, value, sees, sinks).out
    out = local_attention(q, key, value, mask=given, sinks=sinks, **features)
    assert oracle.rel_l2(out, expected) < 1e-6
    expected = oracle.Attention(q, key, value, sees).out
    out = local_attention(q, key, value, mask=given, **features)
    assert oracle.rel_l2(out, expected) < 1e-6


def test_window_arguments():
    assert normalise_window(None, True) is None
    assert normalise_window(4, True) == (3, 0)
    assert normalise_window(4, False) == (3, 3)
    assert normalise_window((2, 5), True) == (2, 0)
    assert normalise_window((2, 5), False) == (2, 5)
    with pytest.raises(ValueError, match="window=0"):
        normalise_window(0, True)
    for window in (np.int64(4), (np.int8(3), 3)):
        found = normalise_window(window, False)
        assert found == (3, 3)
        assert all(type(side) is int for side in found)
    for wrong in ("a", 2.5, (1, 2, 3), (1.0, 2)):
        with pytest.raises(ValueError, match="must be a number of tokens or a pair"):
            normalise_window(wrong, True)
    for wrong in ((-1, 2), (2, -1)):
        with pytest.raises(ValueError, match=f"window={re.escape(str(wrong))}"):
            normalise_window(wrong, False)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("window", [None, 3])
def test_mask_against_loops(is_causal, window):
    case = LayerCase(length=10, segments=True, padding=True)
    tokens = case.tokens()
    mask = build_mask(
        10,
        is_causal=is_causal,
        window=normalise_window(window, is_causal),
        segment_ids=tokens["segment_ids"],
        key_mask=tokens["padding_mask"],
        num_joint=2,
    )
    expected = oracle.mask_of(
        2,
        10,
        causal=is_causal,
        window=window,
        segments=tokens["segment_ids"],
        padding=tokens["padding_mask"],
        num_joint=2,
    )
    np.testing.assert_array_equal(mask[:, 0], expected)
