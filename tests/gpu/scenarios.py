# SPDX-License-Identifier: Apache-2.0
"""Whole lives of groups on ranks: replays, donation, independent calls, errors.

Each function runs in the processes of a rig, in all of them alike, raises what a test
would, and returns what is worth recording.
"""

import logging
import time
import traceback

import jax
import ml_dtypes
import numpy as np
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import jax_ulysses as ju
from jax_ulysses import heaps
from jax_ulysses.ffi import targets
from jax_ulysses.rendezvous import Rendezvous
from tests.gpu.basics import (
    WORKSPACE_BYTES,
    array,
    handler_calls,
    initialize,
    outcome,
    scatter,
)
from tests.gpu.faults import (
    fault_device_order,
    fault_missing_rank,
    fault_other_call,
    fault_other_dtype,
    fault_other_shape,
    late_finalize,
    late_rank,
)
from tests.gpu.shards import HEADS, SEQUENCE, assert_same_bits, place, run
from tests.helpers import mapping_oracle
from tests.helpers.projection_cases import Case
from tests.helpers.worlds import World

LAYERS = 4


def _layers(rank, heads, head_dim):
    """Alternating dataflows, each of which depends on the one before."""
    name = rank.implementation

    def layers(x, w_in, w_out):
        for _ in range(LAYERS):
            q = ju.q_proj_a2a(
                x, w_in, axis_name="cp", num_heads=heads, implementation=name
            )
            x = ju.a2a_out_proj(q, w_out, axis_name="cp", implementation=name)
        return x

    return layers


def _layer_operands(rank, d_model=256, head_dim=64, tokens=64):
    heads = 2 * rank.num_ranks
    rng = np.random.default_rng(1)
    scale = 1 / np.sqrt(heads * head_dim)
    shapes = [(1, tokens * rank.num_ranks, d_model), (d_model, heads * head_dim)]
    x = rng.standard_normal(shapes[0])
    w_in = rng.standard_normal(shapes[1]) / np.sqrt(d_model)
    w_out = rng.standard_normal(shapes[1][::-1]) * scale
    return heads, head_dim, [a.astype(ml_dtypes.bfloat16) for a in (x, w_in, w_out)]


def _replays(rank, collective_calls):
    """X and -X in turn, 100 times, with other programs in between: the same bits."""
    heads, head_dim, (x, *weights) = _layer_operands(rank)
    specs = (SEQUENCE, P(), P())
    with ju.settings(collective_calls=collective_calls):
        initialize(rank)
        program = jax.jit(
            jax.shard_map(
                _layers(rank, heads, head_dim),
                mesh=rank.mesh,
                in_specs=specs,
                out_specs=SEQUENCE,
            )
        )
        placed = [place(rank.mesh, w) for w in weights]
        inputs = [place(rank.mesh, s * x, SEQUENCE) for s in (1, -1)]
        first = [
            np.asarray(s.data) for s in program(inputs[0], *placed).addressable_shards
        ]
        assert not any(np.isnan(f.astype(np.float32)).any() for f in first)
        before = handler_calls()
        extra = 0
        for i in range(101):
            out = program(inputs[i % 2], *placed)
            sign = (1, -1)[i % 2]
            for shard, wanted in zip(out.addressable_shards, first):
                got = sign * np.asarray(shard.data)
                assert np.array_equal(got, wanted), f"replay {i} differs"
            if i % 25 == 24:
                extra -= handler_calls()
                y = array(rank, seed=i)
                result = run(rank.mesh, scatter(rank), (SEQUENCE,), HEADS, y)
                assert_same_bits(result, mapping_oracle.scatter(y, rank.num_ranks))
                extra += handler_calls()
        calls = handler_calls() - before - extra
    per_process = len(first) * 2 * LAYERS
    return {"runs": 101, "calls_a_run": per_process, "handler_calls": calls}


def replays_plain(rank):
    """Replays of calls that XLA takes for computation."""
    return _replays(rank, False)


