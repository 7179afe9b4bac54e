# SPDX-License-Identifier: Apache-2.0
"""The processes of ``jax_ulysses.launch``: started, watched, stopped together."""

import contextlib
import ctypes
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence

# Passed on to every process. The first four ask them to end.
STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
FORWARDED = (*STOP, signal.SIGUSR1, signal.SIGUSR2)

_POLL_S = 0.05
# After a failure: what the others have to say about it often explains it.
_LISTEN_S = 1.0
# Between SIGTERM and SIGKILL.
_KILL_AFTER_S = 5.0
_TAIL_LINES = 30
_PR_SET_PDEATHSIG = 1


class Worker:
    """One process. What it writes goes to a log; that of process 0 is shown as well.

    Args:
      index: of the process.
      command: program and arguments.
      environment: all of its variables.
      log: file for its output and errors.
    """

    def __init__(
        self,
        index: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: pathlib.Path,
    ):
        self.index = index
        self.log = log
        self._readers: list[threading.Thread] = []
        shown = index == 0
        self._file = log.open("wb", buffering=0)
        output = subprocess.PIPE if shown else self._file
        self._process = subprocess.Popen(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.PIPE if shown else subprocess.STDOUT,
            # A session of its own: Ctrl-C reaches it through us, and only once.
            start_new_session=True,
            # One system call, which takes no locks.
            preexec_fn=_die_with_parent,  # noqa: PLW1509
        )
        if shown:
            for pipe, screen in (
                (self._process.stdout, sys.stdout),
                (self._process.stderr, sys.stderr),
            ):
                reader = threading.Thread(
                    target=_copy, args=(pipe, screen, self._file), daemon=True
                )
                reader.start()
                self._readers.append(reader)

    def poll(self) -> int | None:
        """The return code, negative for a signal, or None while it runs."""
        return self._process.poll()

    def send(self, number: int) -> None:
        """Sends a signal, if it still runs."""
        if self.poll() is None:
            self._process.send_signal(number)

    def end(self) -> None:
        """Waits for its output, and kills what it has left behind in its session."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for reader in self._readers:
            # Something that left the session may still hold the pipe.
            reader.join(2)
        self._file.close()

    def tail(self) -> str:
        """The end of its log."""
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(lines[-_TAIL_LINES:])


# Looked up before any fork: a child must not import.
_prctl = getattr(ctypes.CDLL(None), "prctl", None)


def _die_with_parent() -> None:
    """In the child: when the launcher is killed, even by SIGKILL, so is this."""
    if _prctl is not None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _copy(pipe, screen, log) -> None:
    while chunk := pipe.read1(65536):
        log.write(chunk)
        # The reader of the launcher may have gone; the log goes on.
        with contextlib.suppress(BrokenPipeError, ValueError):
            screen.buffer.write(chunk)
            screen.buffer.flush()
    pipe.close()


class Signals:
    """Collects the signals that are to be passed on, inside a ``with`` block."""

    def __init__(self):
        self.pending: list[int] = []

    def __enter__(self) -> "Signals":
        self._before = {
            number: signal.signal(number, lambda n, _: self.pending.append(n))
            for number in FORWARDED
        }
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def take(self) -> list[int]:
        """The signals since the last call."""
        taken, self.pending = self.pending, []
        return taken


def supervise(workers: Sequence[Worker], signals: Signals, grace_s: float) -> int:
    """Waits for all processes; the first that fails ends the others.

    Args:
      workers: all processes.
      signals: what this process is sent.
      grace_s: after a signal to stop, how long the others may take once the first
        process has ended.

    Returns:
      0, or the exit status of the process that failed first (128 + n for signal n).
    """
    stopping = False
    limit = None
    while True:
        for number in signals.take():
            stopping = stopping or number in STOP
            for worker in workers:
                worker.send(number)
        codes = [worker.poll() for worker in workers]
        if None not in codes:
            break
        failed = next((w for w, c in zip(workers, codes) if c), None)
        if failed is not None and not stopping:
            _report(failed)
            _stop(workers, after_s=_LISTEN_S)
            return _status(failed)
        if stopping and limit is None and any(c is not None for c in codes):
            limit = time.monotonic() + grace_s
        if limit is not None and time.monotonic() > limit:
            slow = [w.index for w in workers if w.poll() is None]
            say(f"processes {slow} did not stop within {grace_s:g} s: killed")
            _stop(workers)
            break
        time.sleep(_POLL_S)
    failed = next((w for w in workers if w.poll()), None)
    if failed is None:
        return 0
    if not stopping:
        _report(failed)
    return _status(failed)


def _stop(workers, after_s: float = 0.0) -> None:
    _wait(workers, after_s)
    for worker in workers:
        worker.send(signal.SIGTERM)
    _wait(workers, _KILL_AFTER_S)
    for worker in workers:
        worker.send(signal.SIGKILL)


def _wait(workers, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and any(w.poll() is None for w in workers):
        time.sleep(_POLL_S)


def _status(worker: Worker) -> int:
    code = worker.poll() or 0
    return code if code >= 0 else 128 - code


def _report(worker: Worker) -> None:
    code = worker.poll() or 0
    how = f"code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
    # Its output may still be on the way.
    time.sleep(_POLL_S)
    say(
        f"process {worker.index} ended with {how}; the end of {worker.log}:\n"
        f"{worker.tail()}"
    )


def say(text: str) -> None:
    """Tells the user something about the launch, beside what the processes say."""
    sys.stderr.write(f"jax_ulysses.launch: {text}\n")
    sys.stderr.flush()
