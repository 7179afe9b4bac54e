# SPDX-License-Identifier: Apache-2.0
"""The operators under JAX's transformations: jit, vmap, grad, scan, cond, donation."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jax_ulysses as ju
from tests.helpers import hlo, oracle
from tests.helpers.projection_cases import Case
from tests.helpers.worlds import abstract, world

OPERATORS = {
    "scatter_heads": None,
    "gather_heads": None,
    "qkv_proj_a2a": Case(batch=2, kv_heads=2),
    "a2a_out_proj": Case("a2a_out_proj", batch=2),
    "a2a_proj/features": Case("a2a_proj/features", batch=2),
}
every_operator = pytest.mark.parametrize("operator", OPERATORS)


def _setup(operator, w, impl):
    """Function, global operands, in_specs, out_specs."""
    case = OPERATORS[operator]
    name = impl.on(w)
    if case is not None:
        operands = case.operands(w.num_ranks)
        return (case.call(w.axis, name), operands, *case.specs(w))
    x = np.random.default_rng(0).normal(size=(2, 16, 8, 3)).astype(np.float32)
    fn = functools.partial(getattr(ju, operator), axis_name=w.axis, implementation=name)
    specs = (w.tokens, w.heads) if operator == "scatter_heads" else (w.heads, w.tokens)
    return fn, [x], specs[:1], specs[1]


def _assert_same(actual, expected, tolerance=2e-6):
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert oracle.rel_l2(a, e) <= tolerance


@pytest.mark.user_case(37)
@pytest.mark.parametrize("mesh", ["cp4", "dp2cp2tp2-explicit", "dp2cp2tp2-auto"])
@every_operator
def test_jit_in_any_place_and_eval_shape(operator, mesh, implementation):
    w = world(mesh)
    # Tensor-parallel ranks hold the same here: specs without their axis.
    w = type(w)(w.name, w.mesh, w.axis, w.batch)
    fn, operands, in_specs, out_specs = _setup(operator, w, implementation)
    placed = w.place(operands, in_specs)
    inside = w.shard_map(jax.jit(fn), in_specs, out_specs)
    outside = jax.jit(w.shard_map(fn, in_specs, out_specs))
    expected = outside(*placed)
    _assert_same(jax.jit(inside)(*placed), expected, 0)
    _assert_same(inside(*placed), expected)
    shapes = jax.eval_shape(outside, *placed)
    for shape, real in zip(jax.tree.leaves(shapes), jax.tree.leaves(expected)):
        assert (shape.shape, shape.dtype) == (real.shape, real.dtype)


@pytest.mark.user_case(37)
def test_no_jit(implementation):
    w = world("cp2")
    for operator in OPERATORS:
        fn, operands, in_specs, out_specs = _setup(operator, w, implementation)
        placed = w.place(operands, in_specs)
        mapped = w.shard_map(fn, in_specs, out_specs)
        _assert_same(mapped(*placed), jax.jit(mapped)(*placed))


@pytest.mark.user_case(54)
@pytest.mark.parametrize("size", [2**31 - 128 * 8, 2**31, 2**32])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_eval_shape_beyond_32_bit(size, dtype):
    """More elements on a rank than a 32-bit index counts."""
    mesh = jax.sharding.AbstractMesh((8,), ("cp",))
    tokens = size // (8 * 128)
    x = abstract(mesh, (1, 8 * tokens, 8, 128), dtype, P(None, "cp"))

    def there_and_back(x):
        y = ju.scatter_heads(x, "cp", implementation="xla")
        return y, ju.gather_heads(y, "cp", implementation="xla")

    mapped = jax.shard_map(
        there_and_back,
        mesh=mesh,
        in_specs=P(None, "cp"),
        out_specs=(P(None, None, "cp"), P(None, "cp")),
    )
    y, z = jax.eval_shape(mapped, x)
    assert y.shape == z.shape == x.shape

    d_model = 1024

    def project(x, w):
        q, k, v = ju.qkv_proj_a2a(
            x, w, axis_name="cp", num_heads=8, num_kv_heads=8, implementation="xla"
        )
        return ju.a2a_out_proj(q + k + v, w[:, :d_model].T, axis_name="cp")

    mapped = jax.shard_map(
        project, mesh=mesh, in_specs=(P(None, "cp"), P()), out_specs=P(None, "cp")
    )
    x = abstract(mesh, (1, 8 * tokens, d_model), dtype, P(None, "cp"))
    w = abstract(mesh, (d_model, 24 * 128), dtype)
    shapes = jax.eval_shape(
        jax.grad(lambda *a: mapped(*a).sum().astype(float), (0, 1)), x, w
    )
    assert [s.shape for s in shapes] == [x.shape, w.shape]


@pytest.mark.user_case(44)
@pytest.mark.parametrize("in_axis", [0, 1, 2, 3])
@every_operator
def test_vmap(operator, in_axis, implementation):
    """Batched activations, whatever axis: right, or NotImplementedError."""
    w = world("cp4")
    fn, operands, in_specs, out_specs = _setup(operator, w, implementation)
    stack = [operands[0], 2 * operands[0], -operands[0]]
    rest = operands[1:]

    one = jax.jit(w.shard_map(fn, in_specs, out_specs))
    expected = [one(*w.place((x, *rest), in_specs)) for x in stack]
    expected = jax.tree.map(lambda *r: np.stack([np.asarray(a) for a in r]), *expected)
    axis = min(in_axis, operands[0].ndim)

    def with_axis(spec):
        entries = [*spec, None, None, None][: operands[0].ndim]
        return P(*entries[:axis], None, *entries[axis:])

    batched = jax.vmap(fn, in_axes=(axis,) + (None,) * len(rest))
    specs = (with_axis(in_specs[0]), *in_specs[1:])
    stacked_specs = jax.tree.map(lambda s: P(None, *s), out_specs)
    try:
        out = w.run(batched, (np.stack(stack, axis), *rest), specs, stacked_specs)
    except NotImplementedError:
        assert implementation.name != "xla"
        return
    _assert_same(out, expected)


@pytest.mark.user_case(44)
@every_operator
def test_grad_of_vmap_and_vmap_of_grad(operator, implementation):
    w = world("cp4")
    fn, operands, in_specs, _ = _setup(operator, w, implementation)
    weights = np.array([1.0, 2.0, -1.0], np.float32)

    def loss(x, scale, *rest):
        leaves = jax.tree.leaves(fn(x * scale, *rest))
        return sum(jnp.sum(jnp.sin(y)) for y in leaves)

    def looped(x, weights, *rest):
        return lax.map(lambda s: jax.grad(loss)(x, s, *rest), weights)

    def vmap_of_grad(x, weights, *rest):
        axes = (None, 0) + (None,) * len(rest)
        return jax.vmap(jax.grad(loss), axes)(x, weights, *rest)

    def grad_of_vmap(x, weights, *rest):
        axes = (0, 0) + (None,) * len(rest)
        total = lambda xs: jax.vmap(loss, axes)(xs, weights, *rest).sum()  # noqa: E731
        return jax.grad(total)(jnp.stack([x] * len(weights)))

    specs = (in_specs[0], P(), *in_specs[1:])
    values = (operands[0], weights, *operands[1:])
    stacked = P(None, *in_specs[0])
    expected = w.run(looped, values, specs, stacked)
    for fn_of in (vmap_of_grad, grad_of_vmap):
        try:
            _assert_same(w.run(fn_of, values, specs, stacked), expected, 3e-6)
        except NotImplementedError:
            assert implementation.name != "xla"


@pytest.mark.user_case(32)
def test_scan_over_layers_inside_shard_map(implementation):
    """The carry keeps its varying type; check_vma is on, as always."""
    w, layers = world("dp2cp4-explicit"), 3
    name = implementation.on(w)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 16, 12)).astype(np.float32)
    w_in = rng.normal(size=(layers, 12, 16 * 3)).astype(np.float32) / 4
    w_out = rng.normal(size=(layers, 24, 12)).astype(np.float32) / 4
    kwargs = {"axis_name": "cp", "implementation": name}

    def layer(x, weights):
        q, k, v = ju.qkv_proj_a2a(x, weights[0], num_heads=8, num_kv_heads=4, **kwargs)
        mixed = jnp.tanh(q) + jnp.repeat(k * v, 2, axis=2)
        return x + ju.a2a_out_proj(mixed, weights[1], **kwargs)

    def scanned(x, *weights):
        return lax.scan(lambda c, p: (layer(c, p), None), x, weights)[0]

    def unrolled(x, *weights):
        for i in range(layers):
            x = layer(x, [p[i] for p in weights])
        return x

    specs = (w.tokens, P(), P())
    ct = rng.normal(size=x.shape).astype(np.float32)
    results = [
        w.vjp(fn, specs, w.tokens)(
            w.place((x, w_in, w_out), specs), w.put(ct, w.tokens)
        )
        for fn in (scanned, unrolled)
    ]
    _assert_same(*results, tolerance=1e-5)


@pytest.mark.user_case(35)
def test_strided_inputs_and_broadcast_cotangents(implementation):
    w = world("cp4")
    name = implementation.on(w)
    case = Case(kv_heads=2, bias=False)
    x, weight = case.operands(4)
    fn = case.call(w.axis, name)

    def local(x_t, w_t, wide):
        """A transpose, a slice, and sum(), whose cotangent is a broadcast."""
        args = (x_t.transpose(2, 1, 0), w_t.T)
        first = sum(jnp.sum(y) for y in fn(*args))
        sliced = wide[:, ::2, 1:-1] + 0 * first  # One call after the other.
        return lax.psum(first + sum(jnp.sum(y) for y in fn(sliced, args[1])), "cp")

    x_t, w_t = x.transpose(2, 1, 0), weight.T
    wide = np.zeros((2, 32, 14), np.float32)
    wide[:, ::2, 1:-1] = x
    specs = (P(None, "cp"), P(), P(None, "cp"))
    _, (dx_t, dw_t, dwide) = w.vjp(local, specs, P())(
        w.place((x_t, w_t, wide), specs), w.put(np.float32(1))
    )
    ones = tuple(np.ones_like(e) for e in case.expected((x, weight), 4))
    dx, dw, _ = oracle.qkv_proj_gradients(x, weight, case.segments, 4, ones)
    assert oracle.rel_l2(dx_t, dx.transpose(2, 1, 0)) < 2e-6
    assert oracle.rel_l2(dw_t, 2 * dw.T) < 2e-6
    assert oracle.rel_l2(np.asarray(dwide)[:, ::2, 1:-1], dx) < 2e-6
    assert not np.asarray(dwide)[:, 1::2].any()

    def exchange(x):
        y = ju.scatter_heads(x.transpose(0, 1, 3, 2), "cp", implementation=name)
        return ju.gather_heads(y[..., ::-1], "cp", implementation=name)

    x = np.arange(2 * 16 * 3 * 8, dtype=np.float32).reshape(2, 16, 3, 8)
    y = w.run(exchange, (x,), (w.tokens,), w.tokens)
    np.testing.assert_array_equal(y, x.transpose(0, 1, 3, 2)[..., ::-1])


@pytest.mark.user_case(49)
@every_operator
def test_donated_operands(operator, implementation):
    w = world("cp4")
    fn, operands, in_specs, out_specs = _setup(operator, w, implementation)
    mapped = w.shard_map(fn, in_specs, out_specs)
    expected = jax.tree.map(np.asarray, jax.jit(mapped)(*w.place(operands, in_specs)))
    donating = jax.jit(mapped, donate_argnums=0)
    with warnings.catch_warnings():
        # XLA says so where no output has the operand's shape.
        warnings.filterwarnings("ignore", "Some donated buffers were not usable")
        for _ in range(2):
            placed = w.place([o.copy() for o in operands], in_specs)
            _assert_same(donating(*placed), expected, 0)


@pytest.mark.user_case(41)
def test_output_that_nobody_uses(implementation):
    """Dropped on every rank alike, so what remains still runs and is right."""
    w = world("cp4")
    case = Case(kv_heads=4)
    fn = case.call(w.axis, implementation.on(w))

    def local(x, weight, bias):
        unused = fn(x * 2, weight, bias)
        del unused
        return fn(x, weight, bias)[1]

    operands = case.operands(4)
    in_specs, _ = case.specs(w)
    key = w.run(local, operands, in_specs, w.heads)
    assert oracle.rel_l2(key, case.expected(operands, 4)[1]) < 2e-6
    text = hlo.of(
        jax.jit(w.shard_map(local, in_specs, w.heads)), *w.place(operands, in_specs)
    )
    assert text.exchanges == 1


@pytest.mark.user_case(41)
def test_cond_with_the_same_predicate_on_every_rank(implementation):
    w = world("cp4")
    case = Case(kv_heads=4, bias=False)
    fn = case.call(w.axis, implementation.on(w))

    def local(flag, x, weight):
        zeros = lambda x, w: jax.tree.map(jnp.zeros_like, fn(x, w))  # noqa: E731
        return lax.cond(flag, fn, zeros, x, weight)

    operands = case.operands(4)
    specs, out_specs = case.specs(w)
    both = w.vjp(lambda *a: local(a[0] > 0, *a[1:]), (P(), *specs), out_specs)
    expected = case.expected(operands, 4)
    cts = case.cotangents(expected)
    gradients = case.expected_gradients(operands, cts, 4)
    for flag in (1.0, -1.0):
        placed = w.place((np.float32(flag), *operands), (P(), *specs))
        out, (_, dx, dw) = both(placed, w.place(cts, out_specs))
        keep = flag > 0
        case.assert_close(out, tuple(e * keep for e in expected), 2e-6, "result")
        case.assert_close(
            (dx, dw), tuple(g * keep for g in gradients), 3e-6, "gradient"
        )


@pytest.mark.user_case(41)
def test_gradient_of_one_output_only(implementation):
    """Symbolic zeros for q and v: still one exchange back, on every rank."""
    w = world("cp4")
    case = Case(kv_heads=2)
    fn = case.call(w.axis, implementation.on(w))
    in_specs, _ = case.specs(w)
    operands = case.operands(4)
    shapes = case.expected(operands, 4)
    ct = case.cotangents(shapes)[1]
    both = w.vjp(lambda *a: fn(*a)[1], in_specs, w.heads)
    args = w.place(operands, in_specs), w.put(ct, w.heads)
    out, gradients = both(*args)
    zeros = [np.zeros_like(s) for s in shapes]
    expected = case.expected_gradients(operands, (zeros[0], ct, zeros[2]), 4)
    case.assert_close(out, shapes[1], 2e-6, "result")
    case.assert_close(gradients, expected, 3e-6, "gradient")
    assert hlo.of(both, *args).exchanges == 2
