# SPDX-License-Identifier: Apache-2.0
"""Makes and frees the native side of a group: sessions and their symmetric heaps."""

import base64
import collections
import dataclasses
import itertools
import logging
import os

import jax
from jax.sharding import Mesh

from jax_ulysses import liveness, sm_budget
from jax_ulysses.rendezvous import PeerFailure, Rendezvous, agree
from jax_ulysses.watchdog import Watchdog

_logger = logging.getLogger("jax_ulysses")

# How long finalize waits for the other processes before it frees its own heaps. One
# that has died, unnoticed, never comes.
FINALIZE_TIMEOUT_S = 20.0


@dataclasses.dataclass(frozen=True)
class Plan:
    """What the heaps of a group are to be.

    Attributes:
      mesh: concrete mesh.
      axes: group axes, major first.
      num_ranks: P.
      members: (local device ordinal, line, rank) of this process's devices.
      slot_bytes: of each slot of each heap.
      num_slots: slots of each heap.
      deadline_ms: of every wait; 0 for none.
      sm_budget: multiprocessors that a call may take; 0 for all.
      comm_ctas: of these, how many communicate in a fused call; 0 lets it choose.
      ranks_per_device: most ranks of the mesh that one physical device holds.
    """

    mesh: Mesh
    axes: tuple[str, ...]
    num_ranks: int
    members: list[tuple[int, int, int]]
    slot_bytes: int
    num_slots: int
    deadline_ms: int
    sm_budget: int
    comm_ctas: int = 0
    ranks_per_device: int = 1

    def options(self) -> dict:
        """Arguments of the extension module."""
        return dict(
            num_ranks=self.num_ranks,
            members=self.members,
            slot_bytes=self.slot_bytes,
            num_slots=self.num_slots,
            deadline_ms=self.deadline_ms,
        )

    def summary(self) -> list:
        """What all processes must have asked for alike."""
        return [
            list(self.axes),
            self.num_ranks,
            self.slot_bytes,
            self.num_slots,
            self.deadline_ms,
            self.sm_budget,
            self.comm_ctas,
        ]


_sessions = itertools.count(1)
# The id is part of compiled programs, which thus outlive finalize and initialize. On
# GPUs they must not: a CUDA graph in them would use the freed heap.
_host_sessions: dict[tuple[Mesh, tuple[str, ...]], int] = {}
_watchdog = Watchdog()


def create(plan: Plan, platform: str) -> tuple[int | None, dict[str, str], Plan]:
    """Makes the heaps that a mesh of this platform can have.

    Returns:
      The session, or None without a heap; implementation -> reason for each that
      this mesh cannot serve; and the plan with what was found out about devices.

    Raises:
      RuntimeError: the mesh could, but something failed here or in another process.
    """
    if platform == "cpu":
        reason, session = _create_host(plan)
        on_cpu = "runs on CUDA devices only, this mesh has cpu"
        return session, _reasons(host=reason, cuda=on_cpu), plan
    on_device = f"runs on CPU devices only, this mesh has {platform}"
    if platform != "cuda":
        other = f"runs on CUDA devices only, this mesh has {platform}"
        return None, _reasons(host=on_device, cuda=other), plan
    reason, session, plan = _create_cuda(plan)
    return session, _reasons(host=on_device, cuda=reason), plan


def _share_devices(plan: Plan, uuids: list[str]) -> Plan:
    """Gives ranks that share a physical device their part of its processors."""
    sharing = max(collections.Counter(uuids).values())
    budget = plan.sm_budget
    if sharing > 1 and not budget:
        budget = sm_budget.shared(plan.mesh.local_devices[0].core_count, sharing)
    return dataclasses.replace(plan, ranks_per_device=sharing, sm_budget=budget)


def size(session: int) -> int:
    """Bytes of a session's heap on each device."""
    return _targets().group_info(session)["heap_bytes"]


def calls(session: int) -> int:
    """Calls of a session's handlers in this process."""
    return _targets().group_info(session)["calls"]