def replays_collective(rank):
    """Replays of calls that XLA takes for collectives."""
    return _replays(rank, True)


def donation(rank):
    """A donated input whose buffer becomes the output: the same bits as without."""
    initialize(rank)
    heads, head_dim, (x, *weights) = _layer_operands(rank)
    layers = _layers(rank, heads, head_dim)
    specs = (SEQUENCE, P(), P())
    mapped = jax.shard_map(layers, mesh=rank.mesh, in_specs=specs, out_specs=SEQUENCE)
    placed = [place(rank.mesh, w) for w in weights]
    results = []
    for donate in ((), (0,)):
        program = jax.jit(mapped, donate_argnums=donate)
        y = place(rank.mesh, x, SEQUENCE)
        for _ in range(5):
            y = program(y, *placed)
        results.append([np.asarray(s.data) for s in y.addressable_shards])
    for kept, donated in zip(*results):
        assert np.array_equal(kept, donated)


def independent_calls(rank):
    """Ten calls that nothing connects, in one program."""
    initialize(rank)
    xs = [array(rank, 8 * (i + 1), 1 + i % 3, seed=i) for i in range(10)]
    scatter_one = scatter(rank)
    ys = run(
        rank.mesh,
        lambda *xs: tuple(scatter_one(x) for x in xs),
        (SEQUENCE,) * 10,
        (HEADS,) * 10,
        *xs,
    )
    for x, y in zip(xs, ys):
        assert_same_bits(y, mapping_oracle.scatter(x, rank.num_ranks))


def two_groups(rank):
    """Lines along both axes of a 2 x P/2 mesh, and all ranks, in one program."""
    if rank.num_ranks < 4:
        return {"not_run": "needs 4 ranks"}
    devices = rank.mesh.devices.reshape(2, -1)
    mesh = Mesh(devices, ("a", "b"), axis_types=(AxisType.Explicit,) * 2)
    half = rank.num_ranks // 2
    for axis in ("a", "b", ("a", "b")):
        initialize(rank, axis, mesh)
    name = rank.implementation

    def local(x, y, z):
        return (
            ju.scatter_heads(x, "a", implementation=name),
            ju.scatter_heads(y, "b", implementation=name),
            ju.scatter_heads(z, ("a", "b"), implementation=name),
        )

    x, y, z = (
        np.random.default_rng(i).standard_normal(s).astype(np.float32)
        for i, s in enumerate(
            [(half, 32, 4, 8), (2, 16 * half, 2 * half, 8), (1, 64, 2 * 2 * half, 8)]
        )
    )
    both = ("a", "b")
    results = run(
        mesh,
        local,
        (P("b", "a"), P("a", "b"), P(None, both)),
        (P("b", None, "a"), P("a", None, "b"), P(None, None, both)),
        x,
        y,
        z,
    )
    for value, result, ranks in zip((x, y, z), results, (2, half, 2 * half)):
        assert_same_bits(result, mapping_oracle.scatter(value, ranks))
    return None


def replicated_weights(rank):
    """Gradients of replicated weights, which XLA sums over the ranks."""
    if len(rank.mesh.local_devices) < rank.num_ranks:
        return {"not_run": "XLA's collectives do not work between ranks on one GPU"}
    initialize(rank)
    world = World("rig", rank.mesh)
    for operator in ("qkv_proj_a2a", "a2a_out_proj"):
        p = rank.num_ranks
        case = Case(operator, 2, 64, 128, 2 * p, p, 64, "bfloat16", zigzag=True)
        case.check(world, rank.implementation)
    return None


def same_program_again(rank):
    """A jitted function goes on to work after finalize and a new initialize."""
    x = array(rank)
    program = jax.jit(
        jax.shard_map(
            scatter(rank), mesh=rank.mesh, in_specs=(SEQUENCE,), out_specs=HEADS
        )
    )
    for size in (1, 2, 1):
        ju.initialize(rank.mesh, "cp", size * WORKSPACE_BYTES, sm_budget=rank.sm_budget)
        for _ in range(3):
            y = program(place(rank.mesh, x, SEQUENCE))
            assert_same_bits(y, mapping_oracle.scatter(x, rank.num_ranks))
        ju.finalize()


