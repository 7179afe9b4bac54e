# SPDX-License-Identifier: Apache-2.0
"""Global arrays on ranks of several processes: placed, and compared shard by shard."""

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

SEQUENCE, HEADS, RANKS = P(None, "cp"), P(None, None, "cp"), P("cp")


def place(mesh, value, spec=P()):
    """A global array of which each process makes its own shards."""
    value = np.asarray(value)
    return jax.make_array_from_callback(
        value.shape, NamedSharding(mesh, spec), lambda index: value[index]
    )


def run(mesh, function, in_specs, out_specs, *values, donate=()):
    """Runs a per-device function under jit and shard_map; returns global arrays."""
    mapped = jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
    placed = [place(mesh, v, s) for v, s in zip(values, in_specs, strict=True)]
    return jax.block_until_ready(jax.jit(mapped, donate_argnums=donate)(*placed))


def local_shards(array):
    """What the ranks of this process have, as NumPy arrays."""
    return [np.asarray(s.data) for s in array.addressable_shards]


def local_parts(array, expected):
    """(what a rank of this process has, what it should have), for each of them."""
    expected = np.asarray(expected)
    assert array.shape == expected.shape, (array.shape, expected.shape)
    return [
        (np.asarray(shard.data), expected[shard.index])
        for shard in array.addressable_shards
    ]


def worst_error(array, expected) -> float:
    """Largest relative L2 distance of a local shard; NaN counts as infinite."""
    worst = 0.0
    for actual, wanted in local_parts(array, expected):
        actual, wanted = actual.astype(np.float64), wanted.astype(np.float64)
        error = np.linalg.norm(actual - wanted) / (np.linalg.norm(wanted) or 1.0)
        worst = max(worst, np.inf if np.isnan(error) else float(error))
    return worst


def assert_same_bits(array, expected) -> None:
    """Every local shard equals the expected array bit for bit."""
    for actual, wanted in local_parts(array, expected):
        assert actual.dtype == wanted.dtype
        wrong = actual.tobytes() != np.ascontiguousarray(wanted).tobytes()
        if wrong:
            differ = np.argwhere(actual != wanted)
            raise AssertionError(
                f"{len(differ)} of {actual.size} elements differ, first at "
                f"{tuple(differ[0]) if len(differ) else 'a NaN or zero'}"
            )


def all_nan(array) -> bool:
    """Whether every element of every local shard is NaN."""
    return all(
        bool(np.isnan(np.asarray(s.data).astype(np.float32)).all())
        for s in array.addressable_shards
    )
