# SPDX-License-Identifier: Apache-2.0
"""Registration, lowering, result types, and argument errors of the targets."""

import importlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P

from jax_ulysses.ffi import _targets, targets

SEQUENCE = P("dp", "cp")
HEAD = P("dp", None, "cp")


def test_registration_is_idempotent():
    targets.register()
    again = importlib.reload(targets)
    again.register()
    assert set(_targets.registrations()) == {
        targets.PSUM,
        targets.EXCHANGE,
        targets.GEMM_A2A,
        targets.A2A_GEMM,
    }


def test_build_info():
    info = targets.build_info()
    assert info["platforms"] in (["cpu"], ["cpu", "cuda"])
    for platform in info["platforms"]:
        assert len(_targets.registrations(platform)) == 4
    assert info["ffi_api_version"][0] == 0


def _call(name, group=7):
    keywords = dict(
        group=group, axis_name="cp", heads=(4, 2), num_ranks=4, token_order=1
    )
    if name == targets.EXCHANGE:
        return lambda x, w: targets.exchange(
            [x.reshape(*x.shape[:2], 4, 2), x[..., :4].reshape(*x.shape[:2], 2, 2)],
            **keywords,
            direction=targets.SCATTER,
        )
    if name == targets.GEMM_A2A:
        return lambda x, w: targets.gemm_a2a(x, w, **keywords, head_dim=2)
    return lambda x, w: targets.a2a_gemm(
        [x.reshape(x.shape[0], -1, 1, 2), x.reshape(x.shape[0], -1, 1, 2)],
        w.T,
        **keywords,
    )


ATTRIBUTES = {
    targets.EXCHANGE: ["direction = 0 : i64", "sum_replicas = 0 : i64"],
    targets.GEMM_A2A: ["head_dim = 2 : i64", "w_transposed = 0 : i64"],
    targets.A2A_GEMM: ["w_transposed = 0 : i64", "want_gathered = 1 : i64"],
}


@pytest.mark.parametrize("platform", ["cuda", "cpu"])
@pytest.mark.parametrize("name", list(ATTRIBUTES))
def test_lowering_needs_neither_gpu_nor_group(mesh2x4, name, platform):
    mapped = jax.shard_map(
        _call(name),
        mesh=mesh2x4,
        in_specs=(SEQUENCE, P()),
        out_specs=(SEQUENCE, SEQUENCE) if name == targets.A2A_GEMM else (HEAD, HEAD),
    )
    x = jax.ShapeDtypeStruct(
        (2, 32, 8), jnp.bfloat16, sharding=jax.NamedSharding(mesh2x4, SEQUENCE)
    )
    w = jax.ShapeDtypeStruct(
        (8, 12), jnp.bfloat16, sharding=jax.NamedSharding(mesh2x4, P())
    )
    text = jax.jit(mapped).trace(x, w).lower(lowering_platforms=(platform,)).as_text()
    (call,) = re.findall(rf"custom_call @{re.escape(name)}\(.*", text)
    for attribute in (
        "group = 7 : i64",
        "token_order = 1 : i64",
        "heads = dense<[4, 2]> : tensor<2xi64>",
        *ATTRIBUTES[name],
    ):
        assert attribute in call
    # The attributes travel as a dictionary: the typed FFI.
    assert "mhlo.backend_config = {" in call
    assert "has_side_effect = true" not in call


def test_results_vary_over_every_axis_of_the_operands(mesh2x4):
    types = []

    def function(x, w):
        (first, _) = targets.gemm_a2a(
            x, w, group=7, axis_name="cp", heads=(4, 2), num_ranks=4, head_dim=2
        )
        types.append(jax.typeof(first))
        (alone,) = targets.exchange(
            [w.reshape(1, 4, 4, 6)],
            group=7,
            axis_name="cp",
            heads=(4,),
            num_ranks=4,
            direction=targets.SCATTER,
            varying_axes=("cp",),
        )
        types.append(jax.typeof(alone))
        return first

    x = jax.ShapeDtypeStruct(
        (1, 32, 8), jnp.float32, sharding=jax.NamedSharding(mesh2x4, P(None, "cp"))
    )
    w = jax.ShapeDtypeStruct(
        (16, 12), jnp.float32, sharding=jax.NamedSharding(mesh2x4, P("dp"))
    )
    mapped = jax.shard_map(
        function,
        mesh=mesh2x4,
        in_specs=(P(None, "cp"), P("dp")),
        out_specs=P("dp", None, "cp"),
    )
    jax.jit(mapped).trace(x, w)
    assert types[0].mat.varying == {"dp", "cp"}
    assert types[0].shape == (1, 32, 1, 2)
    assert types[1].mat.varying == {"dp", "cp"}


