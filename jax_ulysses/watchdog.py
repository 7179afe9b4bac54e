# SPDX-License-Identifier: Apache-2.0
"""Logs a fault of a group as soon as a kernel reports it.

The call that meets a fault ends with NaN in its outputs, and the next call of the
group raises. In between the program may run on for a long time, so a thread looks
into the groups' mailboxes and logs what it finds.
"""

import logging
import threading
from collections.abc import Callable

_logger = logging.getLogger("jax_ulysses")

PERIOD_S = 0.1


class Watchdog:
    """One daemon thread for all groups, alive while there is one to watch."""

    def __init__(self):
        self._sessions: dict[int, tuple[Callable[[int], dict], set[str]]] = {}
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self, session: int, info: Callable[[int], dict]) -> None:
        """Starts to look after a session.

        Args:
          session: its id.
          info: the extension module's description of a session, which looks into
            the mailboxes.
        """
        with self._lock:
            self._sessions[session] = (info, set())
            if self._thread is None:
                self._wake.clear()
                self._thread = threading.Thread(
                    target=self._run, name="jax_ulysses-watchdog", daemon=True
                )
                self._thread.start()

    def forget(self, session: int) -> None:
        """Logs what is still unsaid about a session and stops looking after it."""
        with self._lock:
            if session in self._sessions:
                self._look(session)
                del self._sessions[session]
            thread = self._thread if not self._sessions else None
            if thread is not None:
                self._thread = None
                self._wake.set()
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while not self._wake.wait(PERIOD_S):
            with self._lock:
                for session in self._sessions:
                    self._look(session)

    def _look(self, session: int) -> None:
        info, said = self._sessions[session]
        for text in info(session)["closed"]:
            if text and text not in said:
                said.add(text)
                _logger.error("%s", text)
