# SPDX-License-Identifier: Apache-2.0
"""Wrong arguments: a ValueError while tracing that names the numbers and the rule."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_ulysses as ju
from jax_ulysses import TokenOrder
from jax_ulysses.spec import HeadExchange
from tests.helpers.worlds import world

f32 = jnp.float32
ZIGZAG = {"token_order": TokenOrder.ZIGZAG}


def _zeros(*shape, dtype=f32):
    return jnp.zeros(shape, dtype)


def _trace(fn, *shapes, w=None, in_specs=None, dtypes=None, **shard_map_kwargs):
    """Traces a per-device function on global abstract operands."""
    w = w or world("cp4")
    dtypes = dtypes or (f32,) * len(shapes)
    in_specs = in_specs or tuple(P(None, "cp") if len(s) > 2 else P() for s in shapes)
    mapped = jax.shard_map(
        fn,
        mesh=w.mesh,
        in_specs=in_specs,
        out_specs=P(None, w.axes),
        **shard_map_kwargs,
    )
    operands = map(w.abstract, shapes, dtypes, in_specs)
    return jax.eval_shape(mapped, *operands)


def qkv(x, w, b=None, *, n=8, k=4, **kwargs):
    return ju.qkv_proj_a2a(
        x, w, b, axis_name="cp", num_heads=n, num_kv_heads=k, **kwargs
    )


def out(a, w, b=None, **kwargs):
    return ju.a2a_out_proj(a, w, b, axis_name="cp", **kwargs)


def scatter(x, **kwargs):
    return ju.scatter_heads(x, "cp", **kwargs)


def gather(x, **kwargs):
    return ju.gather_heads(x, "cp", **kwargs)


X, W = (2, 16, 6), (6, 16 * 3)  # 8 + 2*4 heads of 3
A = (2, 64, 2, 3)  # Inside: S = 16, local heads 2, so w_out has 4 * 2 * 3 rows.


SHAPE_ERRORS = {
    "x rank": (qkv, (X[:2], W), r"x must have shape \[B, T, D\], got \(2, 4\)"),
    "x empty": (qkv, ((0, 16, 6), W), r"x is empty: shape \(0, 4, 6\)"),
    "w rows": (qkv, (X, (7, 48)), r"w_qkv has 7 rows, expected 6 \(D of x\)"),
    "w columns": (qkv, (X, (6, 50)), r"50 columns, which 16 heads .*: 50 % 16 = 2"),
    "w rank": (qkv, (X, (6, 48, 1)), r"w_qkv must have shape \[D, columns\]"),
    "head_dim": (
        lambda x, w: qkv(x, w, head_dim=4),
        (X, W),
        r"w_qkv has 48 columns, expected 64 \(16 heads .* head_dim 4\)",
    ),
    "bias": (qkv, (X, W, (47,)), r"bias must have shape \(48,\), got \(47,\)"),
    "q bias": (
        lambda x, w, b: ju.q_proj_a2a(x, w, b, axis_name="cp", num_heads=8),
        (X, (6, 24), (3,)),
        r"bias must have shape \(24,\)",
    ),
    "zigzag odd T": (
        lambda x, w: qkv(x, w, **ZIGZAG),
        ((2, 12, 6), W),
        r"2P chunks.* x has T=3 with P=4",
    ),
    "no heads": (lambda x, w: qkv(x, w, n=0), (X, W), r"N=0.*at least 1"),
    "no kv heads": (lambda x, w: qkv(x, w, k=0), (X, W), r"K=0.*at least 1"),
    "q heads": (
        lambda x, w: ju.q_proj_a2a(x, w, axis_name="cp", num_heads=2),
        (X, (6, 24)),
        r"N=2.*P=4.*N must be a multiple of P, but 2 % 4 = 2",
    ),
    "scatter rank": (scatter, (X,), r"x must have shape \[B, T, N, H\], got"),
    "scatter heads": (
        scatter,
        ((2, 16, 6, 3),),
        r"N=6 cannot be divided over P=4 .*6 % 4 = 2 and 4 % 6 = 4",
    ),
    "scatter zigzag": (
        lambda x: scatter(x, **ZIGZAG),
        ((2, 12, 8, 3),),
        r"T = S / P must be even.*T=3",
    ),
    "gather rank": (gather, (X,), r"x must have shape \[B, S, N/P, H\], got"),
    "gather tokens": (
        gather,
        ((2, 60, 2, 3),),
        r"S=15 tokens, which P=4 ranks cannot share: 15 % 4 = 3",
    ),
    "gather zigzag": (
        lambda x: gather(x, **ZIGZAG),
        ((2, 48, 2, 3),),
        r"x has T=3 with P=4",
    ),
    "out rank": (out, (X, (24, 6)), r"a must have shape \[B, S, N/P, H\]"),
    "out rows": (
        out,
        (A, (25, 6)),
        r"w_out has 25 rows, expected 24 \(P=4 times 2x3 local features of a\)",
    ),
    "out bias": (out, (A, (24, 6), (5,)), r"bias must have shape \(6,\), got \(5,\)"),
    "out tokens": (
        out,
        ((2, 60, 2, 3), (24, 6)),
        r"a has S=15 tokens, which P=4 ranks cannot share",
    ),
    "x empty, out": (
        lambda x, w: ju.a2a_proj(x, w, axis_name="cp"),
        ((2, 0, 2, 3), (24, 6)),
        r"x is empty: shape \(2, 0, 2, 3\)",
    ),
    "no features": (
        lambda x, w: ju.a2a_proj(x, w, axis_name="cp"),
        ((2, 0, 6), (24, 6)),
        r"x is empty: shape \(2, 0, 6\)",
    ),
    "features": (
        lambda x, w: ju.a2a_proj(x, w, axis_name="cp"),
        ((2, 64, 6), (25, 6)),
        r"w has 25 rows, expected 24",
    ),
}


@pytest.mark.user_case(3, 11)
@pytest.mark.parametrize("case", SHAPE_ERRORS)
def test_shapes(case):
    fn, shapes, match = SHAPE_ERRORS[case]
    in_specs = tuple(P(None, "cp") if i == 0 else P() for i, _ in enumerate(shapes))
    with pytest.raises(ValueError, match=match):
        _trace(fn, *shapes, in_specs=in_specs)


DTYPE_ERRORS = {
    "int8 x": (qkv, (X, W), ("int8", "int8"), r"x has dtype int8; projections take"),
    "mixed w": (
        qkv,
        (X, W),
        (f32, "bfloat16"),
        r"w_qkv has dtype bfloat16 but x has float32; cast one",
    ),
    "mixed bias": (
        qkv,
        (X, W, (48,)),
        (f32, f32, "float16"),
        r"bias has dtype float16 but x has float32",
    ),
    "mixed out": (out, (A, (24, 6)), (f32, "bfloat16"), r"w_out has dtype bfloat16"),
    "fp8 a": (out, (A, (24, 6)), ("float8_e4m3fn",) * 2, r"a has dtype float8_e4m3fn"),
    "out bias": (out, (A, (24, 6), (6,)), (f32, f32, "bfloat16"), r"bias has dtype"),
}


@pytest.mark.user_case(30)
@pytest.mark.parametrize("case", DTYPE_ERRORS)
def test_dtypes(case):
    fn, shapes, dtypes, match = DTYPE_ERRORS[case]
    in_specs = tuple(P(None, "cp") if i == 0 else P() for i, _ in enumerate(shapes))
    with pytest.raises(ValueError, match=match):
        _trace(fn, *shapes, in_specs=in_specs, dtypes=dtypes)


CALLS = {
    "scatter_heads": (scatter, ((2, 16, 8, 3),)),
    "gather_heads": (gather, ((2, 64, 2, 3),)),
    "qkv_proj_a2a": (qkv, (X, W)),
    "q_proj_a2a": (
        lambda x, w: ju.q_proj_a2a(x, w, axis_name="cp", num_heads=8),
        (X, (6, 24)),
    ),
    "a2a_out_proj": (out, (A, (24, 6))),
    "a2a_proj": (lambda x, w: ju.a2a_proj(x, w, axis_name="cp"), (A, (24, 6))),
}
every_operator = pytest.mark.parametrize("name", CALLS)


@every_operator
def test_valid_calls_trace(name):
    """The calls that the refusals below vary are right themselves."""
    _trace(CALLS[name][0], *CALLS[name][1])


@pytest.mark.user_case(25)
@every_operator
def test_check_vma_false(name):
    fn, shapes = CALLS[name]
    with pytest.raises(ValueError, match=rf"{name} needs .*check_vma=True"):
        _trace(fn, *shapes, check_vma=False)


@pytest.mark.user_case(23)
@every_operator
def test_replicated_operand(name):
    fn, shapes = CALLS[name]
    shapes = ((2, 16, *shapes[0][2:]), *shapes[1:])
    with pytest.raises(
        ValueError, match=rf"{name}: .* is replicated over axis 'cp'.*in_specs"
    ):
        _trace(fn, *shapes, in_specs=(P(),) * len(shapes))


@pytest.mark.user_case(23)
def test_operand_replicated_over_half_of_a_tuple_axis():
    with pytest.raises(ValueError, match=r"replicated over axis 'b'"):
        _trace(
            lambda x: ju.scatter_heads(x, ("a", "b")),
            (2, 16, 8, 3),
            w=world("tuple"),
            in_specs=(P(None, "a"),),
        )


@every_operator
def test_outside_shard_map(name):
    fn, shapes = CALLS[name]
    with pytest.raises(
        ValueError, match=rf"{name} .*must be called inside\s*jax.shard"
    ):
        fn(*(_zeros(*s) for s in shapes))


@pytest.mark.parametrize("types", [AxisType.Auto, AxisType.Explicit])
@every_operator
def test_mesh_axes_that_are_not_manual(name, types):
    w = world("dp2cp4-auto" if types is AxisType.Auto else "dp2cp4-explicit")
    fn, shapes = CALLS[name]
    with pytest.raises(ValueError, match=rf"{name}: mesh axes \['dp'\] are not manual"):
        _trace(fn, *shapes, w=w, axis_names={"cp"})


@pytest.mark.user_case(22)
def test_axis_that_the_mesh_lacks():
    with pytest.raises(ValueError, match=r"axis_name 'sp' is not in the mesh.*'cp': 4"):
        _trace(lambda x: ju.scatter_heads(x, "sp"), (2, 16, 8, 3))


@pytest.mark.parametrize("axis", [(), 3, ("cp", "cp"), None, ("cp", 1)])
def test_axis_name_of_a_wrong_kind(axis):
    with pytest.raises(ValueError, match=r"axis_name must be"):
        _trace(lambda x: ju.scatter_heads(x, axis), (2, 16, 8, 3))


def test_token_order_by_value_or_wrong():
    _trace(lambda x: scatter(x, token_order="zigzag"), (2, 16, 8, 3))
    with pytest.raises(ValueError, match="'striped' must be one of .*'zigzag'"):
        _trace(lambda x: scatter(x, token_order="striped"), (2, 16, 8, 3))


@pytest.mark.user_case(39)
def test_too_few_heads_after_the_tensor_parallel_split():
    """Four query heads over tp=2 leave two, which cp=4 cannot share."""
    with pytest.raises(ValueError, match=r"N=2, .* P=4 .*tensor-parallel.*2 % 4 = 2"):
        _trace(
            lambda x, w: qkv(x, w, n=2, k=2),
            (2, 16, 6),
            (6, 4 * 3 * 3),
            w=world("tp2cp4-auto"),
            in_specs=(P(None, "cp"), P(None, "tp")),
        )


def test_head_exchange_checks_itself():
    with pytest.raises(ValueError, match=r"heads=6 cannot be divided over P=4"):
        HeadExchange((8, 6), 4, 4, ("cp",))
    with pytest.raises(ValueError, match=r"heads=0: must be at least 1"):
        HeadExchange((0,), 4, 4, ("cp",))