def test_inside_scan_with_checked_types(make_world):
    """A carry that passes both dataflows keeps its type, and its value."""
    world = make_world(4)
    keywords = dict(group=world.session, axis_name="cp", heads=(4,), num_ranks=4)
    w = np.linalg.qr(np.random.default_rng(0).standard_normal((8, 8)))[0]

    def layers(x, w):
        def layer(x, _):
            (part,) = targets.gemm_a2a(x, w, **keywords, head_dim=2)
            y, _ = targets.a2a_gemm([part], w, **keywords, w_transposed=True)
            return y, None

        return jax.lax.scan(layer, x, length=5)[0]

    x = np.random.default_rng(1).standard_normal((2, 24, 8)).astype(np.float32)
    result = world.run(layers, [SEQUENCE, P()], SEQUENCE, x, w.astype(np.float32))
    # w is orthogonal: x @ w @ w.T is x.
    np.testing.assert_allclose(np.asarray(result), x, atol=1e-5)


def test_local_heads():
    assert [targets.local_heads(m, 4) for m in (1, 2, 4, 8)] == [1, 1, 1, 2]
    with pytest.raises(ValueError, match="3 heads over P=4"):
        targets.local_heads(3, 4)


def _exchange(world, parts, heads, direction=targets.SCATTER, shape=None, **attributes):
    """A call with result types and attributes that the wrapper would not make."""
    results = [
        jax.typeof(p).update(shape=shape or (*p.shape[:1], p.shape[1] * 4, 1, 3))
        for p in parts
    ]
    attributes = {
        "group": np.int64(world.session),
        "token_order": np.int64(0),
        "heads": np.array(heads, np.int64),
        "direction": np.int64(direction),
        "sum_replicas": np.int64(0),
        **attributes,
    }
    rank = jax.lax.axis_index("cp").reshape(1)
    return jax.ffi.ffi_call(targets.EXCHANGE, results)(rank, *parts, **attributes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(heads=(3,)), r"part 0 has dims \[1,2,4,3\]|heads \[3\] with P=4"),
        (dict(heads=(8,)), r"part 0 has dims \[1,2,4,3\], expected \[1,2,8,3\]"),
        (dict(heads=(4, 4)), r"has 2 operands, expected 3"),
        (dict(heads=(4,), direction=2), r"direction is 2"),
        (dict(heads=(4,), token_order=np.int64(5)), r"token_order is 5"),
        (dict(heads=(4,), shape=(1, 8, 1, 4)), r"result 0 has dims \[1,8,1,4\]"),
        (dict(heads=(4,), direction=1), r"S=2 is no multiple of P=4"),
    ],
)
def test_wrong_arguments_are_named_with_their_numbers(make_world, change, message):
    world = make_world(4)
    x = np.zeros((2, 8, 4, 3), np.float32)
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(
            world.run(
                lambda x: tuple(_exchange(world, [x], **change)),
                [SEQUENCE],
                (HEAD,) * 1,
                x,
            )
        )
    assert targets.group_info(world.session)["closed"] == ["", ""]


def test_odd_tokens_in_zigzag_order_are_refused(make_world):
    world = make_world(4)
    with pytest.raises(jax.errors.JaxRuntimeError, match="even T, T is 3"):
        jax.block_until_ready(
            world.run(
                lambda x: targets.exchange(
                    [x],
                    group=world.session,
                    axis_name="cp",
                    heads=(4,),
                    num_ranks=4,
                    direction=targets.SCATTER,
                    token_order=1,
                )[0],
                [SEQUENCE],
                HEAD,
                np.zeros((2, 12, 4, 3), np.float32),
            )
        )


def test_integer_products_are_refused(make_world):
    world = make_world(4)
    x, w = np.zeros((2, 8, 4), np.int32), np.zeros((4, 8), np.int32)
    with pytest.raises(jax.errors.JaxRuntimeError, match="x has dtype S32, expected"):
        jax.block_until_ready(
            world.run(
                lambda x, w: targets.gemm_a2a(
                    x,
                    w,
                    group=world.session,
                    axis_name="cp",
                    heads=(4,),
                    num_ranks=4,
                    head_dim=2,
                )[0],
                [SEQUENCE, P()],
                HEAD,
                x,
                w,
            )
        )
