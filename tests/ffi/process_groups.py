# SPDX-License-Identifier: Apache-2.0
"""What each process of a group does, with a stand-in for the kernels: needs no GPU."""

import os
import signal
import time

from jax_ulysses import heaps


class StandIn:
    """The part of ``jax_ulysses.ffi.targets`` that makes and frees groups on GPUs."""

    def __init__(self, index: int):
        self._index = index
        self.closed = ""

    def build_info(self):
        return {"platforms": ["cuda"]}

    def device_uuid(self, ordinal):
        return f"{self._index}-{ordinal}"

    def group_prepare(self, **_):
        return b"records"

    def group_connect(self, session, blobs):
        assert len(blobs) == 3

    def group_info(self, session):
        return {"platform": "cuda", "closed": [self.closed]}

    def group_fail(self, session, text):
        self.closed = text

    def group_close(self, session):
        pass

    def group_destroy(self, session):
        pass


def one_dies(rank, victim):
    """Two groups, one after the other; ``victim`` is killed in the second."""
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