def arguments(rank):
    """Repeated and contradictory calls of initialize, and calls without it."""
    report = initialize(rank)
    assert rank.implementation not in report.unavailable, report
    assert initialize(rank) == report
    try:
        ju.initialize(rank.mesh, "cp", 2 * WORKSPACE_BYTES, sm_budget=rank.sm_budget)
        raise AssertionError("other arguments were accepted")
    except RuntimeError as error:
        assert "finalize() first" in str(error)
    ju.finalize()
    try:
        run(rank.mesh, scatter(rank), (SEQUENCE,), HEADS, array(rank))
        raise AssertionError("a call without a group was accepted")
    except NotImplementedError as error:
        assert "call jax_ulysses.initialize" in str(error)


def out_of_memory(rank):
    """Every rank raises, with the sizes, and a smaller heap works afterwards."""
    if rank.implementation == "host":
        return {"not_run": "address space of a CPU is not bounded so"}
    try:
        ju.initialize(rank.mesh, "cp", 1 << 40, sm_budget=rank.sm_budget)
        raise AssertionError("a heap of 1 TiB was accepted")
    except RuntimeError as error:
        text = str(error)
    for word in ("symmetric heap", "slots of 524288 MiB", "are free", "MEM_FRACTION"):
        assert word in text, text
    initialize(rank)
    assert outcome(rank, array(rank)) == "right"
    return {"text": text}


def different_arguments(rank):
    """Processes that ask for different heaps all raise."""
    if rank.num_ranks == 1 or len({d.process_index for d in rank.mesh.devices}) == 1:
        return {"not_run": "needs several processes"}
    workspace = WORKSPACE_BYTES * (1 + (rank.index == 0))
    try:
        ju.initialize(rank.mesh, "cp", workspace, sm_budget=rank.sm_budget)
        raise AssertionError("different arguments were accepted")
    except RuntimeError as error:
        text = str(error)
    assert "differs between processes" in text, text
    return {"text": text}


def cycles(rank):
    """Fifty groups leave nothing behind."""
    if rank.implementation == "host":
        return {"not_run": "no device memory"}
    device = rank.mesh.devices[rank.index].local_hardware_id
    free = []
    for i in range(52):
        if i in (2, 51):
            Rendezvous(rank.mesh, "cycles").wait(60)
            free.append(targets.device_memory(device)[0])
            Rendezvous(rank.mesh, "cycles").wait(60)
        initialize(rank)
        if i % 10 == 0:
            assert outcome(rank, array(rank)) == "right"
        ju.finalize()
    assert abs(free[0] - free[1]) < 16 << 20, free
    return {"free_bytes": free}


SCENARIOS = (
    replays_plain,
    replays_collective,
    donation,
    replicated_weights,
    independent_calls,
    two_groups,
    late_rank,
    fault_other_call,
    fault_other_shape,
    fault_other_dtype,
    fault_device_order,
    fault_missing_rank,
    same_program_again,
    arguments,
    out_of_memory,
    different_arguments,
    late_finalize,
    cycles,
)


def run_all(rank) -> dict:
    """Runs every scenario; name -> failure, result and seconds."""
    heaps.FINALIZE_TIMEOUT_S = 15.0
    results = {}
    for scenario in SCENARIOS:
        start = time.monotonic()
        failure = value = None
        try:
            value = scenario(rank)
        except Exception:
            failure = traceback.format_exc()[-2000:]
        ju.finalize()
        results[scenario.__name__] = {
            "failure": failure,
            "value": value,
            "seconds": round(time.monotonic() - start, 2),
        }
        logging.getLogger(__name__).info("%s: %s", scenario.__name__, failure or "ok")
    return results
