# SPDX-License-Identifier: Apache-2.0
"""``ulysses_attention`` and all its gradients against the dense oracle."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_ulysses as ju
from tests.helpers import mapping_oracle, oracle
from tests.helpers.attention_cases import LayerCase
from tests.helpers.worlds import world

FEATURES = {
    "causal": {},
    "full": {"causal": False},
    "no rope": {"rope_theta": None},
    "bias": {"bias": True},
    "qk_norm": {"qk_norm": True},
    "sinks": {"sinks": True},
    "sinks full": {"sinks": True, "causal": False},
    "segments": {"segments": True},
    "segments full": {"segments": True, "causal": False},
    "padding": {"padding": True},
    "padding full": {"padding": True, "causal": False},
    "window": {"window": 5},
    "window full": {"window": 5, "causal": False},
    "positions": {"positions": True},
    "cross": {"cross": 5, "causal": False, "rope_theta": None},
    "cross normed": {"cross": 3, "causal": False, "qk_norm": True, "bias": True},
    "joint": {"joint": 3, "causal": False},
    "joint causal": {"joint": 3, "window": 6, "segments": True},
    "everything": {
        "bias": True,
        "qk_norm": True,
        "sinks": True,
        "segments": True,
        "padding": True,
        "window": 6,
        "positions": True,
        "joint": 2,
    },
}


@pytest.mark.user_case(13, 15, 20, 24, 25)
@pytest.mark.parametrize("key", FEATURES)
def test_features(key, implementation):
    w, case = world("dp2cp4-explicit"), LayerCase(**FEATURES[key])
    case.check(w, implementation.on(w))
    implementation.assert_took("a2a_out_proj", "a2a_out_proj.backward")


@pytest.mark.user_case(17)
@pytest.mark.parametrize("key", ["causal", "positions", "cross", "everything"])
def test_zigzag_means_the_same(key, implementation):
    w, case = world("dp2cp4-auto"), LayerCase(zigzag=True, **FEATURES[key])
    case.check(w, implementation.on(w))


@pytest.mark.user_case(4)
@pytest.mark.parametrize(
    ("ranks", "kv_heads"), [(1, 2), (2, 8), (2, 1), (4, 1), (4, 4), (8, 1), (8, 4)]
)
def test_grouped_heads(ranks, kv_heads, implementation):
    """Every query head meets its KV head, whether that is split or replicated."""
    w = world(f"cp{ranks}")
    case = LayerCase(kv_heads=kv_heads, sinks=True, joint=2, causal=False)
    case.check(w, implementation.on(w))


@pytest.mark.user_case(20)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [1, 3, 4, 5, 15, 16, 17])
def test_window_is_global(window, causal, implementation):
    """W around T = 4 and S = 16."""
    w = world("cp4")
    case = LayerCase(window=window, causal=causal, batch=1)
    case.check(w, implementation.on(w), backward=False)


@pytest.mark.user_case(20)
def test_window_as_a_pair(implementation):
    w = world("cp4")
    name = implementation.on(w)
    for pair, same in (
        ((16, 16), LayerCase(causal=False)),
        ((3, 3), LayerCase(causal=False, window=4)),
        ((3, 0), LayerCase(window=4)),
    ):
        out = dataclasses.replace(same, causal=False, window=pair).run(w, name)
        expected = same.oracle(same.x(), same.params(), {}, {}).out
        assert oracle.rel_l2(out, expected) < 3e-6, pair


@pytest.mark.user_case(18)
@pytest.mark.parametrize("zigzag", [False, True])
def test_default_positions_are_global(zigzag, implementation):
    w = world("cp4")
    case = LayerCase(zigzag=zigzag)
    name = implementation.on(w)
    default = case.run(w, name)
    x, params, _, context = case.operands(4)
    run = case.runner(w, name)
    ids = np.tile(np.arange(16, dtype=np.int32), (2, 1))
    ids = mapping_oracle.shards_order(ids, 4, zigzag)
    given = run((x, params, {"positions": ids}, context))
    assert oracle.rel_l2(given, default) < 1e-6
    local = {"positions": ids % 4}
    wrong = run((x, params, local, context))
    assert oracle.rel_l2(wrong, default) > 1e-2


def test_bfloat16(implementation):
    # Not float16: jax.nn.dot_product_attention cannot run it on CPU devices.
    w = world("cp4")
    case = LayerCase(sinks=True, qk_norm=True, bias=True, window=6)
    x, params, tokens, context = case.operands(4)

    def cast(a):
        return np.asarray(a).astype(jnp.bfloat16)

    narrow = cast(x), {n: cast(p) for n, p in params.items()}
    expected = case.oracle(*narrow, tokens, context).out
    out = case.run(w, implementation.on(w), operands=(*narrow, tokens, context))
    assert out.dtype == jnp.bfloat16
    # Several roundings in a row, of Q, K, V, probabilities and attention outputs.
    assert oracle.rel_l2(out, expected) < 2e-2


@pytest.mark.user_case(24)
def test_same_gradients_for_every_split(implementation):
    """dp x cp = 8x1 ... 1x8 of one global batch: equal gradients, equal norm."""
    case = LayerCase(batch=8, length=8, bias=True, sinks=True)
    norms = {}
    for split in ("dp8x1", "dp4x2", "dp2x4", "dp1x8"):
        w = world(split)
        gradients = case.check(w, implementation.on(w))
        norms[split] = np.sqrt(
            sum(
                np.sum(np.square(np.asarray(g, np.float64))) for g in gradients.values()
            )
        )
    for norm in norms.values():
        np.testing.assert_allclose(norm, norms["dp8x1"], rtol=1e-5)


@pytest.mark.parametrize("name", ["cp4dp2-transposed", "tuple-swapped", "tuple2x2dp2"])
def test_meshes(name, implementation):
    w = world(name)
    case = LayerCase(zigzag=True, sinks=True, joint=1)
    case.check(w, implementation.on(w))


@pytest.mark.user_case(39)
def test_tensor_parallel_heads(implementation):
    """Heads of the weights split over tp; the output is summed, its bias added once."""
    w, case = world("dp2cp2tp2-explicit"), LayerCase(bias=True, kv_heads=4, sinks=False)
    name = implementation.on(w)
    n, k, h = case.heads, case.kv_heads, case.head_dim
    params = case.params()
    starts = np.cumsum((0, n, k, k))
    columns = np.concatenate(
        [
            np.arange(start * h, (start + m) * h).reshape(2, -1)[t]
            for t in range(2)
            for start, m in zip(starts, (n, k, k))
        ]
    )
    split = dict(
        params, w_qkv=params["w_qkv"][:, columns], b_qkv=params["b_qkv"][columns]
    )
    specs = {"w_qkv": P(None, "tp"), "w_out": P("tp"), "b_qkv": P("tp"), "b_out": P()}

    def local(x, params):
        return ju.ulysses_attention(
            x,
            ju.AttentionParams(**params),
            axis_name="cp",
            num_heads=n // 2,
            num_kv_heads=k // 2,
            rope_theta=case.rope_theta,
            tensor_axis="tp",
            implementation=name,
        )

    mapped = w.shard_map(local, (w.tokens, specs), w.tokens)

    @jax.jit
    def both(x, params, ct):
        out, back = jax.vjp(mapped, x, params)
        return out, back(ct)

    x = case.x()
    ct = np.random.default_rng(4).normal(size=x.shape).astype(np.float32)
    placed = {name: w.put(v, specs[name]) for name, v in split.items()}
    out, (dx, dparams) = both(w.put(x, w.tokens), placed, w.put(ct, w.tokens))
    expected = case.oracle(x, params, {}, {})
    assert oracle.rel_l2(out, expected.out) < 3e-6
    gradients = expected.gradients(ct)
    assert oracle.rel_l2(dx, gradients.pop("x")) < 2e-5
    gradients["w_qkv"] = gradients["w_qkv"][:, columns]
    gradients["b_qkv"] = gradients["b_qkv"][columns]
    for key, gradient in gradients.items():
        assert oracle.rel_l2(dparams[key], gradient) < 2e-5, key
