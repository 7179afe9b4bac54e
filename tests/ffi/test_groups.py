# SPDX-License-Identifier: Apache-2.0
"""Groups through XLA: errors, faults that reach every rank, several calls at once."""

import concurrent.futures
import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P

from jax_ulysses.ffi import targets
from tests.helpers import mapping_oracle

SEQUENCE = P("dp", "cp")
HEAD = P("dp", None, "cp")
RuntimeError_ = jax.errors.JaxRuntimeError


def _keywords(session, num_ranks=4):
    return dict(group=session, axis_name="cp", heads=(8,), num_ranks=num_ranks)


def _scatter(session, x, num_ranks=4):
    (y,) = targets.exchange(
        [x], **_keywords(session, num_ranks), direction=targets.SCATTER
    )
    return y


def _data(world, tokens=6, seed=0):
    shape = (world.num_lines, tokens * world.num_ranks, 8, 4)
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _run(world, x):
    y = world.run(lambda x: _scatter(world.session, x), [SEQUENCE], HEAD, x)
    return np.asarray(y)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(num_ranks=0), "num_ranks is 0"),
        (dict(num_ranks=3), "8 members do not form lines of 3"),
        (dict(num_slots=3), "num_slots is 3, not a power of two"),
        (dict(num_slots=1), "num_slots is 1"),
        (dict(slot_bytes=-1), "slot_bytes is negative"),
        (dict(deadline_ms=-1), "deadline_ms is negative"),
        (dict(platform="tpu"), "platform 'tpu' is not built"),
        (dict(members=[(0, 0, 0), (1, 0, 0)], num_ranks=2), "rank 0 twice"),
        (dict(members=[(0, 0, 0), (0, 0, 1)], num_ranks=2), "device 0 appears twice"),
        (dict(members=[(0, 0, 0), (1, 1, 1)], num_ranks=2), "outside 1 lines"),
    ],
)
def test_wrong_groups_are_refused(change, message):
    options = dict(
        session=77,
        num_ranks=8,
        members=[(d, 0, d) for d in range(8)],
        slot_bytes=1024,
        num_slots=2,
        deadline_ms=1000,
        platform="cpu",
    )
    with pytest.raises(ValueError, match=message):
        targets.group_create(**{**options, **change})
    with pytest.raises(ValueError, match="no group for session 77"):
        targets.group_info(77)


def test_a_session_exists_once(make_world):
    world = make_world()
    with pytest.raises(ValueError, match="exists already"):
        world.create()


def test_info_says_what_was_created(make_world):
    world = make_world(num_ranks=2, slot_bytes=4096, deadline_ms=5)
    info = targets.group_info(world.session)
    assert info["num_ranks"] == 2
    assert info["num_lines"] == 4
    assert info["slot_bytes"] == 4096
    assert info["deadline_ms"] == 5
    assert info["closed"] == [""] * 4
    assert len(info["members"]) == 8
    assert info["heap_bytes"] > 2 * 4096


def test_missing_group_names_session_and_remedy(make_world):
    world = make_world()
    world.destroy()
    with pytest.raises(RuntimeError_) as error:
        _run(world, _data(world))
    assert f"no group for session {world.session}" in str(error.value)
    assert "jax_ulysses.initialize" in str(error.value)
    with pytest.raises(ValueError, match="no group for session"):
        targets.group_destroy(world.session)


def test_device_outside_the_group(make_world):
    world = make_world(num_ranks=4)
    world.destroy()
    targets.group_create(
        session=world.session,
        num_ranks=4,
        members=[(d, 0, d) for d in range(4)],
        slot_bytes=1 << 20,
    )
    with pytest.raises(RuntimeError_, match="is no member of the group of session"):
        _run(world, _data(world))


def test_small_slots_name_needed_and_available_bytes(make_world):
    world = make_world(slot_bytes=500)
    # 3 remote blocks of 6 rows, 2 heads of 4 floats.
    needed = 3 * 6 * 2 * 4 * 4
    with pytest.raises(RuntimeError_, match=f"needs {needed} bytes per slot.* has 500"):
        _run(world, _data(world))
    # No protocol was entered, so the group is still good.
    small = _data(world, tokens=2)
    np.testing.assert_array_equal(_run(world, small), mapping_oracle.scatter(small, 4))


FAULTS = [
    ("skip", 0, r"rank \d waited for .*rank 2.*epoch 2, deadline of 400 ms"),
    ("delay_ms", 1500, r"rank \d waited for .*rank 2.*epoch 2, deadline of 400 ms"),
    ("throw", 0, r"rank 2 failed, epoch 2 .*injected fault"),
    ("shape", 0, r"disagree on this call"),
]