def destroy(session: int, plan: Plan) -> None:
    """Ends a session's calls, waits for the other processes, and frees the heaps."""
    targets = _targets()
    if targets.group_info(session)["platform"] == "cpu":
        targets.group_destroy(session)
        return
    ended = [process.index for process in _watchdog.forget(session)]
    # Nobody may free a heap while another process still maps it.
    targets.group_close(session)
    rendezvous = Rendezvous(plan.mesh, f"finalize {plan.axes}")
    if not rendezvous.wait(FINALIZE_TIMEOUT_S, without=ended):
        _logger.warning(
            "jax_ulysses.finalize: not all processes of the mesh came within %g s; "
            "this one frees its heaps now",
            FINALIZE_TIMEOUT_S,
        )
    targets.group_destroy(session)


def _reasons(**reasons: str | None) -> dict[str, str]:
    return {name: reason for name, reason in reasons.items() if reason is not None}


def _create_host(plan: Plan) -> tuple[str | None, int | None]:
    away = plan.mesh.size - len(plan.members)
    if away:
        return (
            f"needs all devices in one process, but {away} of {plan.mesh.size} "
            "belong to others",
            None,
        )
    try:
        targets = _targets()
    except ImportError as error:
        return f"the extension module is not built ({error})", None
    key = (plan.mesh, plan.axes)
    session = _host_sessions.get(key) or next(_sessions)
    targets.group_create(session=session, platform="cpu", **plan.options())
    _host_sessions[key] = session
    return None, session


def _create_cuda(plan: Plan) -> tuple[str | None, int | None, Plan]:
    """Two steps, each of which succeeds in all processes or in none."""
    if not plan.members:
        return "this process has no device in the mesh", None, plan
    rendezvous = Rendezvous(plan.mesh, f"initialize {plan.axes}")
    processes = rendezvous.processes
    ranks = sorted({rank for _, _, rank in plan.members})
    me = liveness.find(os.getpid(), jax.process_index(), ranks)
    prepared = None
    connecting = False

    def offer():
        _require_kernels()
        uuid_of = _targets().device_uuid
        assert uuid_of is not None, "a build with kernels has it"
        devices = [uuid_of(ordinal) for ordinal, _, _ in plan.members]
        return {
            "plan": plan.summary(),
            "session": next(_sessions),
            "devices": devices,
            "process": me and dataclasses.asdict(me),
        }

    def prepare():
        nonlocal prepared
        blob = _targets().group_prepare(
            session=session,
            platform="cuda",
            num_lines=plan.mesh.size // plan.num_ranks,
            sm_budget=plan.sm_budget,
            comm_ctas=plan.comm_ctas,
            **plan.options(),
        )
        prepared = session
        return base64.b64encode(blob).decode()

    def connect():
        _targets().group_connect(session, [base64.b64decode(b) for b in blobs])

    try:
        offers = rendezvous.exchange(offer)
        agree([o["plan"] for o in offers], processes, "what initialize was asked for")
        plan = _share_devices(plan, [d for o in offers for d in o["devices"]])
        # The id is part of the compiled program, which must be the same everywhere.
        session = max(o["session"] for o in offers)
        while next(_sessions) < session:
            pass
        blobs = rendezvous.exchange(prepare)
        connecting = True
        rendezvous.exchange(connect)
    except (PeerFailure, RuntimeError) as error:
        if prepared is not None:
            _targets().group_close(prepared)
            if connecting:
                rendezvous.wait(FINALIZE_TIMEOUT_S)
            _targets().group_destroy(prepared)
        if isinstance(error, PeerFailure):
            if error.unavailable:
                return str(error), None, plan
            raise RuntimeError(f"jax_ulysses.initialize: {error}") from error.__cause__
        raise
    others = liveness.others(me, [o["process"] for o in offers])
    _watchdog.watch(session, _targets().group_info, _targets().group_fail, others)
    return None, session, plan


def _require_kernels() -> None:
    try:
        targets = _targets()
    except ImportError as error:
        raise NotImplementedError(
            f"the extension module is not built ({error})"
        ) from error
    if "cuda" not in targets.build_info()["platforms"]:
        raise NotImplementedError("this build contains no CUDA kernels")


def _targets():
    # Imported late, so that the package works without its extension module.
    from jax_ulysses.ffi import targets

    return targets
