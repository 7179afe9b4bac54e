# SPDX-License-Identifier: Apache-2.0
"""The processes that train together: which one writes, and when all of them stop."""

import os
import signal
from typing import Any

from jax._src import distributed

from .config import ConfigError

# A checkpoint of a large model on a slow disk.
_WAIT_S = 1800
_STOP_KEY = "jax_ulysses/models/stop_after"
_ASK_KEY = "jax_ulysses/models/stop_asked"


class Processes:
    """One process of a run, or the only one.

    Args:
      index: Of this process.
      count: Of all.
    """

    def __init__(self, index: int = 0, count: int = 1):
        self.index = index
        self.count = count
        self._stop_after: int | None = None

    @property
    def main(self) -> bool:
        """Whether this is the one that writes files and speaks to the user."""
        return self.index == 0

    def _client(self) -> Any:
        return distributed.global_state.client

    def wait(self, name: str) -> None:
        """Waits until every process is here. A name is used once."""
        if self.count > 1:
            self._client().wait_at_barrier(f"jax_ulysses/models/{name}", _WAIT_S * 1000)

    def agree(self, what: str, value: str) -> None:
        """Checks that all processes have the same value. Asked once for each `what`.

        Raises:
          ConfigError: In every process, if they do not.
        """
        if self.count == 1:
            return
        client, key = self._client(), f"jax_ulysses/models/{what}"
        client.key_value_set(f"{key}/{self.index}", value)
        values = [
            client.blocking_key_value_get(f"{key}/{index}", _WAIT_S * 1000)
            for index in range(self.count)
        ]
        # Who raised before others have read would end the job, and they say nothing.
        self.wait(what)
        for index, other in enumerate(values):
            if other != values[0]:
                raise ConfigError(
                    f"the {what} must be the same in all processes: "
                    f"process 0 has {values[0]}, process {index} has {other}"
                )

    def stop_now(self, step: int, requested: bool) -> bool:
        """Whether to stop after `step`; the same answer in every process.

        Each process asks after each step. The first process decides: who stopped by
        itself would leave the others waiting in the next exchange. Another one that was
        asked to stop tells it so. It announces the step after this one. No process can
        end that step before the first one has begun it, so each finds the announcement
        when it asks again.

        Args:
          step: The step that has just ended.
          requested: Whether this process was asked to stop.
        """
        if self.count == 1:
            self._stop_after = step if requested else None
        elif self._stop_after is None:
            if not self.main:
                if requested:
                    # Until the answer is there; several may ask.
                    self._client().key_value_set(_ASK_KEY, "", allow_overwrite=True)
                self._stop_after = self._announced()
            elif requested or self._told(_ASK_KEY) is not None:
                self._stop_after = step + 1
                self._client().key_value_set(_STOP_KEY, str(step + 1))
        return self._stop_after is not None and step >= self._stop_after

    def _announced(self) -> int | None:
        step = self._told(_STOP_KEY)
        return None if step is None else int(step)

    def _told(self, key: str) -> str | None:
        try:
            return self._client().key_value_try_get(key)
        except Exception as error:  # The client's own type; NOT_FOUND is the usual.
            if "NOT_FOUND" not in str(error):
                raise
            return None


class Interrupt:
    """Turns the first Ctrl-C (or SIGTERM) into a request to stop after this step."""

    def __init__(self):
        self.requested = False

    def __enter__(self):
        signals = (signal.SIGINT, signal.SIGTERM)
        self._before = {s: signal.signal(s, self._handle) for s in signals}
        return self

    def __exit__(self, *_):
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number, _frame):
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        # os.write: print() is not reentrant, and the main thread may be printing.
        os.write(2, b"\nstopping after this step; once more quits at once\n")