@pytest.mark.parametrize(("kind", "value", "pattern"), FAULTS)
def test_a_fault_of_one_rank_is_an_error_of_its_line(make_world, kind, value, pattern):
    world = make_world(deadline_ms=400)
    x = _data(world)
    expected = mapping_oracle.scatter(x, 4)
    np.testing.assert_array_equal(_run(world, x), expected)
    targets.inject_fault(world.session, line=1, rank=2, kind=kind, value=value)
    begin = time.monotonic()
    with pytest.raises(RuntimeError_) as error:
        _run(world, x)
    assert time.monotonic() - begin < 4
    text = str(error.value)
    assert re.search(pattern, text)
    assert "jax_ulysses.exchange.v1 (scatter)" in text
    assert "line 1" in text
    assert "jax_ulysses.initialize()" in text
    # The line's text, and the other line is untouched.
    good, closed = targets.group_info(world.session)["closed"]
    assert good == ""
    assert closed in text
    # Later calls fail at once with the same text.
    begin = time.monotonic()
    with pytest.raises(RuntimeError_) as again:
        _run(world, x)
    assert time.monotonic() - begin < 2
    assert closed in str(again.value)
    # Destroy and create recovers.
    world.destroy()
    world.create()
    np.testing.assert_array_equal(_run(world, x), expected)


def test_a_late_rank_in_time_is_no_fault(make_world):
    world = make_world(deadline_ms=20_000)
    targets.inject_fault(world.session, line=0, rank=1, kind="delay_ms", value=200)
    x = _data(world)
    np.testing.assert_array_equal(_run(world, x), mapping_oracle.scatter(x, 4))


def test_faults_are_named():
    with pytest.raises(ValueError, match="kind 'explode' is not one of"):
        targets.inject_fault(1, 0, 0, "explode")


def test_no_rank_to_inject(make_world):
    world = make_world()
    with pytest.raises(ValueError, match="no rank 4 on line 0"):
        targets.inject_fault(world.session, 0, 4, "skip")


def test_destroying_during_a_call_ends_it(make_world):
    world = make_world(deadline_ms=20_000)
    targets.inject_fault(world.session, line=0, rank=0, kind="skip")
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        running = pool.submit(_run, world, _data(world))
        time.sleep(1.0)
        world.destroy()
        with pytest.raises(RuntimeError_, match="was destroyed"):
            running.result(timeout=10)


def test_epochs_wrap(make_world):
    world = make_world(start_epoch=2**32 - 4)
    for seed in range(9):
        x = _data(world, tokens=1 + seed, seed=seed)
        np.testing.assert_array_equal(_run(world, x), mapping_oracle.scatter(x, 4))


def test_stale_data_never_passes(make_world):
    """X and -X in turn, in one program: a stale slot would show as a wrong sign."""
    world = make_world()
    x = _data(world)

    def alternate(x):
        def step(x, _):
            y = _scatter(world.session, x)
            return -x, y

        return jax.lax.scan(step, x, length=50)[1]

    ys = np.asarray(world.run(alternate, [SEQUENCE], P(None, *HEAD), x))
    expected = mapping_oracle.scatter(x, 4)
    for i, y in enumerate(ys):
        np.testing.assert_array_equal(y, expected * (-1) ** i)


def test_independent_calls_of_one_group(make_world):
    """No data dependency between them; equal and unequal shapes."""
    world = make_world()
    x, y = _data(world, 6, 1), _data(world, 9, 2)

    def two(x, y):
        first = _scatter(world.session, x)
        # Work on one branch only, so that the scheduler may prefer the other.
        for _ in range(4):
            y = jnp.sin(y @ (jnp.eye(4) * 1.1))
        return first, _scatter(world.session, y), _scatter(world.session, 2 * x)

    mapped = jax.shard_map(
        two, mesh=world.mesh, in_specs=(SEQUENCE,) * 2, out_specs=(HEAD,) * 3
    )
    run = jax.jit(mapped)
    sharding = jax.NamedSharding(world.mesh, SEQUENCE)
    placed = jax.device_put((x, y), sharding)
    for _ in range(20):
        a, _, c = run(*placed)
        np.testing.assert_array_equal(np.asarray(a), mapping_oracle.scatter(x, 4))
        np.testing.assert_array_equal(np.asarray(c), mapping_oracle.scatter(2 * x, 4))


@pytest.mark.parametrize("with_psum", [False, True])
def test_independent_calls_between_products_and_collectives(make_world, with_psum):
    """Enough parallel work that XLA:CPU starts calls in another order on each device.

    A handler that blocked its thread would deadlock here, against other calls of the
    group or against the all-reduce, and equal shapes would hide a mix-up.
    """
    world = make_world(8, slot_bytes=1 << 24)

    def function(x, w):
        errors = []
        for i in range(6):
            z = x * (i + 1)
            for _ in range(3):
                z = jnp.sin(z @ w)
            z = z.reshape(*z.shape[:2], 8, -1)
            moved = _scatter(world.session, z, 8)
            (back,) = targets.exchange(
                [moved], **_keywords(world.session, 8), direction=targets.GATHER
            )
            error = jnp.abs(back - z).max()
            if with_psum:
                error = error + 0 * jax.lax.psum(z.sum(), "cp")
            errors.append(error)
        return jnp.stack(errors)[None]

    rng = np.random.default_rng(0)
    mapped = jax.shard_map(
        function,
        mesh=world.mesh,
        in_specs=(SEQUENCE, P()),
        out_specs=P(("dp", "cp")),
    )
    run = jax.jit(mapped)
    x = jax.device_put(
        rng.standard_normal((1, 8 * 128, 512)).astype(np.float32),
        jax.NamedSharding(world.mesh, SEQUENCE),
    )
    w = jax.device_put(
        rng.standard_normal((512, 512)).astype(np.float32) / 32,
        jax.NamedSharding(world.mesh, P()),
    )
    # All in flight at once.
    for errors in [run(x, w) for _ in range(4)]:
        np.testing.assert_array_equal(np.asarray(errors), 0)


