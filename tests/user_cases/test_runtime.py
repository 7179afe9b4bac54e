# SPDX-License-Identifier: Apache-2.0
"""Cases about run time: many calls, changing sizes, groups that come and go, faults.

Implementations without peers of their own pass most of these by having nothing to
get wrong; they run all the same, so that a new implementation meets every test.
"""

import os
import random
import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ulysses as ju
from jax_ulysses import group
from tests.helpers import implementations, mapping_oracle, tags
from tests.helpers.worlds import world

HAS_HOST = "host" in implementations.NAMES
host_only = pytest.mark.skipif(not HAS_HOST, reason="no implementation with peers here")


def _there(w, name, zigzag=False):
    order = ju.TokenOrder.ZIGZAG if zigzag else ju.TokenOrder.CONTIGUOUS

    def call(x):
        return ju.scatter_heads(x, w.axis, token_order=order, implementation=name)

    return jax.jit(w.shard_map(call, (w.tokens,), w.heads))


@pytest.mark.user_case(45, 47)
def test_many_calls_of_changing_sizes(implementation):
    """Six programs in random order with changing data; no epoch meets old values."""
    w = world("cp4")
    name = implementation.on(w)
    there = _there(w, name)
    rng = random.Random(0)
    payloads = {}
    for i, tokens in enumerate((1, 2, 3, 5, 8, 13)):
        x = tags.planes((1 + i % 2, 4 * tokens, 8, 5), jnp.float32)[0]
        payloads[tokens] = [
            (w.put(sign * x, w.tokens), sign * mapping_oracle.scatter(x, 4))
            for sign in (np.float32(1), np.float32(-1))
        ]
    for step in range(300):
        x, expected = payloads[rng.choice(list(payloads))][step % 2]
        np.testing.assert_array_equal(np.asarray(there(x)), expected)


@pytest.mark.user_case(45)
def test_one_program_replayed_with_changing_data(implementation):
    """A loop on the device, whose every step exchanges what the last one wrote."""
    w = world("cp4")
    name = implementation.on(w)

    def local(x):
        def body(x, _):
            y = ju.scatter_heads(x, "cp", implementation=name)
            back = ju.gather_heads(-y, "cp", implementation=name)
            return back + 1, y[0, 0, 0, 0]

        return jax.lax.scan(body, x, length=50)

    mapped = jax.jit(w.shard_map(local, (w.tokens,), (w.tokens, jax.P("cp"))))
    x = tags.planes((2, 8, 4, 3), jnp.float32)[0]
    for _ in range(3):
        out, _ = mapped(w.put(x, w.tokens))
        tags.equal_bits(out, x)  # x -> 1 - x -> x, an even number of times.


@pytest.mark.user_case(49)
def test_operand_overwritten_after_the_call(implementation):
    """The caller reuses its buffer at once: donated, overwritten, passed again."""
    w = world("cp4")
    name = implementation.on(w)

    def local(x):
        y = ju.scatter_heads(x, "cp", implementation=name)
        return ju.gather_heads(y, "cp", implementation=name), jnp.full_like(x, jnp.nan)

    mapped = jax.jit(
        w.shard_map(local, (w.tokens,), (w.tokens, w.tokens)), donate_argnums=0
    )
    x = tags.planes((2, 16, 8, 5), jnp.float32)[0]
    for _ in range(20):
        out, nan = mapped(w.put(x.copy(), w.tokens))
        mapped(nan)
        tags.equal_bits(out, x)


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@host_only
@pytest.mark.user_case(55)
def test_groups_come_and_go_without_leaking():
    w = world("cp8")
    ju.finalize()
    sizes = [1 << 20, 16 << 20, 2 << 20]

    def cycle(count):
        for i in range(count):
            report = ju.initialize(w.mesh, "cp", sizes[i % len(sizes)])
            assert report.workspace_bytes == sizes[i % len(sizes)]
            ju.finalize()

    cycle(30)
    before = _resident_bytes()
    cycle(150)
    # Had each cycle leaked one heap of one device, this would be 57 MiB: its control
    # words, as nothing touches the slots.
    assert _resident_bytes() - before < 32 << 20


@host_only
@pytest.mark.user_case(55)
def test_program_compiled_for_one_group_does_not_run_on_none():
    w = world("cp4")
    ju.finalize()
    ju.initialize(w.mesh, "cp", 1 << 20)
    there, x = _there(w, "host"), w.put(np.ones((1, 8, 4, 2), np.float32), w.tokens)
    jax.block_until_ready(there(x))
    ju.finalize()
    with pytest.raises(jax.errors.JaxRuntimeError, match="initialize"):
        jax.block_until_ready(there(x))


@host_only
@pytest.mark.user_case(59)
def test_initialize_is_idempotent_and_strict():
    w = world("cp4")
    ju.finalize()
    first = ju.initialize(w.mesh, "cp", 1 << 20)
    assert ju.initialize(w.mesh, "cp", 1 << 20) is first
    assert (first.num_ranks, first.num_groups) == (4, 1)
    with pytest.raises(RuntimeError, match=r"with other arguments.*finalize\(\) first"):
        ju.initialize(w.mesh, "cp", 2 << 20)
    ju.finalize()
    ju.finalize()
    assert ju.initialize(w.mesh, "cp", 2 << 20).workspace_bytes == 2 << 20
    ju.finalize()
    with pytest.raises(ValueError, match=r"'sp' is not in the mesh"):
        ju.initialize(w.mesh, "sp")


@host_only
@pytest.mark.user_case(59)
def test_workspace_that_is_too_small_says_how_much_is_needed():
    w = world("cp4")
    ju.finalize()
    ju.initialize(w.mesh, "cp", 4096)
    try:
        x = w.put(np.ones((1, 64, 16, 16), np.float32), w.tokens)
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"\d+ bytes"):
            jax.block_until_ready(_there(w, "host")(x))
    finally:
        ju.finalize()


@host_only
@pytest.mark.user_case(58)
def test_a_rank_that_never_arrives_ends_with_its_name():
    """An error within the deadline, then a clean start; never a result."""
    from jax_ulysses.ffi import _targets

    w = world("dp2cp4-explicit")
    ju.finalize()
    x = tags.planes((2, 8, 4, 3), jnp.float32)[0]
    with ju.settings(deadline_s=1.0):
        ju.initialize(w.mesh, "cp", 1 << 20)
        there = _there(w, "host")
        np.testing.assert_array_equal(there(w.put(x, w.tokens)), x)
        _targets.inject_fault(group.find(("cp",)).session, 0, 2, "skip", 1)
        begin = time.monotonic()
        with pytest.raises(jax.errors.JaxRuntimeError) as caught:
            jax.block_until_ready(there(w.put(x, w.tokens)))
        assert time.monotonic() - begin < 10
        text = str(caught.value)
        assert "scatter" in text
        assert "rank 2" in text
        assert re.search(r"epoch \d+", text)
        # The group is closed: later calls end at once, with the same reason.
        begin = time.monotonic()
        with pytest.raises(jax.errors.JaxRuntimeError, match="rank 2"):
            jax.block_until_ready(there(w.put(x, w.tokens)))
        assert time.monotonic() - begin < 0.9
        ju.finalize()
        ju.initialize(w.mesh, "cp", 1 << 20)
        again = _there(w, "host")
        np.testing.assert_array_equal(again(w.put(x, w.tokens)), x)
        ju.finalize()
