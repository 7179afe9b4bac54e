# SPDX-License-Identifier: Apache-2.0
"""What may influence what: change one token and see which outputs move."""

import dataclasses

import jax
import numpy as np
import pytest

from tests.helpers import mapping_oracle
from tests.helpers.attention_cases import LayerCase
from tests.helpers.worlds import world


def _moved(w, case, name, *changes):
    """For each change of x: [B, S] bool in true order, which outputs differ."""
    run = case.runner(w, name)
    _, *rest = case.operands(w.num_ranks)

    def outputs(x):
        x = mapping_oracle.shards_order(x, w.num_ranks, case.zigzag)
        return run((x, *rest))

    before = outputs(case.x())
    assert np.isfinite(before).all()
    moved = [(before != outputs(change(case.x()))).any(-1) for change in changes]
    return moved[0] if len(moved) == 1 else moved


def _poke(row, token, value=3.0):
    def change(x):
        x = x.copy()
        x[row, token] += value
        return x

    return change


@pytest.mark.user_case(22)
@pytest.mark.parametrize("zigzag", [False, True])
def test_first_token_moves_every_rank(zigzag, implementation):
    w = world("cp4")
    case = LayerCase(zigzag=zigzag)
    moved = _moved(w, case, implementation.on(w), _poke(0, 0))
    assert moved[0].all()
    assert not moved[1].any()


@pytest.mark.user_case(17)
@pytest.mark.parametrize("zigzag", [False, True])
def test_causal_is_about_true_positions(zigzag, implementation):
    w = world("cp4")
    case = LayerCase(zigzag=zigzag)
    moved = _moved(w, case, implementation.on(w), _poke(1, 9))
    assert moved[1].tolist() == [t >= 9 for t in range(16)]


@pytest.mark.user_case(20)
def test_window_reaches_across_ranks_and_ends(implementation):
    w = world("cp4")
    moved = _moved(w, LayerCase(window=6), implementation.on(w), _poke(0, 5))
    assert moved[0].tolist() == [5 <= t < 11 for t in range(16)]
    case = LayerCase(window=6, causal=False)
    moved = _moved(w, case, implementation.on(w), _poke(0, 5))
    assert moved[0].tolist() == [0 <= t < 11 for t in range(16)]


@pytest.mark.user_case(15)
@pytest.mark.parametrize("causal", [True, False])
def test_segments_do_not_see_each_other(causal, implementation):
    """Ids differ between rows and reach over rank borders; they are sharded inputs."""
    w = world("dp2cp4-explicit")
    case = LayerCase(segments=True, causal=causal)
    name, ids = implementation.on(w), case.tokens()["segment_ids"]
    both = _moved(w, case, name, _poke(0, 4), _poke(1, 4))
    for (row, token), moved in zip(((0, 4), (1, 4)), both, strict=True):
        same = ids[row] == ids[row, token]
        expected = same & (np.arange(16) >= token) if causal else same
        assert moved[row].tolist() == expected.tolist()
        assert not moved[1 - row].any()


@pytest.mark.user_case(15)
@pytest.mark.parametrize("dtype", ["int64", "uint64", "int16"])
def test_wide_ids_stay_apart(dtype):
    """Ids that differ in their upper half only, where JAX has 64 bits."""
    w, case = world("cp4"), LayerCase(segments=True)
    x, params, tokens, context = case.operands(w.num_ranks)
    ids = tokens["segment_ids"].astype(dtype)
    large = ids << (8 * ids.itemsize - 4) if ids.itemsize == 8 else ids
    with jax.enable_x64(True):
        run = case.runner(w, "xla")
        expected = run((x, params, tokens, context))
        given = run((x, params, {"segment_ids": large}, context))
    np.testing.assert_array_equal(given, expected)


@pytest.mark.user_case(13, 28)
@pytest.mark.parametrize("causal", [True, False])
def test_padding_does_not_leak(causal, implementation):
    w = world("dp2cp4-explicit")
    case = LayerCase(padding=True, causal=causal)
    name, real = implementation.on(w), case.tokens()["padding_mask"]
    assert (~real[1]).sum() == 5  # The last rank of row 1 holds nothing but padding.

    def poison(x):
        x = x.copy()
        x[~real] = 1e3
        return x

    assert not _moved(w, case, name, poison).any()


@pytest.mark.user_case(13)
@pytest.mark.parametrize("features", [{}, {"sinks": True}, {"joint": 3}, {"window": 4}])
def test_padded_equals_unpadded(features, implementation):
    """Non-causal, so every real token would feel a leaking key."""
    w = world("cp4")
    name = implementation.on(w)
    short = LayerCase(length=12, causal=False, **features)
    padded = dataclasses.replace(short, length=16)
    x = np.full((2, 16, short.d_model), 7, np.float32)
    x[:, :12] = short.x()
    mask = np.tile(np.arange(16) < 12, (2, 1))
    operands = (x, short.params(), {"padding_mask": mask}, short.context())
    out = padded.run(w, name, operands=operands)
    np.testing.assert_allclose(out[:, :12], short.run(w, name), rtol=0, atol=2e-6)
    assert not out[:, 12:].any()


@pytest.mark.user_case(28)
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("causal", [True, False])
def test_rows_and_ranks_without_a_real_token(causal, sinks, implementation):
    """All padding on one rank and in one row: zeros, and finite gradients."""
    w = world("cp4")
    case = LayerCase(padding=True, causal=causal, sinks=sinks)

    class Masked(LayerCase):
        def tokens(self, seed=2):
            mask = np.ones((2, 16), bool)
            mask[0, 4:8] = False
            mask[1] = False
            return {"padding_mask": mask}

    masked = Masked(**dataclasses.asdict(case))
    gradients = masked.check(w, implementation.on(w))
    for gradient in gradients.values():
        assert np.isfinite(np.asarray(gradient)).all()
    assert not gradients["x"][1].any()
    assert not gradients["x"][0, 4:8].any()


def test_joint_keys_are_seen_by_every_token(implementation):
    w = world("cp4")
    name = implementation.on(w)
    case = LayerCase(joint=3, window=2, segments=True)
    run = case.runner(w, name)
    before = run(case.operands(4))
    x, params, tokens, context = case.operands(4)
    key, value = (v.copy() for v in context["joint_kv"])
    value[0, 1] += 1
    after = run((x, params, tokens, {"joint_kv": (key, value)}))
    moved = (before != after).any(-1)
    assert moved[0].all()
    assert not moved[1].any()
