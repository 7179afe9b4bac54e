# SPDX-License-Identifier: Apache-2.0
"""The command line of ``jax_ulysses.launch``."""

import argparse
import os
import pathlib
import subprocess
import sys


def parse(argv: list[str] | None) -> argparse.Namespace | str:
    """Reads and checks the command line.

    Args:
      argv: arguments; None for those of the process.

    Returns:
      The options, or what is wrong with them. ``command`` is what to start, ``own``
      the arguments before the program, without -m.
    """
    parser = argparse.ArgumentParser(
        prog="python -m jax_ulysses.launch",
        description="Starts a program once per GPU of this host. The first process "
        "that fails ends the others and its log is shown; signals reach all of them.",
    )
    add = parser.add_argument
    add("-n", type=int, help="processes; by default as many as there are GPUs")
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--one-gpu",
        dest="mode",
        action="store_const",
        const="one-gpu",
        help="all processes share the first GPU, under an MPS of their own",
    )
    where.add_argument(
        "--cpu",
        dest="mode",
        action="store_const",
        const="cpu",
        help="a CPU device each, to try a program out",
    )
    add(
        "--log-dir",
        type=pathlib.Path,
        metavar="DIR",
        help="keep rank_<i>.log here (a temporary folder, kept after a failure)",
    )
    add(
        "--grace",
        type=float,
        default=60.0,
        metavar="S",
        help="after a signal to stop, how long processes may go on when one has (60)",
    )
    add("-m", dest="module", action="store_true", help="the program is a module")
    add("program", help="file, or module with -m")
    add("args", nargs=argparse.REMAINDER, help="its arguments")
    argv = sys.argv[1:] if argv is None else argv
    options = parser.parse_args(argv)
    options.mode = options.mode or "gpus"
    program = ["-m", options.program] if options.module else [options.program]
    options.command = [sys.executable, *program, *options.args]
    own = argv[: len(argv) - len(options.args) - 1]
    options.own = [argument for argument in own if argument not in ("-m", "--")]
    if not options.module and not pathlib.Path(options.program).is_file():
        return f"no such file: {options.program}"
    gpus = _count_gpus() if options.mode == "gpus" else None
    if options.n is None:
        if not gpus:
            return "how many processes? Say -n; no GPUs were found to count"
        options.n = gpus
    if options.n < 1:
        return f"-n must be at least 1, got {options.n}"
    # Whoever has set JAX_PLATFORMS knows what the processes will look for.
    chosen = options.mode != "gpus" or os.environ.get("JAX_PLATFORMS")
    if gpus is None and not chosen:
        return (
            "no GPUs were found, as nvidia-smi lists none: --cpu gives each process a "
            "CPU device. Where nvidia-smi is missing, CUDA_VISIBLE_DEVICES=0,1,... "
            "names the GPUs"
        )
    if gpus is not None and options.n > gpus:
        return (
            f"{options.n} processes, but {gpus} GPUs are visible: --one-gpu puts all "
            "processes on one, --cpu takes none"
        )
    return options


def _count_gpus() -> int | None:
    """GPUs that CUDA would show; None if nobody knows of any."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([entry for entry in visible.split(",") if entry.strip()])
    try:
        listing = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return sum(line.startswith("GPU ") for line in listing.splitlines()) or None
