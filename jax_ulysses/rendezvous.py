# SPDX-License-Identifier: Apache-2.0
"""What the processes of a mesh tell each other when they form a group.

It travels through the key-value store of ``jax.distributed``. Every process says
either what it has to say or why it failed, and reads what all others say, so that
either all go on or all raise with the reason of the one that could not.
"""

import collections
import hashlib
import json
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

# How long a process waits for another to call ``initialize`` too.
TIMEOUT_S = 120.0


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
        self._timeout_ms = round(timeout_s * 1000)
        self._step = 0
        self._client = _client() if len(self.processes) > 1 else None
        if self._client is None:
            return
        ids = [d.id for d in mesh.devices.flat]
        name = hashlib.sha256(repr((ids, mesh.axis_names, topic)).encode()).hexdigest()
        number = _count[name]
        _count[name] += 1
        self._prefix = f"jax_ulysses/{name[:16]}/{number}"

    def exchange(self, produce: Callable[[], Any]) -> list[Any]:
        """Runs ``produce`` here and returns every process's result, in their order.

        Args:
          produce: returns a value that JSON can hold. What it raises reaches every
            process.

        Raises:
          PeerFailure: ``produce`` raised somewhere, or a process does not answer.
        """
        mine, cause = _attempt(produce)
        answers = self._share(mine, self.processes)
        failed = [(p, a) for p, a in zip(self.processes, answers) if "error" in a]
        if failed:
            # A wrong argument or missing memory is the user's to solve; that a
            # machine cannot is only decisive where nobody has such a problem.
            failed.sort(key=lambda item: item[1]["unavailable"])
            process, answer = failed[0]
            where = f"process {process}: " if len(self.processes) > 1 else ""
            raise PeerFailure(where + answer["error"], answer["unavailable"]) from cause
        return [a["value"] for a in answers]

    def wait(self, timeout_s: float, without: Collection[int] = ()) -> bool:
        """Waits until all processes are here; False if one does not come in time.

        Not for those ``without`` names, which have ended.
        """
        if self._client is None:
            return True
        self._timeout_ms = round(timeout_s * 1000)
        processes = [p for p in self.processes if p not in without]
        return all("error" not in a for a in self._share({"value": None}, processes))

    def _share(
        self, mine: dict[str, Any], processes: Sequence[int]
    ) -> list[dict[str, Any]]:
        if self._client is None:
            return [mine]
        self._step += 1
        key = f"{self._prefix}/{self._step}/{{}}".format
        self._client.key_value_set(key(self._me), json.dumps(mine))
        answers = []
        for process in processes:
            try:
                text = self._client.blocking_key_value_get(
                    key(process), self._timeout_ms
                )
                answers.append(json.loads(text))
            except Exception as error:  # The client's own, or the runtime's, type.
                answers.append(
                    {
                        "error": f"did not answer within {self._timeout_ms / 1000:g} s "
                        f"({error}). Every process of the mesh must call "
                        "jax_ulysses.initialize() and finalize() in the same order",
                        "unavailable": False,
                    }
                )
                break
        return answers


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
    needed = ("key_value_set", "blocking_key_value_get")
    if client is None or not all(hasattr(client, name) for name in needed):
        raise RuntimeError(
            "the mesh spans several processes, but jax.distributed's key-value store "
            "is not there: call jax.distributed.initialize() before. (With that done, "
            f"JAX {jax.__version__} has moved its client, and this version of "
            "jax_ulysses does not know where to.)"
        )
    return client
