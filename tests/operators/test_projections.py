# SPDX-License-Identifier: Apache-2.0
"""Fused projections and the gradients of all their operands, against the oracle."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jax_ulysses as ju
from tests.helpers import mapping_oracle, oracle
from tests.helpers.projection_cases import Case
from tests.helpers.worlds import world

OPERATORS = (
    "qkv_proj_a2a",
    "q_proj_a2a",
    "a2a_out_proj",
    "a2a_proj",
    "a2a_proj/features",
)


@pytest.mark.user_case(24, 25)
@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_ranks(ranks, operator, implementation):
    w = world(f"cp{ranks}")
    zigzag = ranks in (1, 4)
    Case(operator, zigzag=zigzag).check(w, implementation.on(w))
    name = operator.partition("/")[0]
    implementation.assert_took(name, f"{name}.backward")


@pytest.mark.user_case(4)
@pytest.mark.parametrize("zigzag", [False, True], ids=["contiguous", "zigzag"])
@pytest.mark.parametrize(
    ("ranks", "heads", "kv_heads"),
    [(2, 4, 2), (4, 8, 2), (4, 32, 2), (8, 8, 1), (8, 32, 2), (8, 16, 4), (4, 4, 1)],
)
def test_grouped_heads(ranks, heads, kv_heads, zigzag, implementation):
    w = world(f"cp{ranks}")
    case = Case(heads=heads, kv_heads=kv_heads, head_dim=4, zigzag=zigzag)
    case.check(w, implementation.on(w))


@pytest.mark.user_case(30)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("head_dim", [40, 64, 72, 80, 96, 128, 192, 256])
def test_head_dims(head_dim, dtype, implementation):
    w = world("cp2")
    for operator in ("qkv_proj_a2a", "a2a_out_proj"):
        case = Case(operator, 3, 5, 24, 4, 1, head_dim, dtype)
        case.check(w, implementation.on(w))


@pytest.mark.user_case(8, 53)
@pytest.mark.parametrize("tokens", [1, 3, 17])
@pytest.mark.parametrize("d_model", [1, 7, 33])
def test_tails(tokens, d_model, implementation):
    w = world("cp4")
    case = Case(tokens=tokens, d_model=d_model, heads=12, kv_heads=4, head_dim=5)
    case.check(w, implementation.on(w))
    case = Case("a2a_out_proj", 1, tokens, d_model, 4, 4, 9, bias=False)
    case.check(w, implementation.on(w))


@pytest.mark.user_case(40)
@pytest.mark.parametrize(
    "name",
    [
        "cp4-reversed",
        "cp4dp2-transposed",
        "dp2cp4-explicit",
        "dp2cp4-auto",
        "tuple-swapped",
        "tuple2x2dp2",
    ],
)
@pytest.mark.parametrize("operator", ["qkv_proj_a2a", "a2a_out_proj"])
def test_meshes(name, operator, implementation):
    w = world(name)
    case = Case(operator, batch=4, kv_heads=2, zigzag=True)
    case.check(w, implementation.on(w))


@pytest.mark.parametrize("operator", ["qkv_proj_a2a", "a2a_out_proj"])
def test_float64(operator, implementation):
    if implementation.name in ("cuda", "pallas"):
        pytest.skip("tensor-core implementations refuse float64")
    w = world("cp4")
    with jax.enable_x64(True):
        Case(operator, kv_heads=2, dtype="float64").check(w, implementation.on(w))


@pytest.mark.user_case(26)
@pytest.mark.parametrize("operator", ["qkv_proj_a2a", "a2a_out_proj"])
def test_finite_differences(operator, implementation):
    """Central differences of the operator itself, in float64, operand by operand."""
    if implementation.name in ("cuda", "pallas"):
        pytest.skip("tensor-core implementations refuse float64")
    w, case = world("dp2cp4-explicit"), Case(operator, kv_heads=2, dtype="float64")
    with jax.enable_x64(True):
        in_specs, out_specs = case.specs(w)
        mapped = w.shard_map(
            case.call(w.axis, implementation.on(w)), in_specs, out_specs
        )

        def loss(*operands):
            return sum(jnp.sum(jnp.sin(o)) for o in jax.tree.leaves(mapped(*operands)))

        operands = w.place(case.operands(4), in_specs)
        value_and_grad = jax.jit(jax.value_and_grad(loss, argnums=range(len(operands))))
        _, gradients = value_and_grad(*operands)
        rng = np.random.default_rng(0)
        for i, gradient in enumerate(gradients):
            direction = rng.normal(size=operands[i].shape)
            values = []
            for step in (1e-5, -1e-5):
                moved = w.put(np.asarray(operands[i]) + step * direction, in_specs[i])
                values.append(
                    value_and_grad(*operands[:i], moved, *operands[i + 1 :])[0]
                )
            np.testing.assert_allclose(
                np.sum(np.asarray(gradient) * direction),
                float(values[0] - values[1]) / 2e-5,
                rtol=1e-6,
            )


@pytest.mark.user_case(26)
def test_residuals_survive_a_second_forward(implementation):
    """Backward of a call after a forward with other values: no shared buffer."""
    w = world("cp4")
    case = Case(kv_heads=2)
    first, second = case.operands(4, seed=3), case.operands(4, seed=4)
    in_specs, out_specs = case.specs(w)
    mapped = jax.jit(
        w.shard_map(case.call(w.axis, implementation.on(w)), in_specs, out_specs)
    )
    out, back = jax.vjp(mapped, *w.place(first, in_specs))
    mapped(*w.place(second, in_specs))
    cotangents = case.cotangents(case.expected(first, 4))
    gradients = back(tuple(w.place(cotangents, out_specs)))
    case.assert_close(out, case.expected(first, 4), 2e-6, "result")
    expected = case.expected_gradients(first, cotangents, 4)
    case.assert_close(gradients, expected, 3e-6, "gradient")


def _tensor_parallel_columns(weight, segments, shards, head_dim):
    """[..., C] of global segments to [shard 0's Q K V, shard 1's Q K V, ...]."""
    starts = np.cumsum((0, *segments))
    columns = [
        np.arange(start * head_dim, (start + m) * head_dim).reshape(shards, -1)[t]
        for t in range(shards)
        for start, m in zip(starts, segments)
    ]
    return np.concatenate(columns)


@pytest.mark.user_case(25, 39)
@pytest.mark.parametrize("kind", ["explicit", "auto"])
def test_weights_split_over_tensor_parallel_ranks(kind, implementation):
    """dp x cp x tp: w_qkv P(None, tp), w_out P(tp); each gradient is summed once."""
    w, n, k, h, d = world(f"dp2cp2tp2-{kind}"), 8, 4, 4, 10
    name = implementation.on(w)
    case = Case(batch=4, d_model=d, heads=n, kv_heads=k, head_dim=h)
    x, w_qkv, b_qkv = case.operands(2)
    columns = _tensor_parallel_columns(w_qkv, case.segments, 2, h)
    w_out = np.random.default_rng(5).normal(size=(n * h, d)).astype(np.float32)

    def local(x, w_qkv, b_qkv, w_out):
        q, k_, v = ju.qkv_proj_a2a(
            x,
            w_qkv,
            b_qkv,
            axis_name="cp",
            num_heads=n // 2,
            num_kv_heads=k // 2,
            implementation=name,
        )
        y = ju.a2a_out_proj(q, w_out, axis_name="cp", implementation=name)
        return k_, v, lax.psum(y, "tp")

    in_specs = (w.tokens, P(None, "tp"), P("tp"), P("tp"))
    out_specs = (w.heads, w.heads, w.tokens)
    both = w.vjp(local, in_specs, out_specs)
    rng = np.random.default_rng(6)
    shapes = ((4, 8, k, h), (4, 8, k, h), (4, 8, d))
    cts = tuple(rng.normal(size=s).astype(np.float32) for s in shapes)
    values = (x, w_qkv[:, columns], b_qkv[columns], w_out)
    out, gradients = both(w.place(values, in_specs), w.place(cts, out_specs))

    q, key, value = oracle.qkv_proj(x, w_qkv, b_qkv, case.segments, 2)
    expected = (key, value, oracle.out_proj(q, w_out, None, 2))
    case.assert_close(out, expected, 3e-6, "result")
    dq, dw_out, _ = oracle.out_proj_gradients(q, w_out, 2, cts[2])
    dx, dw, db = oracle.qkv_proj_gradients(x, w_qkv, case.segments, 2, (dq, *cts[:2]))
    expected = (dx, dw[:, columns], db[columns], dw_out)
    case.assert_close(gradients, expected, 5e-6, "gradient")


@pytest.mark.user_case(39)
def test_weights_sharded_over_data_and_context_ranks(implementation):
    """FSDP over dp x cp together: gathered in the body, gradients scattered back."""
    w, case = world("dp2cp4-explicit"), Case(d_model=16, kv_heads=2, bias=False)
    call = case.call(w.axis, implementation.on(w))

    def local(x, weight):
        return call(x, lax.all_gather(weight, ("dp", "cp"), tiled=True))

    x, weight = case.operands(4)
    specs = (w.tokens, P(("dp", "cp")))
    both = w.vjp(local, specs, (w.heads,) * 3)
    cts = case.cotangents(case.expected((x, weight), 4))
    out, gradients = both(w.place((x, weight), specs), w.place(cts, (w.heads,) * 3))
    case.assert_close(out, case.expected((x, weight), 4), 2e-6, "result")
    expected = case.expected_gradients((x, weight), cts, 4)
    case.assert_close(gradients, expected, 3e-6, "gradient")


@pytest.mark.user_case(25)
def test_bias_and_weight_that_differ_between_data_parallel_ranks(implementation):
    """A weight sharded on dp keeps one gradient a shard: nothing is summed over dp."""
    w, case = world("dp2cp4-explicit"), Case("a2a_out_proj", batch=2)
    call = case.call(w.axis, implementation.on(w))
    a, weight, bias = case.operands(4)
    weights, biases = np.stack([weight, 2 * weight]), np.stack([bias, -bias])

    def local(a, weights, biases):
        return call(a, weights[0], biases[0])

    specs = (w.heads, P("dp"), P("dp"))
    both = w.vjp(local, specs, w.tokens)
    ct = case.cotangents(case.expected((a, weight, bias), 4))
    out, gradients = both(w.place((a, weights, biases), specs), w.put(ct, w.tokens))
    out, (da, dw, db) = jax.tree.map(np.asarray, (out, gradients))
    for row in range(2):
        one = slice(row, row + 1)
        operands = a[one], weights[row], biases[row]
        expected = case.expected(operands, 4)
        case.assert_close(out[one], expected, 2e-6, "result")
        expected = case.expected_gradients(operands, ct[one], 4)
        case.assert_close((da[one], dw[row], db[row]), expected, 3e-6, "gradient")


@pytest.mark.user_case(4)
def test_tag_of_each_kv_head_reaches_its_query_heads(implementation):
    """The weight gives each head a constant; rank r must see KV head floor(r*K/P)."""
    w, n, k, h = world("cp8"), 16, 2, 3
    weight = np.repeat(np.arange(n + 2 * k, dtype=np.float32), h)[None]
    case = Case(d_model=1, heads=n, kv_heads=k, head_dim=h, bias=False)
    call = case.call(w.axis, implementation.on(w))
    x = np.ones((1, 16, 1), np.float32)
    q, key, value = w.run(call, (x, weight), (w.tokens, P()), (w.heads,) * 3)
    np.testing.assert_array_equal(q[0, 0, :, 0], np.arange(16))
    owners = mapping_oracle.all_heads(k, 8)
    assert owners == [0, 0, 0, 0, 1, 1, 1, 1]
    np.testing.assert_array_equal(key[0, 0, :, 0], n + np.array(owners))
    np.testing.assert_array_equal(value[0, 0, :, 0], n + k + np.array(owners))
