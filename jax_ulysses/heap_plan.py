# SPDX-License-Identifier: Apache-2.0
"""What the symmetric heaps of a group are to be."""

import dataclasses

from jax.sharding import Mesh


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
