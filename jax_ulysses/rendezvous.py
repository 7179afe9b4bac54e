# SPDX-License-Identifier: Apache-2.0
"""What the processes of a mesh tell each other when they form a group.

It travels through the key-value store of ``jax.distributed``. Every process says
either what it has to say or why it failed, and reads what all others say, so that
either all go on or all raise with the reason of the one that could not. One that waits
in vain says so, too: its reason ends the attempt for all, and for one that comes late,
so that all begin the next attempt together.
"""

import collections
import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

# How long a process waits for another to call ``initialize`` too.
TIMEOUT_S = 120.0
# How often one that waits looks whether another has given up.
_PERIOD_S = 1.0
# Enough to learn of what has been said already, when all time has gone to another.
_LEAST_MS = 200

# How often this process has met others for a purpose. Equal in all of them.
_count: collections.Counter[str] = collections.Counter()


class PeerFailure(RuntimeError):
    """Another process, or this one, could not do its part.

    Attributes:
      unavailable: it cannot on this machine, and another implementation has to.
    """

    def __init__(self, text: str, unavailable: bool):
        super().__init__(text)
        self.unavailable = unavailable


class Rendezvous:
    """Agreement among the processes that a mesh spans.

    All processes must create and use them in the same order. With one process it
    needs no store.

    Args:
      mesh: concrete mesh.
      topic: what it is about; part of the keys.
      timeout_s: longest wait for another process.

    Attributes:
      processes: process indices of the mesh, ascending.
    """

    def __init__(self, mesh: Mesh, topic: str, timeout_s: float = TIMEOUT_S):
        self.processes = sorted({d.process_index for d in mesh.devices.flat})
        self._me = jax.process_index()
        self._timeout_s = timeout_s
        self._step = 0
        self._client: Any = _client() if len(self.processes) > 1 else None
        if self._client is None:
            return
        ids = [d.id for d in mesh.devices.flat]
        name = hashlib.sha256(repr((ids, mesh.axis_names, topic)).encode()).hexdigest()
        while True:
            self._prefix = f"jax_ulysses/{name[:16]}/{_count[name]}"
            _count[name] += 1
            if self._given_up() is None:
                break

    def exchange(self, produce: Callable[[], Any]) -> list[Any]:
        """Runs ``produce`` here and returns every process's result, in their order.

        Args:
          produce: returns a value that JSON can hold. What it raises reaches every
            process.

        Raises:
          PeerFailure: ``produce`` raised somewhere, or a process does not answer.
        """
        mine, cause = _attempt(produce)
        answers = [mine] if self._client is None else self._share(mine)
        failed = [(p, a) for p, a in zip(self.processes, answers) if "error" in a]
        if failed:
            # A wrong argument or missing memory is the user's to solve; that a
            # machine cannot is only decisive where nobody has such a problem.
            failed.sort(key=lambda item: item[1]["unavailable"])
            process, answer = failed[0]
            where = f"process {process}: " if len(self.processes) > 1 else ""
            raise PeerFailure(where + answer["error"], answer["unavailable"]) from cause
        return [a["value"] for a in answers]

    def wait(self, timeout_s: float, without: Collection[int] = ()) -> list[int]:
        """Waits until all processes are here; returns those that do not come in time.

        Not for those ``without`` names, which have ended.
        """
        if self._client is None:
            return []
        self._say({})
        end = time.monotonic() + timeout_s
        absent = []
        for process in self.processes:
            if process in without:
                continue
            try:
                self._hear(process, end)
            except Exception:  # The client's own, or the runtime's, type.
                absent.append(process)
        return absent

    def _share(self, mine: dict[str, Any]) -> list[dict[str, Any]]:
        """What the processes say, up to the first that says nothing."""
        self._say(mine)
        answers = []
        for process in self.processes:
            try:
                end = time.monotonic() + self._timeout_s
                answers.append(self._hear(process, end, self._stop_if_given_up))
            except PeerFailure:
                raise
            except Exception as error:
                text = (
                    f"did not answer within {self._timeout_s:g} s ({error}). Every "
                    "process of the mesh must call jax_ulysses.initialize() and "
                    "finalize() in the same order"
                )
                self._give_up(f"process {process}: {text}")
                answers.append({"error": text, "unavailable": False})
                break
            except BaseException as interrupt:
                self._give_up(f"was interrupted by {type(interrupt).__name__}")
                raise
        return answers

    def _say(self, mine: dict[str, Any]) -> None:
        self._step += 1
        self._client.key_value_set(self._key(self._me), json.dumps(mine))

    def _hear(
        self, process: int, end: float, between: Callable[[], None] = lambda: None
    ) -> dict[str, Any]:
        """What a process says in this step; the client's error if nothing until then.

        In pieces: the client's wait for a key can neither be interrupted nor ended.
        """
        while True:
            left = end - time.monotonic()
            wait_ms = max(_LEAST_MS, round(min(left, _PERIOD_S) * 1000))
            try:
                text = self._client.blocking_key_value_get(self._key(process), wait_ms)
                return json.loads(text)
            except Exception as error:
                if left <= _PERIOD_S or "DEADLINE_EXCEEDED" not in str(error):
                    raise
            between()

    def _key(self, process: int) -> str:
        return f"{self._prefix}/{self._step}/{process}"

    def _give_up(self, text: str) -> None:
        # Another may have been first, or there is no store any more.
        with contextlib.suppress(Exception):
            self._client.key_value_set(
                f"{self._prefix}/given up", f"process {self._me} gave up: {text}"
            )

    def _given_up(self) -> str | None:
        """Why a process gave this attempt up, if one has."""
        try:
            return self._client.key_value_try_get(f"{self._prefix}/given up")
        except Exception as error:
            if "NOT_FOUND" in str(error):
                return None
            raise

    def _stop_if_given_up(self) -> None:
        text = self._given_up()
        if text is not None:
            raise PeerFailure(text, unavailable=False)


def _attempt(produce) -> tuple[dict[str, Any], Exception | None]:
    try:
        return {"value": produce()}, None
    except Exception as error:
        unavailable = isinstance(error, NotImplementedError)
        text = str(error) if str(error) else type(error).__name__
        return {"error": text, "unavailable": unavailable}, error


def agree(values: Sequence[Any], processes: Sequence[int], what: str) -> Any:
    """The one value that all processes gave.

    Raises:
      RuntimeError: they differ; names two of them.
    """
    for process, value in zip(processes, values):
        if value != values[0]:
            raise RuntimeError(
                f"{what} differs between processes: {values[0]} in process "
                f"{processes[0]}, {value} in process {process}."
            )
    return values[0]


def _client():
    # Not public, but the only way to the store that jax.distributed.initialize makes.
    state = getattr(getattr(jax, "_src", None), "distributed", None)
    client = getattr(getattr(state, "global_state", None), "client", None)
    needed = ("key_value_set", "key_value_try_get", "blocking_key_value_get")
    if client is None or not all(hasattr(client, name) for name in needed):
        raise RuntimeError(
            "the mesh spans several processes, but jax.distributed's key-value store "
            "is not there: call jax.distributed.initialize() before. (With that done, "
            f"JAX {jax.__version__} has moved its client, and this version of "
            "jax_ulysses does not know where to.)"
        )
    return client
