# SPDX-License-Identifier: Apache-2.0
"""Peer groups: which devices exchange with each other, and their symmetric heaps.

``initialize`` is called once, outside ``jit``. It makes one group of P ranks for
every line of the mesh along the axis. Implementations that need no peers (``xla``)
work without it.
"""

import contextlib
import dataclasses
import logging
import math
import threading
from collections.abc import Generator

import jax
from jax.sharding import Mesh

from jax_ulysses import heaps, sharding
from jax_ulysses._typing import AxisName
from jax_ulysses.config import config
from jax_ulysses.report import GroupReport as GroupReport
from jax_ulysses.report import describe, describe_arguments
from jax_ulysses.sharding import axis_tuple, describe_axes

# Two slots let a rank fill one while its peers still read the other.
NUM_SLOTS = 2
# By platform. On a GPU the heap holds the payloads of real models.
DEFAULT_WORKSPACE_BYTES = {"cpu": 64 << 20, "cuda": 512 << 20}


@dataclasses.dataclass(frozen=True)
class Group:
    """An initialised group, as traced calls find it.

    Attributes:
      session: id by which native handlers find the heap, or None without a heap.
      mesh: the mesh it was made for.
      report: what ``initialize`` returned.
      arguments: what it was asked for, to recognise a repeated call.
      plan: sizes of the heaps.
    """

    session: int | None
    mesh: Mesh
    report: GroupReport
    arguments: tuple
    plan: heaps.Plan


_logger = logging.getLogger("jax_ulysses")
_groups: dict[tuple[str, ...], Group] = {}
_lock = threading.Lock()


def initialize(
    mesh: Mesh,
    axis_name: AxisName = "cp",
    workspace_bytes: int | None = None,
    *,
    sm_budget: int | None = None,
) -> GroupReport:
    """Forms the peer groups of a mesh along an axis and allocates their heaps.

    Either every rank succeeds or every rank raises. A second call with the same
    arguments does nothing; groups along different axes live side by side. Where a
    mesh spans several processes, each of them must call it, with equal arguments.

    Args:
      mesh: concrete mesh. A rank is the position of a device on the mesh axis, in
        whatever order the mesh lists its devices.
      axis_name: context-parallel mesh axis, or a tuple of axes, major first.
      workspace_bytes: size of the heap on each device, for exchanges in flight;
        None for 64 MiB on CPUs and 512 MiB on GPUs. A call that needs more is
        refused with the size that it needs. On GPUs it must fit beside the
        memory that XLA takes when it starts (XLA_PYTHON_CLIENT_MEM_FRACTION).
      sm_budget: multiprocessors of each GPU that a call may take, 2 at least for a
        fused one; None for all or, where ranks share a GPU, so many that each finds
        room while the others wait: 62, 24, 10 of 132 for 2, 4, 8 ranks.

    Returns:
      What was set up, and for each implementation that this mesh cannot serve, why.

    Raises:
      TypeError: not a mesh.
      ValueError: the axis is not in the mesh, or a size that is not positive.
      RuntimeError: already initialised along this axis with other arguments (or
        another ``deadline_s`` or ``comm_ctas`` of ``settings``), or a rank could not
        set up its heap; the text names the rank and the reason.
    """
    if not isinstance(mesh, Mesh):
        raise TypeError(f"initialize: mesh must be a jax.sharding.Mesh, not {mesh!r}.")
    axes = axis_tuple(axis_name)
    missing = [a for a in axes if a not in mesh.shape]
    if missing:
        raise ValueError(
            f"initialize: axis_name {describe_axes(axes)} is not in the mesh, whose "
            f"axes are {dict(mesh.shape)}."
        )
    if workspace_bytes is None:
        platform = sharding.platform_name(mesh.devices.flat[0].platform)
        workspace_bytes = DEFAULT_WORKSPACE_BYTES.get(platform, 64 << 20)
    if workspace_bytes < NUM_SLOTS:
        raise ValueError(
            f"workspace_bytes={workspace_bytes} must be {NUM_SLOTS} at least, for as "
            "many slots."
        )
    if sm_budget is not None and sm_budget < 1:
        raise ValueError(f"sm_budget={sm_budget} must be None or at least 1.")
    arguments = (
        mesh,
        workspace_bytes,
        config.deadline_s,
        sm_budget,
        config.comm_ctas,
    )
    with _lock:
        group = _groups.get(axes)
        if group is not None:
            if group.arguments == arguments:
                return group.report
            raise RuntimeError(
                f"jax_ulysses is initialised along {describe_axes(axes)} with other "
                f"arguments already: {describe_arguments(group.arguments)}, now "
                f"{describe_arguments(arguments)}. Call jax_ulysses.finalize() first."
            )
        group = _create(mesh, axes, workspace_bytes, sm_budget, arguments)
        _groups[axes] = group
    return group.report


