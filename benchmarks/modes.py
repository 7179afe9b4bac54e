# SPDX-License-Identifier: Apache-2.0
"""Sets of XLA flags, each in a process of its own, because XLA reads them once."""

import argparse
import os
import subprocess
import sys
from collections.abc import Callable

COMMON = "--xla_gpu_experimental_use_collective_kernels=-ALL_REDUCE"
GRAPH = f"{COMMON} --xla_gpu_graph_min_graph_size=1"
# graph: XLA's command buffers, however small the program; eager: none; overlap: as
# graph, and XLA's own ways to overlap a dot with its all-to-all.
MODES = {
    "graph": GRAPH,
    "eager": f"{COMMON} --xla_gpu_enable_command_buffer=",
    "overlap": f"{GRAPH} --xla_gpu_enable_latency_hiding_scheduler=true"
    " --xla_gpu_experimental_enable_alltoall_windowed_einsum=true"
    " --xla_gpu_operand_bytes_threshold_for_windowed_einsum=0",
}


def run_modes(
    script: str, args: argparse.Namespace, measure: Callable[[argparse.Namespace], None]
) -> int:
    """Starts the script again for every mode of ``args.modes``; measures in those.

    Args:
      script: path of the program.
      args: its command line, with ``modes`` and, in such a process, ``one_mode``.
      measure: what a process of one mode does.

    Returns:
      Exit status: 1 if a mode failed.
    """
    if args.one_mode:
        measure(args)
        return 0
    failed = 0
    for mode in args.modes.split(","):
        flags = f"{os.environ.get('XLA_FLAGS', '')} {MODES[mode]}"
        print(f"# {mode}: {flags}", flush=True)
        command = [sys.executable, script, "--one-mode", mode, *sys.argv[1:]]
        environment = os.environ | {"XLA_FLAGS": flags}
        failed += bool(subprocess.run(command, env=environment).returncode)
    return min(failed, 1)
