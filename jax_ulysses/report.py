# SPDX-License-Identifier: Apache-2.0
"""What ``initialize`` reports of a group, as data and as a line of text."""

import dataclasses

from jax_ulysses.sharding import describe_axes


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
      heap_bytes: all of the symmetric heap on each device: the slots, and control
        words (flags and epochs of the protocol).
      num_slots: parts into which the workspace is cut.
      ranks_per_device: most ranks of the mesh that one physical GPU holds.
      sm_budget: multiprocessors of each GPU that a call may take; None for all.
    """

    axis_name: tuple[str, ...]
    num_ranks: int
    num_groups: int
    platform: str
    workspace_bytes: int
    unavailable: dict[str, str]
    heap_bytes: int = 0
    num_slots: int = 2
    ranks_per_device: int = 1
    sm_budget: int | None = None


def describe(report: GroupReport) -> str:
    """One line on what ``initialize`` set up, with the heap's parts in MiB."""
    where = f"group along {describe_axes(report.axis_name)}: P={report.num_ranks}"
    if report.num_groups > 1:
        where += f", {report.num_groups} lines"
    if report.ranks_per_device > 1:
        where += f", {report.ranks_per_device} ranks on a GPU"
    if report.sm_budget:
        where += f", {report.sm_budget} multiprocessors a rank"
    if not report.heap_bytes:
        reasons = "; ".join(f"no {n}: {why}" for n, why in report.unavailable.items())
        return f"{where}; no heap ({reasons})"
    slot = report.workspace_bytes / report.num_slots
    flags = report.heap_bytes - report.workspace_bytes
    return (
        f"{where}; heap of {_mib(report.heap_bytes)} on each device: "
        f"{report.num_slots} slots of {_mib(slot)} for data, {_mib(flags)} of flags"
    )


def _mib(size: float) -> str:
    return f"{size / 2**20:.1f} MiB"


def describe_arguments(arguments: tuple) -> str:
    """What ``initialize`` was asked for, in words."""
    mesh, workspace_bytes, deadline_s, sm_budget, comm_ctas = arguments
    return (
        f"mesh {dict(mesh.shape)} of devices {[d.id for d in mesh.devices.flat]}, "
        f"workspace_bytes={workspace_bytes}, deadline_s={deadline_s}, "
        f"sm_budget={sm_budget}, comm_ctas={comm_ctas}"
    )
