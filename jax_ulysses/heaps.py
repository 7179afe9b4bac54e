# SPDX-License-Identifier: Apache-2.0
"""Makes and frees the native side of a group: sessions and their symmetric heaps."""

import base64
import collections
import dataclasses
import itertools
import logging
import os
from collections.abc import Callable, Sequence

import jax

from jax_ulysses import liveness, sm_budget
from jax_ulysses.heap_plan import Plan as Plan
from jax_ulysses.liveness import Process
from jax_ulysses.rendezvous import PeerFailure, Rendezvous, agree
from jax_ulysses.watchdog import Watchdog

_logger = logging.getLogger("jax_ulysses")

# How long finalize waits for the other processes, none of which may still use its heaps
# when it frees them.
FINALIZE_TIMEOUT_S = 20.0


_sessions = itertools.count(1)
# The id is part of compiled programs, which thus outlive finalize and initialize. On
# GPUs they must not: a CUDA graph in them would use the freed heap. By axes only, as
# JAX's traces of what is inside of a program do not know the devices of the mesh.
_host_sessions: dict[tuple[str, ...], int] = {}
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
    others = _watchdog.forget(session)
    targets.group_close(session)
    _free(session, plan, others, lambda: Rendezvous(plan.mesh, f"finalize {plan.axes}"))


def _free(
    session: int,
    plan: Plan,
    others: Sequence[Process],
    meet: Callable[[], Rendezvous],
) -> None:
    """Frees the heaps of a closed session, unless another process may still use them.

    Such a process lives and has not closed its side. A kernel of it would write into
    memory that belongs to somebody else by then.
    """

    def ended() -> set[int]:
        return {process.index for process in others if process.ended}

    try:
        absent = meet().wait(FINALIZE_TIMEOUT_S, without=ended())
        why = f"did not come within {FINALIZE_TIMEOUT_S:g} s"
    except RuntimeError as error:
        processes = {d.process_index for d in plan.mesh.devices.flat}
        absent = sorted(processes - {jax.process_index()})
        why = f"cannot be asked ({error})"
    absent = [process for process in absent if process not in ended()]
    if not absent:
        _targets().group_destroy(session)
        return
    _logger.warning(
        "jax_ulysses: of the processes of the mesh, %s %s and may still write to the "
        "heaps of this one. They stay allocated until it ends, %d bytes on each "
        "of its devices.",
        absent,
        why,
        size(session),
    )


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
    session = _host_sessions.get(plan.axes) or next(_sessions)
    targets.group_create(session=session, platform="cpu", **plan.options())
    _host_sessions[plan.axes] = session
    return None, session


def _create_cuda(plan: Plan) -> tuple[str | None, int | None, Plan]:
    """Two steps, each of which succeeds in all processes or in none."""
    if not plan.members:
        return "this process has no device in the mesh", None, plan
    rendezvous = Rendezvous(plan.mesh, f"initialize {plan.axes}")
    processes = rendezvous.processes
    ranks = sorted({rank for _, _, rank in plan.members})
    me = liveness.find(os.getpid(), jax.process_index(), ranks)
    others: list[Process] = []
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
        others = liveness.others(me, [o["process"] for o in offers])
        plan = _share_devices(plan, [d for o in offers for d in o["devices"]])
        # The id is part of the compiled program, which must be the same everywhere.
        session = max(o["session"] for o in offers)
        while next(_sessions) < session:
            pass
        blobs = rendezvous.exchange(prepare)
        connecting = True
        rendezvous.exchange(connect)
    except BaseException as error:
        if prepared is not None:
            _targets().group_close(prepared)
            if connecting:
                _free(prepared, plan, others, lambda: rendezvous)
            else:
                _targets().group_destroy(prepared)
        if isinstance(error, PeerFailure):
            if error.unavailable:
                return str(error), None, plan
            raise RuntimeError(f"jax_ulysses.initialize: {error}") from error.__cause__
        raise
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
