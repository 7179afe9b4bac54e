# SPDX-License-Identifier: Apache-2.0
"""Logs a fault of a group as soon as a kernel reports it, or a process has died.

The call that meets a fault ends with NaN in its outputs, and the next call of the
group raises. In between the program may run on for a long time, so a thread looks
into the groups' mailboxes and logs what it finds. Where a process of the group has
ended it closes the group, so that the next call raises, too, and does not wait for
its deadline.
"""

import dataclasses
import logging
import threading
from collections.abc import Callable, Sequence

from jax_ulysses.liveness import Process

_logger = logging.getLogger("jax_ulysses")

PERIOD_S = 0.1


@dataclasses.dataclass
class _Watched:
    info: Callable[[int], dict]
    fail: Callable[[int, str], None]
    processes: list[Process]
    ended: list[Process] = dataclasses.field(default_factory=list)
    said: set[str] = dataclasses.field(default_factory=set)


class Watchdog:
    """One daemon thread for all groups, alive while there is one to watch."""

    def __init__(self):
        self._sessions: dict[int, _Watched] = {}
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(
        self,
        session: int,
        info: Callable[[int], dict],
        fail: Callable[[int, str], None],
        processes: Sequence[Process] = (),
    ) -> None:
        """Starts to look after a session.

        Args:
          session: its id.
          info: the extension module's description of a session, which looks into
            the mailboxes.
          fail: closes a session with a text, for a process that has ended.
          processes: the others of the group, as far as this one can see them.
        """
        with self._lock:
            self._sessions[session] = _Watched(info, fail, list(processes))
            if self._thread is None:
                self._wake.clear()
                self._thread = threading.Thread(
                    target=self._run, name="jax_ulysses-watchdog", daemon=True
                )
                self._thread.start()

    def forget(self, session: int) -> list[Process]:
        """Logs what is still unsaid about a session and stops looking after it.

        Returns:
          Its other processes, those that have ended among them.
        """
        processes = []
        with self._lock:
            if session in self._sessions:
                self._look(session)
                watched = self._sessions.pop(session)
                processes = watched.processes + watched.ended
            thread = self._thread if not self._sessions else None
            if thread is not None:
                self._thread = None
                self._wake.set()
        if thread is not None:
            thread.join()
        return processes

    def _run(self) -> None:
        while not self._wake.wait(PERIOD_S):
            with self._lock:
                for session in self._sessions:
                    self._look(session)

    def _look(self, session: int) -> None:
        watched = self._sessions[session]
        self._log_faults(session)
        for process in [p for p in watched.processes if p.ended]:
            watched.processes.remove(process)
            watched.ended.append(process)
            text = f"{process.description} ended without jax_ulysses.finalize()."
            # A warning: this process may not call the group again.
            _logger.warning("%s Calls of its group can only fail from now on.", text)
            watched.fail(session, f"jax_ulysses: {text}")
            closed = watched.info(session)["closed"]
            watched.said.update(line for line in closed if text in line)
            # A kernel may have closed the group first.
            self._log_faults(session)

    def _log_faults(self, session: int) -> None:
        watched = self._sessions[session]
        for text in watched.info(session)["closed"]:
            if text and text not in watched.said:
                watched.said.add(text)
                _logger.error("%s", text)
