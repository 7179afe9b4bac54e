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
from jax_ulysses import TokenOrder
from jax_ulysses.models import UlyssesAttention
from tests.helpers import hlo, mapping_oracle, oracle
from tests.helpers.attention_cases import LayerCase
from tests.helpers.worlds import after, world

FULL = {"bias": True, "qk_norm": True, "sinks": True}


def _module(case: LayerCase, w=None, implementation=None, **kwargs):
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


def _compare(case, w, implementation=None, sharded=True, backward=True, **kwargs):
    """Result and parameter gradients of the module against the oracle."""
    module = _module(case, w, implementation, **kwargs)
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
        return out, back(after(out, ct))

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
@pytest.mark.parametrize("kind", ["explicit", "auto"])
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
        pytest.param(
            "argument",
            marks=pytest.mark.xfail(
                raises=ValueError,
                reason="an Explicit mesh given as an argument still needs jax.set_mesh",
            ),
        ),
        "context",
        "both",
    ],
)
def test_mesh_from_argument_or_context(how):
    w, case = world("dp2cp4-explicit"), LayerCase()
    module = _module(case, w if how != "context" else None)
    x = w.put(case.x(), w.tokens)
    context = contextlib.nullcontext() if how == "argument" else jax.set_mesh(w.mesh)
    with context:
        out = nnx.jit(lambda m, x: m(x))(module, x)
    expected = case.oracle(case.x(), case.params(), {}, {}).out
    assert oracle.rel_l2(out, expected) < 3e-6


def test_inside_a_shard_map():
    """With manual axes it takes local shapes and adds no second exchange."""
    w, case = world("dp2cp4-explicit"), LayerCase(segments=True)
    module = _module(case, w)
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
    module = _module(case, w)
    graph, state = nnx.split(module)
    fn = jax.jit(lambda s, x: nnx.merge(graph, s)(x))
    with jax.set_mesh(w.mesh):
        found = hlo.of(fn, w.put(state, P()), w.put(case.x(), w.tokens))
    assert found.exchanges == 2
    assert not found.others


@pytest.mark.user_case(22)
def test_no_mesh():
    module = _module(LayerCase())
    with pytest.raises(ValueError, match=r"needs a mesh: pass mesh=.*jax.set_mesh"):
        module(jnp.zeros((2, 16, 12)))


@pytest.mark.user_case(22)
def test_mesh_without_the_axis():
    w = world("cp4")
    module = _module(LayerCase(), w, axis_name="sp")
    with pytest.raises(ValueError, match=r"'sp' is not in the mesh.*nothing would be"):
        module(jnp.zeros((2, 16, 12)))


@pytest.mark.user_case(22, 23)
@pytest.mark.parametrize("spec", [P(), P("dp"), P("dp", None, "cp"), P(None, "dp")])
def test_explicit_input_that_is_not_sharded_on_the_sequence(spec):
    w, case = world("dp2cp4-explicit"), LayerCase()
    module = _module(case, w)
    with jax.set_mesh(w.mesh), pytest.raises(ValueError, match=r"expected \('cp',\)"):
        jax.eval_shape(lambda x: module(x), w.abstract((2, 16, 12), spec=spec))


def test_shapes_are_checked():
    w = world("dp2cp4-explicit")
    module = _module(LayerCase(), w)
    with pytest.raises(ValueError, match=r"B=3 cannot be shared by 2 devices .*3 % 2"):
        module(jnp.zeros((3, 16, 12)))
    with pytest.raises(ValueError, match=r"x must have shape \[B, S, D\]"):
        module(jnp.zeros((16, 12)))
    zigzag = _module(LayerCase(zigzag=True), w)
    with pytest.raises(ValueError, match=r"S=12 must be a multiple of 2P=8"):
        zigzag(jnp.zeros((2, 12, 12)))
    key = jnp.zeros((2, 5, 2, 4))
    with pytest.raises(ValueError, match="cross_attention=False, so cross_kv must not"):
        module(jnp.zeros((2, 16, 12)), cross_kv=(key, key))
    cross = _module(LayerCase(cross=5, causal=False), w)
    with pytest.raises(ValueError, match="cross_attention=True, so cross_kv must be"):
        cross(jnp.zeros((2, 16, 12)))
    with pytest.raises(ValueError, match="d_model=10 is not divisible by num_heads=4"):
        UlyssesAttention(10, 4, rngs=nnx.Rngs(0))


@pytest.mark.user_case(3)
def test_heads_that_do_not_fit_are_refused_with_numbers():
    w = world("cp8")
    module = _module(LayerCase(heads=4, kv_heads=4), w, batch_axes=None)
    wanted = pytest.raises(ValueError, match=r"N=4, num_kv_heads K=4, P=8")
    with jax.set_mesh(w.mesh), wanted:
        jax.eval_shape(lambda x: module(x), w.abstract((2, 16, 12), spec=w.tokens))


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
        assert jax.eval_shape(lambda x: module(x), x).dtype == jnp.bfloat16
    default = UlyssesAttention(16, 4, rngs=nnx.Rngs(0))
    assert default.w_qkv.shape == (16, 48)
    assert default.b_qkv is None


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
    from flax import linen as nn
    from flax.nnx import bridge

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


def test_params_are_an_attention_params_tree():
    params = _module(LayerCase(**FULL)).params()
    assert isinstance(params, ju.AttentionParams)
    assert len(jax.tree.leaves(params)) == 7
    mesh = world("cp4").mesh
    moved = jax.device_put(params, NamedSharding(mesh, P()))
    assert moved.w_qkv.sharding.mesh == mesh