def finalize() -> None:
    """Frees all groups and heaps. ``initialize`` may then be called anew.

    Where a mesh spans several processes, each of them must call it. The heap stays
    allocated, with a warning, if one that lives has not come after 20 seconds. On CPUs
    a program that was compiled before runs again after a new ``initialize`` on its
    mesh. On GPUs such programs are dropped from JAX's caches, since a CUDA graph inside
    of one would go on to use the freed heap, and compile anew; one that you compiled
    ahead of time must not be run after this.
    """
    # All of it, even if one group cannot be freed as it should.
    with _lock, contextlib.ExitStack() as undo:
        if any(group.report.platform == "cuda" for group in _groups.values()):
            undo.callback(jax.clear_caches)
        while _groups:
            _, group = _groups.popitem()
            if group.session is not None:
                undo.callback(heaps.destroy, group.session, group.plan)


@contextlib.contextmanager
def registered(axes: tuple[str, ...], group: Group) -> Generator[None]:
    """Puts a group that was made elsewhere in place inside a ``with`` block.

    Raises:
      RuntimeError: there is one along these axes.
    """
    with _lock:
        if axes in _groups:
            raise RuntimeError(
                f"a group along {describe_axes(axes)} exists: call "
                "jax_ulysses.finalize() first"
            )
        _groups[axes] = group
    try:
        yield
    finally:
        with _lock:
            del _groups[axes]


def find(axes: tuple[str, ...]) -> Group:
    """The group that a traced call on these axes belongs to.

    Raises:
      NotImplementedError: none, or made for a mesh of another shape.
    """
    group = _groups.get(axes)
    if group is None:
        raise NotImplementedError(
            f"no peer group along axis {describe_axes(axes)}: call "
            f"jax_ulysses.initialize(mesh, axis_name={describe_axes(axes)}) before, "
            "outside jit"
        )
    here = jax.sharding.get_abstract_mesh()
    if not here.empty and dict(here.shape) != dict(group.mesh.shape):
        raise NotImplementedError(
            f"the peer group along {describe_axes(axes)} was made for mesh "
            f"{dict(group.mesh.shape)}, this call runs on {dict(here.shape)}"
        )
    return group


def handler_calls() -> int:
    """Calls of all groups' handlers in this process; replays of graphs make none."""
    sessions = [g.session for g in _groups.values() if g.session is not None]
    return sum(heaps.calls(session) for session in sessions)


def within(axes: frozenset[str]) -> list[Group]:
    """Groups with a heap whose axes are among these, largest first, each axis once.

    Those made for a mesh of another shape are left out, as in ``find``.
    """
    found = []
    for names in sorted(_groups, key=len, reverse=True):
        if not axes.issuperset(names):
            continue
        try:
            group = find(names)
        except NotImplementedError:
            continue
        if group.session is not None:
            found.append(group)
            axes = axes.difference(names)
    return found


def _create(mesh, axes, workspace_bytes, sm_budget, arguments) -> Group:
    num_ranks = math.prod(mesh.shape[a] for a in axes)
    platform = sharding.platform_name(mesh.devices.flat[0].platform)
    plan = heaps.Plan(
        mesh=mesh,
        axes=axes,
        num_ranks=num_ranks,
        members=sharding.members(mesh, axes),
        slot_bytes=workspace_bytes // NUM_SLOTS,
        num_slots=NUM_SLOTS,
        # Up: 0 would be no deadline.
        deadline_ms=math.ceil(config.deadline_s * 1000),
        sm_budget=sm_budget or 0,
        comm_ctas=config.comm_ctas,
    )
    session, unavailable, plan = heaps.create(plan, platform)
    report = GroupReport(
        axis_name=axes,
        num_ranks=num_ranks,
        num_groups=mesh.size // num_ranks,
        platform=platform,
        workspace_bytes=workspace_bytes if session is not None else 0,
        unavailable=unavailable,
        num_slots=plan.num_slots,
        heap_bytes=0 if session is None else heaps.size(session),
        ranks_per_device=plan.ranks_per_device,
        sm_budget=plan.sm_budget or None,
    )
    _logger.info("%s", describe(report))
    return Group(session, mesh, report, arguments, plan)
