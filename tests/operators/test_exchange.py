# SPDX-License-Identifier: Apache-2.0
"""Both exchanges bit for bit, on payloads that say where each element came from."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_ulysses as ju
from jax_ulysses import TokenOrder
from tests.helpers import mapping_oracle, tags
from tests.helpers.worlds import world

ORDERS = {False: TokenOrder.CONTIGUOUS, True: TokenOrder.ZIGZAG}


def _exchange(w, shapes, dtype, zigzag, impl):
    """Runs scatter, gather after scatter, and gather alone on tagged arrays."""
    kwargs = {"token_order": ORDERS[zigzag], "implementation": impl.on(w)}

    def there_and_back(xs):
        scattered = [ju.scatter_heads(x, w.axis, **kwargs) for x in xs]
        return scattered, [ju.gather_heads(s, w.axis, **kwargs) for s in scattered]

    def gather(ys):
        return [ju.gather_heads(y, w.axis, **kwargs) for y in ys]

    # One program for all shapes saves compilations; independent calls in one program
    # have a test of their own for implementations where their order matters.
    for group in [[s] for s in shapes] if impl.needs_peers else [shapes]:
        tagged = [tags.planes(s, dtype) for s in group]
        scatter_all = jax.jit(
            w.shard_map(there_and_back, (w.tokens,), (w.heads, w.tokens))
        )
        gather_all = jax.jit(w.shard_map(gather, (w.heads,), w.tokens))
        for i in range(max(map(len, tagged))):
            xs = [p[i % len(p)] for p in tagged]
            scattered, back = scatter_all(w.put(xs, w.tokens))
            for x, result, again in zip(xs, scattered, back, strict=True):
                tags.equal_bits(result, mapping_oracle.scatter(x, w.num_ranks, zigzag))
                copies = mapping_oracle.all_heads(x.shape[2], w.num_ranks)
                tags.equal_bits(again, x[:, :, copies])
            ys = [x for x in xs if x.shape[2] % w.num_ranks == 0]
            for y, result in zip(ys, gather_all(w.put(ys, w.heads)), strict=True):
                expected = mapping_oracle.shards_order(y, w.num_ranks, zigzag)
                tags.equal_bits(result, expected)
    impl.assert_took("scatter_heads", "gather_heads")


@pytest.mark.user_case(1, 6, 17)
@pytest.mark.parametrize("zigzag", [False, True], ids=["contiguous", "zigzag"])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_bit_exact(ranks, zigzag, implementation):
    # (H/P) % P != 0 throughout (but for P=1), and batches that must not mix.
    heads = (ranks, 3 * ranks) if ranks == 8 else (ranks, 2 * ranks, 3 * ranks)
    shapes = [
        (batch, ranks * tokens, m, 5)
        for batch, (m, tokens) in itertools.product((1, 2, 3), zip(heads, (2, 4, 6)))
    ]
    _exchange(world(f"cp{ranks}"), shapes, jnp.bfloat16, zigzag, implementation)


@pytest.mark.user_case(17)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_odd_shards_in_contiguous_order(ranks, implementation):
    shapes = [(2, ranks * tokens, ranks, 3) for tokens in (1, 3, 7)]
    _exchange(world(f"cp{ranks}"), shapes, jnp.float32, False, implementation)


@pytest.mark.user_case(4)
@pytest.mark.parametrize("zigzag", [False, True], ids=["contiguous", "zigzag"])
def test_replicated_heads_reach_their_owners(zigzag, implementation):
    shapes = [(2, 16, m, 4) for m in (1, 2, 4)]
    _exchange(world("cp8"), shapes, jnp.bfloat16, zigzag, implementation)


@pytest.mark.user_case(48)
@pytest.mark.parametrize("ranks", [2, 4])
def test_independent_calls_in_one_program(ranks, implementation):
    """No data connects these calls, yet every rank must run them in one order.

    XLA:CPU starts them in another order on each device.
    """
    w = world(f"cp{ranks}")
    name = implementation.on(w)

    def local(xs):
        there = [ju.scatter_heads(x, w.axis, implementation=name) for x in xs]
        back = [ju.gather_heads(y, w.axis, implementation=name) for y in there]
        return (
            there,
            back,
            [ju.gather_heads(2 * y, w.axis, implementation=name) for y in there],
        )

    # XLA:CPU runs what is independent concurrently only where buffers exceed 512 bytes.
    shapes = [
        (1 + i % 2, 4 * ranks * (i % 5 + 1), ranks * (1 + i % 3), 16) for i in range(10)
    ]
    xs = [tags.planes(s, jnp.float32)[0] for s in shapes]
    mapped = jax.jit(w.shard_map(local, (w.tokens,), (w.heads, w.tokens, w.tokens)))
    for _ in range(5):
        outs = mapped(w.put(xs, w.tokens))
        for x, *results in zip(xs, *outs, strict=True):
            for y, factor in zip(results, (1, 1, 2), strict=True):
                tags.equal_bits(y, factor * x)


@pytest.mark.user_case(40)
@pytest.mark.parametrize(
    "name",
    [
        "cp4-reversed",
        "cp4dp2-transposed",
        "cp2dp4",
        "dp2cp4-explicit",
        "dp2cp4-auto",
        "dp2cp2tp2-explicit",
        "dp2cp2tp2-auto",
        "tp2cp4-auto",
        "tuple",
        "tuple-swapped",
        "tuple2x2dp2",
    ],
)
def test_rank_is_the_position_on_the_mesh_axis(name, implementation):
    w = world(name)
    rows = 2 * w.size(w.batch)
    if w.tensor is None:
        shapes = [(rows, 4 * w.num_ranks, 2 * w.num_ranks, 3), (rows, 16, 1, 3)]
        _exchange(w, shapes, jnp.bfloat16, True, implementation)
        return
    # Heads are split over tensor parallel ranks first, each part over cp.
    kwargs = dict(token_order=TokenOrder.ZIGZAG, implementation=implementation.on(w))
    x = tags.planes((rows, 16, 2 * w.num_ranks * w.size(w.tensor), 3), jnp.float32)[0]
    tokens = P(w.batch, w.axes, w.tensor)

    def local(x):
        scattered = ju.scatter_heads(x, w.axis, **kwargs)
        return scattered, ju.gather_heads(scattered, w.axis, **kwargs)

    scattered, back = w.run(local, (x,), (tokens,), (w.heads, tokens))
    tags.equal_bits(scattered, mapping_oracle.true_order(x, w.num_ranks, True))
    tags.equal_bits(back, x)


@pytest.mark.user_case(30)
@pytest.mark.parametrize(
    "dtype",
    ["bool", "int8", "uint8", "float8_e4m3fn", "float8_e5m2", "float16", "int32"],
)
def test_any_payload(dtype, implementation):
    _exchange(world("cp4"), [(2, 8, 8, 5)], dtype, True, implementation)


@pytest.mark.parametrize("dtype", ["int4", "uint2", "float4_e2m1fn"])
@pytest.mark.parametrize("operator", [ju.scatter_heads, ju.gather_heads])
def test_packed_payloads_are_refused(operator, dtype):
    w = world("cp4")
    mapped = w.shard_map(lambda x: operator(x, w.axis), (w.tokens,), w.tokens)
    with pytest.raises(ValueError, match=f"x has dtype {dtype} of [24] bits"):
        jax.eval_shape(mapped, w.abstract((1, 8, 8, 4), dtype, w.tokens))


def test_special_values_survive(implementation):
    w = world("cp4")
    bits = np.arange(65536, dtype=np.uint16).reshape(2, 64, 8, 64)
    x = bits.view(jnp.bfloat16.dtype)  # Every bf16: NaN, infinities and -0 too.
    name = implementation.on(w)
    y = w.run(
        lambda x: ju.scatter_heads(x, w.axis, implementation=name),
        (x,),
        (w.tokens,),
        w.heads,
    )
    tags.equal_bits(y, x)


@pytest.mark.user_case(4)
def test_gradient_of_exchanges_is_their_transpose(implementation):
    w = world("cp8")
    for zigzag in (False, True):
        kwargs = dict(token_order=ORDERS[zigzag], implementation=implementation.on(w))

        def local(xs, y, kwargs=kwargs):
            return [ju.scatter_heads(x, w.axis, **kwargs) for x in xs], ju.gather_heads(
                y, w.axis, **kwargs
            )

        xs = [tags.planes((2, 16, m, 3), jnp.float32)[0] for m in (1, 2, 8)]
        y = tags.planes((2, 16, 8, 3), jnp.float32)[0]
        cts = [
            tags.planes((2, 16, 8, 3), jnp.float32)[0] * scale for scale in (1, 2, 4)
        ]
        both = w.vjp(local, (w.tokens, w.heads), (w.heads, w.tokens))
        _, (dxs, dy) = both(
            (w.put(xs, w.tokens), w.put(y, w.heads)),
            (w.put(cts, w.heads), w.put(y, w.tokens)),
        )
        for x, ct, dx in zip(xs, cts, dxs):
            # Small integers: the fp32 sum over copies is exact, in any order.
            expected = mapping_oracle.gather(ct, x.shape[2], 8, zigzag)
            tags.equal_bits(dx, expected)
        tags.equal_bits(dy, mapping_oracle.true_order(y, 8, zigzag))
        implementation.assert_took("scatter_heads.backward", "gather_heads.backward")


def test_zigzag_permutation_of_global_arrays():
    for ranks, axis in itertools.product((1, 2, 4), (0, 1, 2)):
        x = np.arange(2 * 16 * 3).reshape(2, 16, 3)
        moved = np.moveaxis(x, 1, axis)
        expected = mapping_oracle.shards_order(x, ranks, True)
        there = ju.to_zigzag(jnp.asarray(moved), ranks, axis)
        np.testing.assert_array_equal(there, np.moveaxis(expected, 1, axis))
        np.testing.assert_array_equal(ju.from_zigzag(there, ranks, axis), moved)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("kind", ["explicit", "auto"])
def test_zigzag_permutation_of_sharded_arrays(kind, wrap):
    """On Explicit axes the result is sharded as the operand is."""
    w = world(f"dp2cp2tp2-{kind}")
    x = np.arange(2 * 16 * 3).reshape(2, 16, 3)
    with jax.set_mesh(w.mesh):
        there = wrap(lambda x: ju.to_zigzag(x, 2))(w.put(x, w.tokens))
        back = wrap(lambda x: ju.from_zigzag(x, 2))(there)
    np.testing.assert_array_equal(there, mapping_oracle.shards_order(x, 2, True))
    np.testing.assert_array_equal(back, x)
    for moved in (there, back) if kind == "explicit" else ():
        assert moved.sharding.spec[:2] == ("dp", "cp")


@pytest.mark.parametrize("permute", [ju.to_zigzag, ju.from_zigzag])
def test_zigzag_permutation_refuses_a_remainder(permute):
    with pytest.raises(ValueError, match=r"S=12 .* 2P=8 .*12 % 8 = 4"):
        permute(jnp.zeros((1, 12, 3)), 4)
