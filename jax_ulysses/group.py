# SPDX-License-Identifier: Apache-2.0
"""Peer groups: which devices exchange with each other, and their symmetric heaps.

``initialize`` is called once, outside ``jit``. It makes one group of P ranks for
every line of the mesh along the axis. Implementations that need no peers (``xla``)
work without it.
"""

import dataclasses
import itertools
import math
import threading

import jax
from jax.sharding import Mesh

from jax_ulysses._typing import AxisName
from jax_ulysses.config import config
from jax_ulysses.sharding import axis_tuple, describe_axes

# Two slots let a rank fill one while its peers still read the other.
NUM_SLOTS = 2
DEFAULT_WORKSPACE_BYTES = 64 << 20


@dataclasses.dataclass(frozen=True)
class GroupReport:
    """What ``initialize`` set up.

    Attributes:
      axis_name: mesh axes of the group, major first.
      num_ranks: P.
      num_groups: lines of the mesh along the axis, each a group of its own.
      platform: of the mesh's devices, such as "cpu".
      workspace_bytes: size of the symmetric heap's slots on each device; 0 without
        a heap.
      unavailable: implementation -> reason why this group cannot serve it. What is
        not in it is ready.
    """

    axis_name: tuple[str, ...]
    num_ranks: int
    num_groups: int
    platform: str
    workspace_bytes: int
    unavailable: dict[str, str]


@dataclasses.dataclass(frozen=True)
class Group:
    """An initialised group, as traced calls find it.

    Attributes:
      session: id by which native handlers find the heap, or None without a heap.
      mesh: the mesh it was made for.
      report: what ``initialize`` returned.
      arguments: what it was asked for, to recognise a repeated call.
    """

    session: int | None
    mesh: Mesh
    report: GroupReport
    arguments: tuple


_groups: dict[tuple[str, ...], Group] = {}
_lock = threading.Lock()
_sessions = itertools.count(1)


def initialize(
    mesh: Mesh,
    axis_name: AxisName = "cp",
    workspace_bytes: int | None = None,
) -> GroupReport:
    """Forms the peer groups of a mesh along an axis and allocates their heaps.

    Either every rank succeeds or every rank raises. A second call with the same
    arguments does nothing; groups along different axes live side by side.

    Args:
      mesh: concrete mesh. A rank is the position of a device on the mesh axis, in
        whatever order the mesh lists its devices.
      axis_name: context-parallel mesh axis, or a tuple of axes, major first.
      workspace_bytes: size of the heap on each device, for exchanges in flight;
        None for 64 MiB. A call that needs more ends with an error that names the
        size.

    Returns:
      What was set up, and for each implementation that this mesh cannot serve, why.

    Raises:
      ValueError: the axis is not in the mesh, or a size that is not positive.
      RuntimeError: already initialised along this axis with other arguments.
    """
    axes = axis_tuple(axis_name)
    missing = [a for a in axes if a not in mesh.shape]
    if missing:
        raise ValueError(
            f"initialize: axis_name {describe_axes(axes)} is not in the mesh, whose "
            f"axes are {dict(mesh.shape)}."
        )
    if workspace_bytes is None:
        workspace_bytes = DEFAULT_WORKSPACE_BYTES
    if workspace_bytes < NUM_SLOTS:
        raise ValueError(f"workspace_bytes={workspace_bytes} must be positive.")
    arguments = (mesh, workspace_bytes, config.deadline_s)
    with _lock:
        group = _groups.get(axes)
        if group is not None:
            if group.arguments == arguments:
                return group.report
            raise RuntimeError(
                f"jax_ulysses is initialised along {describe_axes(axes)} with other "
                f"arguments already: {_describe(group.arguments)}, now "
                f"{_describe(arguments)}. Call jax_ulysses.finalize() first."
            )
        _groups[axes] = group = _create(mesh, axes, workspace_bytes, arguments)
    return group.report


def finalize() -> None:
    """Frees all groups and heaps. ``initialize`` may then be called anew.

    Programs compiled before stay valid only for a group with the same arguments.
    """
    with _lock:
        while _groups:
            _, group = _groups.popitem()
            if group.session is not None:
                _targets().group_destroy(group.session)


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


def members(mesh: Mesh, axes: tuple[str, ...]) -> list[tuple[int, int, int]]:
    """Where each device of this process stands.

    Args:
      mesh: concrete mesh.
      axes: group axes, major first.

    Returns:
      (local device ordinal, line, rank) for each device of this process: devices
      of one line exchange with each other, ordered by rank.
    """
    names = list(mesh.axis_names)
    others = [n for n in names if n not in axes]
    order = [names.index(n) for n in (*others, *axes)]
    num_ranks = math.prod(mesh.shape[a] for a in axes)
    lines = mesh.devices.transpose(order).reshape(-1, num_ranks)
    return [
        (device.local_hardware_id, line, rank)
        for line, row in enumerate(lines)
        for rank, device in enumerate(row)
        if device.process_index == jax.process_index()
    ]


def _create(mesh, axes, workspace_bytes, arguments) -> Group:
    table = members(mesh, axes)
    num_ranks = math.prod(mesh.shape[a] for a in axes)
    platform = mesh.devices.flat[0].platform
    unavailable = {"cuda": "this version contains no CUDA kernels"}
    session = None
    if platform != "cpu":
        unavailable["host"] = f"runs on CPU devices only, this mesh has {platform}"
    elif len(table) != mesh.size:
        unavailable["host"] = (
            f"needs all devices in one process, but {mesh.size - len(table)} of "
            f"{mesh.size} belong to others"
        )
    else:
        try:
            targets = _targets()
        except ImportError as error:
            unavailable["host"] = f"the extension module is not built ({error})"
        else:
            session = next(_sessions)
            targets.group_create(
                session=session,
                num_ranks=num_ranks,
                members=table,
                slot_bytes=workspace_bytes // NUM_SLOTS,
                num_slots=NUM_SLOTS,
                deadline_ms=round(config.deadline_s * 1000),
                platform=platform,
            )
    report = GroupReport(
        axis_name=axes,
        num_ranks=num_ranks,
        num_groups=mesh.size // num_ranks,
        platform=platform,
        workspace_bytes=workspace_bytes if session is not None else 0,
        unavailable=unavailable,
    )
    return Group(session, mesh, report, arguments)


def _targets():
    # Imported late, so that the package works without its extension module.
    from jax_ulysses.ffi import targets

    return targets


def _describe(arguments) -> str:
    mesh, workspace_bytes, deadline_s = arguments
    return (
        f"mesh {dict(mesh.shape)} of devices {[d.id for d in mesh.devices.flat]}, "
        f"workspace_bytes={workspace_bytes}, deadline_s={deadline_s}"
    )
