# SPDX-License-Identifier: Apache-2.0
"""``UlyssesAttention`` on global arrays: any length, any mesh, clear refusals."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ulysses as ju
from jax_ulysses.models import UlyssesAttention
from tests.helpers import hlo, mapping_oracle, oracle
from tests.helpers.attention_cases import LayerCase
from tests.helpers.modules import module_of
from tests.helpers.worlds import world

FULL = {"bias": True, "qk_norm": True, "sinks": True}


def _compare(case, w, implementation=None, sharded=True, backward=True, **kwargs):
    """Result and parameter gradients of the module against the oracle."""
    module = module_of(case, w, implementation, **kwargs)
    graph, state = nnx.split(module)
    ranks = w.num_ranks
    true = case.x(), case.params(), case.tokens(), case.context()

    def order(v):
        return mapping_oracle.shards_order(v, ranks, case.zigzag) if case.zigzag else v

    spec = w.tokens if sharded else P(w.batch)
    x = w.put(order(true[0]), spec)
    tokens = {n: w.put(order(v), spec) for n, v in true[2].items()}
    context = w.put(true[3], P(w.batch))
    ct = np.random.default_rng(9).normal(size=true[0].shape).astype(np.float32)

    @jax.jit
    def both(state, x, tokens, context, ct):
        def fn(state, x):
            return nnx.merge(graph, state)(x, **tokens, **context)

        out, back = jax.vjp(fn, state, x)
        return out, back(ct)

    expected = case.oracle(*true)
    with jax.set_mesh(w.mesh):
        out, (dstate, dx) = both(
            w.put(state, P()), x, tokens, context, w.put(order(ct), spec)
        )

    def true_order(v):
        v = np.asarray(v)
        return mapping_oracle.true_order(v, ranks, True) if case.zigzag else v

    assert oracle.rel_l2(true_order(out), expected.out) < 3e-6
    if not backward:
        return
    gradients = expected.gradients(ct)
    assert oracle.rel_l2(true_order(dx), gradients["x"]) < 2e-5
    for name, gradient in nnx.to_pure_dict(dstate).items():
        error = oracle.rel_l2(gradient, gradients[name])
        assert error < 2e-5, f"{name}: {error:.2e}"


@pytest.mark.user_case(11, 13)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("length", [1, 3, 15, 17])
def test_any_length(length, causal):
    """Around multiples of P, and below P: padded, masked and cut again."""
    w = world("dp2cp4-explicit")
    case = LayerCase(length=length, causal=causal)
    _compare(case, w, sharded=False)


@pytest.mark.user_case(11)
@pytest.mark.parametrize("kind", ["explicit", "auto"])
def test_uneven_length_with_every_feature(kind):
    features = {"segments": True, "padding": True, "positions": True, "window": 5}
    case = LayerCase(length=14, **FULL, **features, joint=2)
    _compare(case, world(f"dp2cp4-{kind}"), sharded=False)


@pytest.mark.parametrize("length", [16, 6])
def test_implementations(length, implementation):
    w = world("dp2cp4-explicit")
    case = LayerCase(length=length, **FULL)
    _compare(case, w, implementation.on(w), sharded=length == 16)
    implementation.assert_took("qkv_proj_a2a", "a2a_out_proj")


@pytest.mark.user_case(17)
@pytest.mark.parametrize("kind", ["explicit", "auto", "dp_auto", "cp_auto"])
def test_zigzag(kind):
    case = LayerCase(zigzag=True, segments=True, **FULL)
    _compare(case, world(f"dp2cp4-{kind}"))


def test_cross_attention():
    w = world("dp2cp4-explicit")
    _compare(LayerCase(cross=5, causal=False, bias=True), w)
    _compare(LayerCase(cross=5, causal=False, length=6), w, sharded=False)


@pytest.mark.parametrize("name", ["cp8", "tuple-swapped", "tuple2x2dp2", "cp1"])
def test_meshes(name):
    w = world(name)
    batch = {} if w.batch else {"batch_axes": None}
    _compare(LayerCase(kv_heads=1), w, backward=False, **batch)


@pytest.mark.parametrize(
    "how",
    [
        "argument",
        "context",
        "both",
    ],
)
def test_mesh_from_argument_or_context(how):
    w, case = world("dp2cp4-explicit"), LayerCase()
    module = module_of(case, w if how != "context" else None)
    x = w.put(case.x(), w.tokens)
    context = contextlib.nullcontext() if how == "argument" else jax.set_mesh(w.mesh)
    with context:
        out = nnx.jit(lambda m, x: m(x))(module, x)
    expected = case.oracle(case.x(), case.params(), {}, {}).out
    assert oracle.rel_l2(out, expected) < 3e-6


def test_inside_a_shard_map():
    """With manual axes it takes local shapes and adds no second exchange."""
    w, case = world("dp2cp4-explicit"), LayerCase(segments=True)
    module = module_of(case, w)
    graph, state = nnx.split(module)

    def local(state, x, ids):
        return nnx.merge(graph, state)(x, segment_ids=ids)

    specs = (P(), w.tokens, w.tokens)
    ids = case.tokens()["segment_ids"]
    mapped = jax.jit(w.shard_map(local, specs, w.tokens))
    values = w.put(state, P()), w.put(case.x(), w.tokens), w.put(ids, w.tokens)
    expected = case.oracle(case.x(), case.params(), case.tokens(), {}).out
    assert oracle.rel_l2(mapped(*values), expected) < 3e-6
    assert hlo.of(mapped, *values).exchanges == 2


@pytest.mark.user_case(22)
def test_exchanges_are_in_the_program():
    w, case = world("dp2cp4-explicit"), LayerCase()
    module = module_of(case, w)
    graph, state = nnx.split(module)
    fn = jax.jit(lambda s, x: nnx.merge(graph, s)(x))
    with jax.set_mesh(w.mesh):
        found = hlo.of(fn, w.put(state, P()), w.put(case.x(), w.tokens))
    assert found.exchanges == 2
    assert not found.others


def test_parameters_and_dtypes():
    w = world("dp2cp4-explicit")
    module = UlyssesAttention(
        12,
        8,
        2,
        4,
        use_bias=True,
        qk_norm=True,
        sinks=True,
        dtype=jnp.bfloat16,
        param_dtype=jnp.float32,
        mesh=w.mesh,
        rngs=nnx.Rngs(0),
    )
    shapes = {
        n: v.shape for n, v in nnx.to_pure_dict(nnx.state(module, nnx.Param)).items()
    }
    assert shapes == {
        "w_qkv": (12, 48),
        "w_out": (32, 12),
        "b_qkv": (48,),
        "b_out": (12,),
        "q_norm": (4,),
        "k_norm": (4,),
        "sinks": (8,),
    }
    assert {v.dtype for v in jax.tree.leaves(nnx.state(module))} == {
        jnp.dtype("float32")
    }
    x = w.abstract((2, 16, 12), spec=w.tokens)
    with jax.set_mesh(w.mesh):
        assert jax.eval_shape(module.__call__, x).dtype == jnp.bfloat16
    default = UlyssesAttention(16, 4, rngs=nnx.Rngs(0))
    assert default.w_qkv.shape == (16, 48)
    assert default.b_qkv is None


def test_params_are_an_attention_params_tree():
    params = module_of(LayerCase(**FULL)).params()
    assert isinstance(params, ju.AttentionParams)
    assert len(jax.tree.leaves(params)) == 7
    mesh = world("cp4").mesh
    moved = jax.device_put(params, NamedSharding(mesh, P()))
    assert moved.w_qkv.sharding.mesh == mesh
