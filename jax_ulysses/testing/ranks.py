# SPDX-License-Identifier: Apache-2.0
"""Runs a function once per rank, in processes of their own."""

import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Sequence
from typing import Any

from jax.sharding import Mesh

from jax_ulysses.testing.mps import Mps
from jax_ulysses.testing.rigs import Rig, environment_of, process_count


@dataclasses.dataclass(frozen=True)
class Rank:
    """What a function under test is told about where it runs.

    Attributes:
      index: of this process; in a rig with one process, 0.
      num_ranks: P, devices in ``mesh``.
      mesh: all ranks' devices on one axis, "cp".
      sm_budget: for ``initialize``; what ranks that share a GPU may each take.
      implementation: "cuda", or "host" on CPUs.
    """

    index: int
    num_ranks: int
    mesh: Mesh
    sm_budget: int | None
    implementation: str


@dataclasses.dataclass(frozen=True)
class RankResult:
    """How one process ended.

    Attributes:
      index: of the process.
      value: what the function returned, through JSON; None if it did not return.
      returncode: of the process, negative for a signal.
      log: what it wrote.
      seconds: wall time.
    """

    index: int
    value: Any
    returncode: int
    log: str
    seconds: float


class RanksFailed(AssertionError):
    """A process failed or ran out of time; the text has the logs' ends.

    Attributes:
      results: of all processes.
    """

    def __init__(self, text: str, results: list[RankResult]):
        super().__init__(text)
        self.results = results


def run_ranks(
    target: str,
    num_ranks: int,
    *args: Any,
    rig: Rig = "shared",
    timeout_s: float = 120.0,
    may_fail: Collection[int] = (),
    paths: Sequence[str | os.PathLike] = (),
    environment: dict[str, str] | None = None,
    log_dir: str | os.PathLike | None = None,
) -> list[RankResult]:
    """Calls ``target(rank, *args)`` on P ranks and waits for all of them.

    The first process that fails, if it is not in ``may_fail``, ends the others. In
    the "shared" rig NCCL refuses to work, so the function must not make XLA lower
    to a collective: no ``lax.psum``, and no look at shards of other processes.

    Args:
      target: "module:function".
      num_ranks: P.
      *args: further arguments, through JSON.
      rig: where the ranks live.
      timeout_s: after which all processes are killed.
      may_fail: processes that are expected to die.
      paths: folders to add to the end of ``sys.path``.
      environment: further variables of the processes.
      log_dir: keeps rank_<i>.log and rank_<i>.json here; by default nothing is kept.

    Returns:
      One result a process, in order.

    Raises:
      RanksFailed: a process failed, or time ran out.
    """
    with contextlib.ExitStack() as stack:
        if log_dir is None:
            log_dir = stack.enter_context(tempfile.TemporaryDirectory())
        folder = pathlib.Path(log_dir)
        folder.mkdir(parents=True, exist_ok=True)
        common = environment_of(rig, num_ranks)
        if rig == "shared":
            common |= stack.enter_context(Mps()).environment
        port = _free_port()
        running = []
        for index in range(process_count(rig, num_ranks)):
            job = {
                "target": target,
                "args": args,
                "rig": rig,
                "index": index,
                "num_ranks": num_ranks,
                "port": port,
                "paths": [str(p) for p in paths],
                "result": str(folder / f"rank_{index}.json"),
            }
            # The current folder may hold sources that shadow an installed package.
            env = {**os.environ, "PYTHONSAFEPATH": "1", **common, **(environment or {})}
            running.append(_Process(index, job, folder, env))
            stack.callback(running[-1].kill)
        failure = _wait(running, timeout_s, may_fail)
        results = [p.result() for p in running]
    if failure is not None:
        raise RanksFailed(_describe(target, failure, results), results)
    return results


class _Process:
    def __init__(self, index, job, folder, env):
        self.index = index
        self._log = folder / f"rank_{index}.log"
        self._value = pathlib.Path(job["result"])
        self._value.unlink(missing_ok=True)
        self._start = time.monotonic()
        self._seconds = 0.0
        with self._log.open("w") as log:
            self._popen = subprocess.Popen(
                [sys.executable, "-m", "jax_ulysses.testing.child", json.dumps(job)],
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=env,
            )

    def poll(self) -> int | None:
        code = self._popen.poll()
        if code is not None and not self._seconds:
            self._seconds = time.monotonic() - self._start
        return code

    def kill(self) -> None:
        if self._popen.poll() is None:
            self._popen.send_signal(signal.SIGTERM)
            try:
                self._popen.wait(3)
            except subprocess.TimeoutExpired:
                self._popen.kill()
                self._popen.wait()

    def result(self) -> RankResult:
        code = self._popen.wait()
        value = None
        if self._value.exists():
            value = json.loads(self._value.read_text())
        log = self._log.read_text(errors="replace")
        return RankResult(self.index, value, code, log, round(self._seconds, 1))


def _wait(running, timeout_s, may_fail) -> str | None:
    """Returns why the run failed, after which nothing runs any more; None if not."""
    end = time.monotonic() + timeout_s
    failure = None
    while failure is None:
        codes = [p.poll() for p in running]
        bad = [
            (p.index, c)
            for p, c in zip(running, codes)
            if c not in (None, 0) and p.index not in may_fail
        ]
        if bad:
            failure = f"process {bad[0][0]} ended with code {bad[0][1]}"
        elif all(c is not None for c in codes):
            return None
        elif time.monotonic() > end:
            slow = [p.index for p, c in zip(running, codes) if c is None]
            failure = f"processes {slow} did not end within {timeout_s:g} s"
        else:
            time.sleep(0.05)
    # What the others have to say about it often explains it.
    time.sleep(1.0)
    for process in running:
        process.kill()
    return failure


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _describe(target, failure, results) -> str:
    text = [f"{target}: {failure}"]
    for result in results:
        tail = result.log.splitlines()[-25:]
        text.append(
            f"--- process {result.index}: code {result.returncode}, "
            f"{result.seconds:g} s, the end of its log:"
        )
        text += tail
    return "\n".join(text)
