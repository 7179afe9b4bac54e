# SPDX-License-Identifier: Apache-2.0
"""Sums of vectors over the ranks by the CPU handler, bit by bit against numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P

from jax_ulysses.ffi import targets

RANKS = P(("dp", "cp"))
DTYPES = ["float32", "bfloat16", "float16", "float64"]


def _vectors(world, counts, dtype, seed=0):
    """For each count an array [lines, ranks, count], different everywhere."""
    rng = np.random.default_rng(seed)
    shape = (world.num_lines, world.num_ranks)
    return [
        np.asarray(jnp.asarray(rng.standard_normal((*shape, n)), dtype)) for n in counts
    ]


def _sum(world, vectors, **kwargs):
    """The sums as every rank has them: arrays [lines, ranks, count]."""
    flat = [v.reshape(-1, v.shape[-1]) for v in vectors]

    def local(*parts):
        sums = targets.psum(
            [p[0] for p in parts], group=world.session, axis_name="cp", **kwargs
        )
        # Typed as equal within a line; shown as every rank has them.
        return tuple(jax.lax.pcast(s, "cp", to="varying")[None] for s in sums)

    results = world.run(local, [RANKS] * len(flat), (RANKS,) * len(flat), *flat)
    return [np.asarray(r).reshape(v.shape) for r, v in zip(results, vectors)]


def _expected(vector):
    """Added in rank order in the accumulator's type, rounded once."""
    wide = np.float64 if vector.dtype == np.float64 else np.float32
    total = np.zeros((vector.shape[0], 1, vector.shape[2]), wide)
    for r in range(vector.shape[1]):
        total = total + vector[:, r : r + 1].astype(wide)
    return np.broadcast_to(total.astype(vector.dtype), vector.shape)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_every_rank_has_the_sum_in_rank_order(make_world, num_ranks, dtype):
    with jax.enable_x64(dtype == "float64"):
        world = make_world(num_ranks)
        # Around a piece of 16 KiB, and less than the 16 bytes of an alignment.
        vectors = _vectors(world, [1, 3, 1003, 4096, 4097, 20001], dtype)
        for vector, result in zip(vectors, _sum(world, vectors)):
            assert result.dtype == vector.dtype
            np.testing.assert_array_equal(result, _expected(vector))


@pytest.mark.parametrize("slot_bytes", [4096, 5000, 65536])
def test_vectors_larger_than_a_slot_go_in_parts(make_world, slot_bytes):
    world = make_world(4, slot_bytes=slot_bytes)
    vectors = _vectors(world, [7, 30_001, 255], "float32")
    for vector, result in zip(vectors, _sum(world, vectors)):
        np.testing.assert_array_equal(result, _expected(vector))


def test_more_pieces_than_flags(make_world):
    """4096 flags of a source, pieces of 16 KiB: from 64 MiB on pieces grow."""
    world = make_world(8, slot_bytes=9 * (66 << 20))
    count = (66 << 20) // 4 + 5
    base = np.arange(count, dtype=np.float32) % 1021

    def local(rank):
        (total,) = targets.psum(
            [base * (1 + rank[0])], group=world.session, axis_name="cp"
        )
        return jnp.max(jnp.abs(total - 36 * base))[None]

    rank = np.arange(8, dtype=np.float32)
    (worst,) = {float(w) for w in world.run(local, [P("cp")], P(), rank)}
    assert worst == 0


def test_sums_between_other_calls(make_world):
    """Vectors, exchanges and again vectors share slots and flags."""
    world = make_world(4)
    x = np.random.default_rng(0).standard_normal((2, 24, 4, 8)).astype(np.float32)

    def local(x):
        for _ in range(3):
            (y,) = targets.exchange(
                [x], group=world.session, axis_name="cp", heads=(4,), num_ranks=4,
                direction=targets.SCATTER,
            )  # fmt: skip
            (total,) = targets.psum([y], group=world.session, axis_name="cp")
            (x,) = targets.exchange(
                [y + 0 * total], group=world.session, axis_name="cp", heads=(4,),
                num_ranks=4, direction=targets.GATHER,
            )  # fmt: skip
            x = 2 * x
        return x, total[:, None]

    result, total = world.run(local, [P("dp", "cp")], (P("dp", "cp"), P("dp")), x)
    np.testing.assert_array_equal(np.asarray(result), 8 * x)
    np.testing.assert_allclose(np.asarray(total)[:, 0, :, 0], 4 * x.sum(2), atol=1e-5)


def test_types_say_that_all_ranks_have_the_same(mesh2x4):
    types = []

    def local(x):
        (total,) = targets.psum([x], group=7, axis_name="cp")
        types.append(jax.typeof(total))
        return total

    x = jax.ShapeDtypeStruct(
        (2, 32), jnp.float32, sharding=jax.NamedSharding(mesh2x4, P("dp", "cp"))
    )
    mapped = jax.shard_map(
        local, mesh=mesh2x4, in_specs=P("dp", "cp"), out_specs=P("dp")
    )
    text = jax.jit(mapped).trace(x).lower(lowering_platforms=("cuda",)).as_text()
    assert types[0].mat.varying == {"dp"}
    assert "custom_call @jax_ulysses.psum.v1(" in text
    assert "counts = dense<8> : tensor<1xi64>" in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(counts=np.array([9], np.int64)), r"vector 0 has dims \[8\].*9 elements"),
        (dict(counts=np.array([8, 8], np.int64)), r"has 2 operands, expected 3"),
        (dict(dtype=np.int32), r"vector 0 has dtype S32, expected F32, BF16"),
        (dict(slot_bytes=32), r"slots of 32 bytes hold no part of a vector of 4 ranks"),
    ],
)
def test_wrong_arguments_are_named(make_world, change, message):
    world = make_world(4, slot_bytes=change.get("slot_bytes", 1 << 20))
    x = np.zeros((4, 8), change.get("dtype", np.float32))

    def local(x):
        attributes = {"counts": np.array([8], np.int64)} | {
            k: v for k, v in change.items() if k == "counts"
        }
        rank = jax.lax.axis_index("cp").reshape(1)
        call = jax.ffi.ffi_call(targets.PSUM, [jax.typeof(x[0])])
        return call(rank, x[0], group=np.int64(world.session), **attributes)[0][None]

    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(world.run(local, [P("cp")], P("cp"), x))
