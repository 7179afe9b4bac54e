# SPDX-License-Identifier: Apache-2.0
"""Groups without devices: what a program would lower to on GPUs."""

import contextlib
import math
from collections.abc import Generator, Sequence
from typing import cast

from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh

from jax_ulysses import group, heaps
from jax_ulysses._typing import AxisName
from jax_ulysses.sharding import axis_tuple


def abstract_gpu_mesh(
    axis_sizes: Sequence[int], axis_names: Sequence[str]
) -> AbstractMesh:
    """A mesh of H200 GPUs that are not there, to trace and lower programs for."""
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    return AbstractMesh(
        tuple(axis_sizes),
        tuple(axis_names),
        axis_types=(AxisType.Explicit,) * len(axis_sizes),
        abstract_device=device,
    )


@contextlib.contextmanager
def dry_group(
    mesh: AbstractMesh | Mesh,
    axis_name: AxisName = "cp",
    *,
    workspace_bytes: int = group.DEFAULT_WORKSPACE_BYTES["cuda"],
    sm_budget: int | None = None,
) -> Generator[None]:
    """Stands in for ``initialize`` while programs are traced for GPUs.

    Selection then takes ``cuda`` for what its kernels can do, and the program can
    be lowered with ``lowering_platforms=("cuda",)``, or compiled for devices that
    only describe a machine, but not run.

    Args:
      mesh: abstract mesh, as from ``abstract_gpu_mesh``, or one of the devices of a
        ``jax.experimental.topologies`` description.
      axis_name: context-parallel mesh axis, or a tuple of axes, major first.
      workspace_bytes: as in ``initialize``.
      sm_budget: as in ``initialize``.

    Yields:
      Nothing.

    Raises:
      RuntimeError: a group along this axis exists.
    """
    axes = axis_tuple(axis_name)
    stand_in = cast(Mesh, mesh)  # Nobody asks it for devices.
    num_ranks = math.prod(mesh.shape[a] for a in axes)
    plan = heaps.Plan(
        mesh=stand_in,
        axes=axes,
        num_ranks=num_ranks,
        members=[],
        slot_bytes=workspace_bytes // group.NUM_SLOTS,
        num_slots=group.NUM_SLOTS,
        deadline_ms=0,
        sm_budget=sm_budget or 0,
    )
    report = group.GroupReport(
        axis_name=axes,
        num_ranks=num_ranks,
        num_groups=mesh.size // num_ranks,
        platform="cuda",
        workspace_bytes=workspace_bytes,
        unavailable={},
    )
    # No session has id 0, so a program that is run after all is refused.
    dry = group.Group(0, stand_in, report, (mesh, "dry"), plan)
    with group.registered(axes, dry):
        yield
