# SPDX-License-Identifier: Apache-2.0
"""What each process of a group does, with a stand-in for the kernels: needs no GPU."""

import functools
import os
import signal
import time

from jax_ulysses import heaps
from jax_ulysses.rendezvous import Rendezvous


class StandIn:
    """The part of ``jax_ulysses.ffi.targets`` that makes and frees groups on GPUs."""

    def __init__(self, index: int):
        self._index = index
        self.closed = ""
        self.destroyed: list[int] = []

    def build_info(self):
        return {"platforms": ["cuda"]}

    def device_uuid(self, ordinal):
        return f"{self._index}-{ordinal}"

    def group_prepare(self, **_):
        return b"records"

    def group_connect(self, session, blobs):
        assert len(blobs) == 3

    def group_info(self, session):
        return {"platform": "cuda", "closed": [self.closed], "heap_bytes": 2048}

    def group_fail(self, session, text):
        self.closed = text

    def group_close(self, session):
        pass

    def group_destroy(self, session):
        self.destroyed.append(session)


def _stand_in(rank):
    """Puts a stand-in in place; returns it, and a plan for the ranks' mesh."""
    targets = StandIn(rank.index)
    heaps._targets = lambda: targets
    plan = heaps.Plan(
        mesh=rank.mesh,
        axes=("cp",),
        num_ranks=rank.num_ranks,
        members=[(0, 0, rank.index)],
        slot_bytes=1024,
        num_slots=2,
        deadline_ms=30000,
        sm_budget=0,
    )
    return targets, plan


def one_is_late(rank, late):
    """``late`` comes when the others have given up: to finalize, then to initialize."""
    targets, plan = _stand_in(rank)

    def wait():
        if rank.index == late:
            time.sleep(8)

    heaps.FINALIZE_TIMEOUT_S = 2.0
    session, _, made = heaps.create(plan, "cuda")
    wait()
    heaps.destroy(session, made)
    kept = session not in targets.destroyed
    heaps.Rendezvous = functools.partial(Rendezvous, timeout_s=2.5)
    wait()
    failures = []
    for _ in range(10):
        try:
            heaps.create(plan, "cuda")
            break
        except RuntimeError as error:
            failures.append(str(error))
    else:
        raise AssertionError(failures)
    return {"kept": kept, "failures": failures}


def one_dies(rank, victim):
    """Two groups, one after the other; ``victim`` is killed in the second."""
    targets, plan = _stand_in(rank)
    session, reasons, made = heaps.create(plan, "cuda")
    assert "cuda" not in reasons, reasons
    heaps.destroy(session, made)
    orderly = targets.closed
    session, _, made = heaps.create(plan, "cuda")
    if rank.index == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    end = time.monotonic() + 20
    while not targets.closed and time.monotonic() < end:
        time.sleep(0.02)
    start = time.monotonic()
    heaps.destroy(session, made)
    seconds = time.monotonic() - start
    return {"orderly": orderly, "closed": targets.closed, "seconds": seconds}