def test_a_program_on_another_device_order_is_refused(make_world):
    """At once on every rank, also on those that the two meshes agree about."""
    world = make_world(4, deadline_ms=60_000)
    devices = world.mesh.devices.copy()
    devices[:, :2] = devices[:, 1::-1]
    mesh = jax.sharding.Mesh(devices, ("dp", "cp"), axis_types=world.mesh.axis_types)
    x = jax.device_put(_data(world), jax.NamedSharding(mesh, SEQUENCE))
    mapped = jax.shard_map(
        lambda x: _scatter(world.session, x),
        mesh=mesh,
        in_specs=(SEQUENCE,),
        out_specs=HEAD,
    )
    start = time.monotonic()
    with pytest.raises(RuntimeError_, match="device order differs from the one given"):
        jax.block_until_ready(jax.jit(mapped)(x))
    assert time.monotonic() - start < 30
    closed = targets.group_info(world.session)["closed"]
    assert all(re.search(r"is rank \d in this program and rank \d", t) for t in closed)


def test_two_groups_in_one_program(make_world):
    """Groups of 4 and of 8 ranks over the same devices."""
    four, eight = make_world(4), make_world(8)
    mesh = four.mesh

    def both(x, y):
        keywords = {**_keywords(eight.session, 8), "axis_name": ("dp", "cp")}
        (z,) = targets.exchange([y], **keywords, direction=targets.SCATTER)
        return _scatter(four.session, x), z

    x = _data(four)
    y = np.random.default_rng(3).standard_normal((1, 24, 8, 4)).astype(np.float32)
    # "dp" is major, so (dp, cp) counts the devices as the group of 8 does.
    specs = [SEQUENCE, P(None, ("dp", "cp"))]
    placed = [
        jax.device_put(a, jax.NamedSharding(mesh, s)) for a, s in zip((x, y), specs)
    ]
    mapped = jax.shard_map(
        both,
        mesh=mesh,
        in_specs=tuple(specs),
        out_specs=(HEAD, P(None, None, ("dp", "cp"))),
    )
    run = jax.jit(mapped)
    for _ in range(20):
        a, b = run(*placed)
        np.testing.assert_array_equal(np.asarray(a), mapping_oracle.scatter(x, 4))
        np.testing.assert_array_equal(np.asarray(b), mapping_oracle.scatter(y, 8))


def test_programs_in_flight_at_once(make_world):
    """Asynchronous dispatch, and dispatch from several threads."""
    world = make_world()
    xs = [_data(world, 5, seed) for seed in range(12)]
    scatter = jax.jit(
        jax.shard_map(
            lambda x: _scatter(world.session, x),
            mesh=world.mesh,
            in_specs=SEQUENCE,
            out_specs=HEAD,
        )
    )
    placed = [jax.device_put(x, jax.NamedSharding(world.mesh, SEQUENCE)) for x in xs]
    for x, y in zip(xs, [scatter(p) for p in placed]):
        np.testing.assert_array_equal(np.asarray(y), mapping_oracle.scatter(x, 4))
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda p: np.asarray(scatter(p)), placed))
    for x, y in zip(xs, results):
        np.testing.assert_array_equal(y, mapping_oracle.scatter(x, 4))


def test_results_repeat_bit_for_bit(make_world):
    world = make_world(8)
    keywords = dict(group=world.session, axis_name="cp", heads=(8, 2, 1), num_ranks=8)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1, 8 * 70, 32)).astype(np.float32)
    w = rng.standard_normal((32, 11 * 4)).astype(np.float32)

    def there_and_back(x, w):
        parts = targets.gemm_a2a(x, w, **keywords, head_dim=4)
        return targets.a2a_gemm(parts, w, **keywords, w_transposed=True)

    specs = ([SEQUENCE, P()], (SEQUENCE, SEQUENCE))
    first = [np.asarray(a) for a in world.run(there_and_back, *specs, x, w)]
    for late in range(6):
        targets.inject_fault(world.session, 0, late, "delay_ms", 20)
        again = world.run(there_and_back, *specs, x, w)
        for a, b in zip(first, again):
            np.testing.assert_array_equal(a, np.asarray(b))
