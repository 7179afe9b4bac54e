# SPDX-License-Identifier: Apache-2.0
"""Whether the other processes of a group still live.

Heaps are shared within one host, so its process table knows. A kernel only learns that
a peer does not come, and only when its deadline has passed.
"""

import dataclasses
import os
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Process:
    """A process that holds ranks of a group.

    Attributes:
      pid: its id.
      started: clock ticks from the start of the host to its own, which tells it from a
        later process with the same id.
      namespace: of process ids; elsewhere ``pid`` means nothing.
      index: JAX's, ``jax.process_index()``.
      ranks: that it holds.
    """

    pid: int
    started: int
    namespace: str
    index: int
    ranks: Sequence[int]

    @property
    def ended(self) -> bool:
        """It has, even if its parent has not been told yet."""
        try:
            state, started = _stat(self.pid)
        except (FileNotFoundError, ProcessLookupError):
            return True
        except OSError:
            return False
        return state in "ZX" or started != self.started

    @property
    def description(self) -> str:
        """Its ranks and id."""
        ranks = ", ".join(map(str, self.ranks))
        return f"rank{'s' * (len(self.ranks) > 1)} {ranks} (process {self.pid})"


def find(pid: int, index: int, ranks: Sequence[int]) -> Process | None:
    """A process of this host; None where there is no ``/proc`` to ask."""
    try:
        _, started = _stat(pid)
        namespace = os.readlink("/proc/self/ns/pid")
    except (OSError, ValueError):
        return None
    return Process(pid, started, namespace, index, tuple(ranks))


def others(me: Process | None, found: Sequence[dict | None]) -> list[Process]:
    """Those that ``me`` can look after, of what ``find`` found in each process."""
    processes = [Process(**fields) for fields in found if fields is not None]
    if me is None:
        return []
    return [p for p in processes if p.namespace == me.namespace and p.pid != me.pid]


def _stat(pid: int) -> tuple[str, int]:
    """State and start: fields 3 and 22 of proc_pid_stat(5)."""
    with open(f"/proc/{pid}/stat") as file:
        # The second field is the program's name, which may contain anything.
        fields = file.read().rpartition(")")[2].split()
    return fields[0], int(fields[19])
