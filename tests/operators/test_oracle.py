# SPDX-License-Identifier: Apache-2.0
"""The oracle itself: its gradients against finite differences, its maps by hand."""

import numpy as np
import pytest

from tests.helpers import mapping_oracle, oracle


def test_maps_by_hand():
    assert mapping_oracle.heads_of_rank(8, 4, 1) == [2, 3]
    assert [mapping_oracle.heads_of_rank(2, 8, r) for r in range(8)] == [
        [0], [0], [0], [0], [1], [1], [1], [1],
    ]  # fmt: skip
    assert mapping_oracle.tokens_of_rank(8, 2, 0, zigzag=True) == [0, 1, 6, 7]
    assert mapping_oracle.tokens_of_rank(8, 2, 1, zigzag=True) == [2, 3, 4, 5]
    assert mapping_oracle.tokens_of_rank(8, 4, 2, zigzag=False) == [4, 5]


def _check_gradient(fn, args, gradients, rng):
    """Central differences along one random direction per operand."""
    out = fn(*args)
    weight = rng.normal(size=out.shape)
    for i, gradient in enumerate(gradients(weight)):
        direction = rng.normal(size=args[i].shape)
        step = 1e-5
        moved = [
            np.sum(fn(*args[:i], args[i] + s * direction, *args[i + 1 :]) * weight)
            for s in (step, -step)
        ]
        expected = (moved[0] - moved[1]) / (2 * step)
        np.testing.assert_allclose(np.sum(gradient * direction), expected, rtol=1e-6)


@pytest.mark.parametrize("zigzag", [False, True])
def test_projection_gradients(zigzag):
    rng = np.random.default_rng(0)
    heads, ranks = (8, 2, 2), 4
    x, w, b = (rng.normal(size=s) for s in ((2, 16, 5), (5, 12 * 3), (12 * 3,)))

    def flat(*args):
        return np.concatenate(oracle.qkv_proj(*args, heads, ranks, zigzag), axis=2)

    def gradients(weight):
        parts = np.split(weight, [8, 12], axis=2)
        return oracle.qkv_proj_gradients(x, w, heads, ranks, parts, zigzag)

    _check_gradient(flat, (x, w, b), gradients, rng)

    a, w, b = (rng.normal(size=s) for s in ((2, 16, 4, 3), (12, 5), (5,)))
    _check_gradient(
        lambda *args: oracle.out_proj(*args, ranks, zigzag),
        (a, w, b),
        lambda weight: oracle.out_proj_gradients(a, w, ranks, weight, zigzag),
        rng,
    )


def test_layer_gradients():
    rng = np.random.default_rng(1)
    n, k, h, d = 4, 2, 4, 6
    shapes = {
        "w_qkv": (d, (n + 2 * k) * h),
        "w_out": (n * h, d),
        "b_qkv": ((n + 2 * k) * h,),
        "b_out": (d,),
        "q_norm": (h,),
        "k_norm": (h,),
        "sinks": (n,),
    }
    names = ("x", *shapes, "joint_k", "joint_v")
    values = [rng.normal(size=(2, 6, d))]
    values += [rng.normal(size=s) for s in shapes.values()]
    values += [rng.normal(size=(2, 3, k, h)) for _ in range(2)]
    padding = np.ones((2, 6), bool)
    padding[1, 4:] = False
    segments = [[0, 0, 1, 1, 1, 1], [0] * 6]
    mask = oracle.mask_of(
        2, 6, causal=True, window=3, segments=segments, padding=padding, num_joint=3
    )

    def layer(*args):
        given = dict(zip(names, args))
        joint = given.pop("joint_k"), given.pop("joint_v")
        x = given.pop("x")
        return oracle.Layer(x, given, n, k, mask, padding=padding, joint_kv=joint)

    def gradients(weight):
        g = layer(*values).gradients(weight)
        joint = dict(zip(("joint_k", "joint_v"), g["joint_kv"]))
        return [{**g, **joint}[name] for name in names]

    _check_gradient(lambda *a: layer(*a).out, values, gradients, rng)


def test_cross_attention_gradients():
    rng = np.random.default_rng(2)
    names = ("x", "w_qkv", "w_out", "k", "v")
    shapes = ((2, 4, 6), (6, 16), (16, 6), (2, 5, 2, 4), (2, 5, 2, 4))
    values = [rng.normal(size=s) for s in shapes]
    mask = np.ones((2, 4, 5), bool)

    def layer(x, w_qkv, w_out, k, v):
        params = {"w_qkv": w_qkv, "w_out": w_out}
        return oracle.Layer(x, params, 4, 2, mask, rope_theta=None, cross_kv=(k, v))

    def gradients(weight):
        g = layer(*values).gradients(weight)
        return [dict(g, k=g["cross_kv"][0], v=g["cross_kv"][1])[n] for n in names]

    _check_gradient(lambda *a: layer(*a).out, values, gradients, rng)
