# SPDX-License-Identifier: Apache-2.0
"""Faults on ranks: who notices, what is said, and that a new group works.

On CPUs the call that meets a fault raises at once; on GPUs it ends with NaN, and the
next one raises.
"""

import dataclasses
import logging
import os
import signal
import threading
import time

import jax
import numpy as np
from jax.sharding import Mesh

import jax_ulysses as ju
from jax_ulysses import group, heaps
from jax_ulysses.ffi import targets
from tests.gpu.basics import array, handler_calls, initialize, outcome


class _Records(logging.Handler):
    def __init__(self, level=logging.ERROR):
        super().__init__(level)
        self.texts: list[str] = []

    def emit(self, record):
        self.texts.append(record.getMessage())


def _inject(rank, victim, kind, value=0):
    """In the process that has rank ``victim``."""
    if rank.mesh.devices[victim].process_index == jax.process_index():
        found = group.find(("cp",))
        targets.inject_fault(found.session, 0, victim, kind, value)


def _nothing():
    """The call itself is the fault."""


def _meets_fault(rank, victim, provoke, words, deadline_s=2.0, call=outcome):
    """A fault ends the call everywhere, says why, and a new group works.

    ``provoke`` runs before ``call``, which is the call that meets the fault.
    """
    records = _Records()
    logging.getLogger("jax_ulysses").addHandler(records)
    x = array(rank)
    with ju.settings(deadline_s=deadline_s):
        initialize(rank)
        first = outcome(rank, x)
        assert first == "right", first
        provoke()
        start = time.monotonic()
        met = call(rank, x)
        seconds = time.monotonic() - start
        here = rank.mesh.devices[victim].process_index == jax.process_index()
        if rank.implementation == "host" or (here and met != "nan"):
            # An injected fault of the rank itself is an error of the call at once.
            assert met not in ("right", "nan"), met
        else:
            assert met == "nan", met
        if here and "did not take part" in met:
            # This rank launched nothing; it hears of the fault from its peers.
            time.sleep(deadline_s + 1)
        later = outcome(rank, x)
        launched = rank.implementation == "host" or "did not take part" not in met
        if launched:
            assert all(word in later for word in words), later
            time.sleep(0.5)
            if rank.implementation == "cuda":
                assert any(words[0] in text for text in records.texts), records.texts
        ju.finalize()
        initialize(rank)
        again = outcome(rank, x)
        assert again == "right", again
    logging.getLogger("jax_ulysses").removeHandler(records)
    assert seconds < deadline_s + 20, seconds
    return {"seconds": round(seconds, 2), "text": later}


def fault_other_call(rank):
    """One rank comes with another call."""
    return _meets_fault(rank, 1, lambda: _inject(rank, 1, "shape"), ["disagree"])


# XLA's processes share the work of autotuning, and wait up to a day for the others'
# part of the same program. One with a program of its own waits in vain.
OWN_PROGRAMS = "--xla_gpu_shard_autotuning=false"


def _own_array(rank, **kwargs):
    """A call in which the process with rank 1 brings an array of its own."""
    if len({d.process_index for d in rank.mesh.devices}) == 1:
        return {"not_run": "one process runs one program on all ranks"}
    assert OWN_PROGRAMS in os.environ.get("XLA_FLAGS", ""), "else this hangs in XLA"

    def call(rank, x):
        own = rank.mesh.devices[1].process_index == jax.process_index()
        return outcome(rank, array(rank, **kwargs) if own else x)

    return _meets_fault(rank, 1, _nothing, ["disagree"], call=call)


def fault_other_shape(rank):
    """One process calls with longer sequences than the others."""
    return _own_array(rank, tokens=48)


def fault_other_dtype(rank):
    """One process calls with another dtype of the same size."""
    return _own_array(rank, dtype=np.float16)


def fault_device_order(rank):
    """A program whose mesh lists two devices the other way round."""
    devices = rank.mesh.devices.copy()
    devices[[0, 1]] = devices[[1, 0]]
    mesh = Mesh(devices, rank.mesh.axis_names, axis_types=rank.mesh.axis_types)
    swapped = dataclasses.replace(rank, mesh=mesh)
    words = ["device order differs from the one given to initialize"]
    return _meets_fault(rank, 1, _nothing, words, call=lambda _, x: outcome(swapped, x))


def fault_missing_rank(rank):
    """One rank does not launch its call."""
    words = ["rank 1", "deadline of 2000 ms passed"]
    return _meets_fault(rank, 1, lambda: _inject(rank, 1, "skip"), words)


def late_rank(rank):
    """A rank that comes within the deadline costs time, not the result."""
    x = array(rank)
    with ju.settings(deadline_s=20.0):
        initialize(rank)
        assert outcome(rank, x) == "right"
        _inject(rank, 0, "delay_ms", 2000)
        assert outcome(rank, x) == "right"
        assert outcome(rank, x) == "right"


def late_finalize(rank):
    """The others keep their heaps: the late process could have written to them."""
    if rank.num_ranks == 1 or len({d.process_index for d in rank.mesh.devices}) == 1:
        return {"not_run": "needs several processes"}
    records = _Records(logging.WARNING)
    logger = logging.getLogger("jax_ulysses")
    logger.addHandler(records)
    timeout_s, late = heaps.FINALIZE_TIMEOUT_S, rank.index == 1
    heaps.FINALIZE_TIMEOUT_S = 1.0
    try:
        initialize(rank)
        assert outcome(rank, array(rank)) == "right"
        if late:
            time.sleep(4)
        ju.finalize()
    finally:
        heaps.FINALIZE_TIMEOUT_S = timeout_s
        logger.removeHandler(records)
    kept = any("stay allocated" in text for text in records.texts)
    assert kept != late, records.texts
    initialize(rank)
    assert outcome(rank, array(rank)) == "right"


def healthy(rank):
    """What a call does in new processes."""
    initialize(rank)
    return outcome(rank, array(rank))


def killed(rank, victim):
    """One process dies between two calls."""
    return _survive(rank, victim, lambda x: None)


def killed_in_kernel(rank, victim):
    """One process dies while its kernel waits for the others."""

    def launch(x):
        calls = handler_calls()
        threading.Thread(target=outcome, args=(rank, x), daemon=True).start()
        while handler_calls() == calls:
            time.sleep(0.01)

    return _survive(rank, victim, launch)


def _survive(rank, victim, last_act):
    """The others hear of it, end with an error, and leave."""
    heaps.FINALIZE_TIMEOUT_S = 3.0
    records = _Records(logging.WARNING)
    logging.getLogger("jax_ulysses").addHandler(records)
    x = array(rank)
    with ju.settings(deadline_s=20.0):
        initialize(rank)
        assert outcome(rank, x) == "right"
        if rank.index == victim:
            last_act(x)
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        end = time.monotonic() + 20
        while not records.texts and time.monotonic() < end:
            time.sleep(0.1)
        start = time.monotonic()
        later = outcome(rank, x)
        middle = time.monotonic()
        ju.finalize()
        return {
            "heard": records.texts[:1],
            "later": later,
            "later_s": middle - start,
            "finalize_s": time.monotonic() - middle,
        }
