# SPDX-License-Identifier: Apache-2.0
"""Groups on CPU devices that end, and begin again."""

import concurrent.futures
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P
from jax.sharding import Mesh

import jax_ulysses as ju
from jax_ulysses import group
from jax_ulysses.ffi import targets

SEQUENCE = P(None, "cp")
HEADS = P(None, None, "cp")


def _scatter(x):
    return ju.scatter_heads(x, "cp", implementation="host")


def _there_and_back(x, _):
    return ju.gather_heads(_scatter(x), "cp", implementation="host"), None


INSIDE = {
    "jit": (jax.jit(_scatter), HEADS),
    "scan": (lambda x: jax.lax.scan(_there_and_back, x, None, length=2)[0], SEQUENCE),
    "checkpoint": (jax.checkpoint(_scatter), HEADS),
}


@pytest.mark.parametrize("name", INSIDE)
def test_what_was_traced_on_other_devices(name):
    """JAX keeps traces of inner functions by the shape of the mesh, not its devices."""
    function, out = INSIDE[name]
    devices = np.array(jax.devices())
    x = jnp.arange(1 * 16 * 4 * 2, dtype=jnp.float32).reshape(1, 16, 4, 2)
    for some in (devices[:4], devices[4:8]):
        mesh = Mesh(some, ("cp",))
        ju.initialize(mesh, "cp")
        try:
            mapped = jax.shard_map(
                function, mesh=mesh, in_specs=SEQUENCE, out_specs=out
            )
            np.testing.assert_array_equal(jax.jit(mapped)(x), x)
        finally:
            ju.finalize()


def test_a_rank_that_arrives_after_the_group_has_been_made_anew():
    """It belongs to an execution that has failed: it must not hold up the new group."""
    mesh = Mesh(np.array(jax.devices()[:4]), ("cp",))

    def late(rank):
        if int(rank[0]) == 3:
            time.sleep(3)
        return rank

    def delayed(x):
        rank = jax.lax.axis_index("cp").reshape(1)
        rank = jax.pure_callback(late, jax.typeof(rank), rank)
        return _scatter(x + 0 * rank[0].astype(x.dtype))

    def compiled(function):
        mapped = jax.shard_map(function, mesh=mesh, in_specs=SEQUENCE, out_specs=HEADS)
        return jax.jit(mapped)

    x = jnp.ones((1, 16, 4, 8), jnp.float32)
    plain = compiled(_scatter)
    with ju.settings(deadline_s=1.0):
        ju.initialize(mesh, "cp")
        try:
            np.testing.assert_array_equal(plain(x), x)
            # On a thread of its own: at exit JAX waits for what the main thread has run
            # with a callback.
            with concurrent.futures.ThreadPoolExecutor(1) as thread:
                failing = thread.submit(compiled(delayed), x).result()
            with pytest.raises(jax.errors.JaxRuntimeError, match="deadline of 1000 ms"):
                np.asarray(failing.addressable_shards[0].data)
            ju.finalize()
            ju.initialize(mesh, "cp")
            end = time.monotonic() + 4
            while time.monotonic() < end:
                np.testing.assert_array_equal(plain(x), x)
                time.sleep(0.05)
            with pytest.raises(jax.errors.JaxRuntimeError, match="run it again"):
                np.asarray(failing.addressable_shards[3].data)
        finally:
            ju.finalize()


def test_a_short_deadline_is_one():
    mesh = Mesh(np.array(jax.devices()[:2]), ("cp",))
    with ju.settings(deadline_s=1e-4):
        ju.initialize(mesh, "cp")
    assert group._groups["cp",].plan.deadline_ms == 1
    ju.finalize()


def test_a_failed_group_returns_the_text():
    options = dict(num_ranks=2, members=[(0, 0, 0), (1, 0, 1)], slot_bytes=1024)
    targets.group_create(session=92, **options)
    targets.group_fail(92, "jax_ulysses: rank 1 ended.")
    targets.group_fail(92, "the first text stays")
    (text,) = targets.group_info(92)["closed"]
    assert text.startswith("jax_ulysses: rank 1 ended. This group is closed: call ")
    targets.group_destroy(92)
    with pytest.raises(ValueError, match="92"):
        targets.group_fail(92, "gone")


def test_a_group_in_two_steps():
    options = dict(num_ranks=2, members=[(0, 0, 0), (1, 0, 1)], slot_bytes=1024)
    blob = targets.group_prepare(session=91, **options)
    assert targets.group_info(91)["calls"] == 0
    with pytest.raises(ValueError, match="not records of this version"):
        targets.group_connect(91, [b"something else, of some length"])
    targets.group_connect(91, [blob])
    with pytest.raises(ValueError, match="connected already"):
        targets.group_connect(91, [blob])
    targets.group_close(91)
    targets.group_close(91)
    assert "destroyed" in targets.group_info(91)["closed"][0]
    targets.group_destroy(91)
    with pytest.raises(ValueError, match="no group for session 91"):
        targets.group_info(91)
