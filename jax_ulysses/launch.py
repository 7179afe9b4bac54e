# SPDX-License-Identifier: Apache-2.0
"""Starts a program once per GPU, and lets it join the others.

``python -m jax_ulysses.launch -n 8 program.py ...`` or ``... -n 8 -m package.module``.
The program calls ``join`` before it touches a device.
"""

import contextlib
import os
import pathlib
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping

import jax
from jax._src import distributed

from jax_ulysses import exits
from jax_ulysses.launch_options import parse
from jax_ulysses.launch_workers import Signals, Worker, say, supervise
from jax_ulysses.testing.mps import CONTROL, Mps
from jax_ulysses.testing.rigs import Rig, environment_of

_INDEX, _COUNT = "JAX_ULYSSES_PROCESS_ID", "JAX_ULYSSES_NUM_PROCESSES"
_ADDRESS = "JAX_COORDINATOR_ADDRESS"
# The launcher's own arguments, for ``same_launch``.
_OPTIONS = "JAX_ULYSSES_LAUNCH"
_RIGS: dict[str, Rig] = {"gpus": "processes", "one-gpu": "shared", "cpu": "cpu"}


def join() -> tuple[int, int]:
    """Joins the processes of this job, so that ``jax.devices()`` has those of all.

    Call it before anything that starts JAX's backends. In this order: where
    ``jax.distributed`` is initialised already, nothing is done; a process of
    ``jax_ulysses.launch`` joins the others; a task of a SLURM step with several
    tasks joins them by JAX's own detection; anything else stays alone.

    Once there are others, a program that fails ends within seconds: see ``exits``.

    Returns:
      Index of this process, and how many there are.

    Raises:
      RuntimeError: JAX's backends run already.
    """
    state = jax.distributed
    if not state.is_initialized():
        if _COUNT in os.environ:
            state.initialize(
                os.environ[_ADDRESS], int(os.environ[_COUNT]), int(os.environ[_INDEX])
            )
        # A shell of salloc, and the batch script itself, have no such step.
        elif int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
            state.initialize()
    if not state.is_initialized():
        return 0, 1
    exits.leave_soon_on_failure()
    # jax.process_index() would start the backends.
    shared = distributed.global_state
    return shared.process_id, shared.num_processes


def process_environment(
    index: int, count: int, port: int, mode: str, base: Mapping[str, str]
) -> dict[str, str]:
    """Variables of one process.

    Args:
      index: of the process.
      count: of all processes.
      port: of the coordinator, on this host.
      mode: "gpus" for a GPU each, "one-gpu" for one that all share, "cpu".
      base: what they are added to. A variable that is there stays, but for the
        ones that say who the process is.
    """
    ours = environment_of(_RIGS[mode], 1 if mode == "cpu" else count)
    env = {**ours, **base, "XLA_FLAGS": ours["XLA_FLAGS"]}
    address = f"127.0.0.1:{port}"
    env |= {
        _INDEX: str(index),
        _COUNT: str(count),
        _ADDRESS: address,
        "JAX_COORDINATOR_BIND_ADDRESS": address,
    }
    env.pop("JAX_LOCAL_DEVICE_IDS", None)
    if mode != "cpu":
        # All GPUs stay visible, as peers must be; JAX takes this one.
        env["JAX_LOCAL_DEVICE_IDS"] = str(index if mode == "gpus" else 0)
    return env


def same_launch(module: str, *arguments: str) -> str:
    """The command that starts a module as this process was started.

    Args:
      module: of which a process runs ``python -m``.
      arguments: for it.

    Returns:
      A line for the shell, with the launcher if this is one of its processes.
    """
    command = [sys.executable, "-m"]
    if _OPTIONS in os.environ:
        own = shlex.split(os.environ[_OPTIONS])
        command += ["jax_ulysses.launch", *own, "-m"]
    return shlex.join([*command, module, *arguments])


def main(argv: list[str] | None = None) -> int:
    """Runs the command line and returns its exit status."""
    options = parse(argv)
    if isinstance(options, str):
        say(f"error: {options}")
        return 2
    with contextlib.ExitStack() as stack:
        signals = stack.enter_context(Signals())
        base = os.environ | {_OPTIONS: shlex.join(options.own)}
        if options.mode == "one-gpu":
            try:
                mps = stack.enter_context(Mps())
            except (RuntimeError, OSError, subprocess.SubprocessError) as error:
                say(f"error: {error}")
                return 2
            base |= mps.environment
            stack.enter_context(_mps_ends_with_us(base))
        folder, kept = options.log_dir, True
        if folder is None:
            folder = pathlib.Path(tempfile.mkdtemp(prefix="jax_ulysses_launch_"))
            kept = False
        folder.mkdir(parents=True, exist_ok=True)
        status = _run(options, base, folder, signals)
        if not kept and status == 0:
            shutil.rmtree(folder, ignore_errors=True)
        return status


def _run(options, base, folder, signals) -> int:
    port = _free_port()
    with contextlib.ExitStack() as stack:
        workers = []
        for index in range(options.n):
            env = process_environment(index, options.n, port, options.mode, base)
            log = folder / f"rank_{index}.log"
            workers.append(Worker(index, options.command, env, log))
            stack.callback(workers[-1].end)
        return supervise(workers, signals, options.grace)


@contextlib.contextmanager
def _mps_ends_with_us(env):
    """Stops the service even if this process is killed before it can."""
    # Ends when the pipe to this process closes, for whatever reason.
    watch = f'cat >/dev/null; echo "quit -t 5" | {CONTROL}'
    keeper = subprocess.Popen(
        ["sh", "-c", watch],
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    pipe = keeper.stdin
    assert pipe is not None
    try:
        yield
    finally:
        # The caller stops the service itself.
        keeper.send_signal(signal.SIGKILL)
        keeper.wait()
        pipe.close()


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


if __name__ == "__main__":
    sys.exit(main())
