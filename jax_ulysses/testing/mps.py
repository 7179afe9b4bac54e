# SPDX-License-Identifier: Apache-2.0
"""A CUDA Multi-Process Service of one's own, so that processes share a GPU's SMs.

Without it the GPU runs one process at a time, and ranks that wait for each other
make a step per time slice.
"""

import os
import pathlib
import shutil
import subprocess
import tempfile
import time

CONTROL = "nvidia-cuda-mps-control"


class Mps:
    """Starts the service on entry and stops it on exit.

    Thread percentages stay unset: shares of 50% and 50% were seen to overlap, and
    two ranks that wait for each other then hang. Limit ranks with ``sm_budget``.

    Attributes:
      environment: variables that make a process its client.
    """

    def __init__(self):
        self._folder = pathlib.Path(tempfile.mkdtemp(prefix="jax_ulysses_mps_"))
        pipes, logs = self._folder / "pipe", self._folder / "log"
        pipes.mkdir()
        logs.mkdir()
        self._folders = {
            "CUDA_MPS_PIPE_DIRECTORY": str(pipes),
            "CUDA_MPS_LOG_DIRECTORY": str(logs),
        }
        self.environment = dict(self._folders)
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if visible:
            # The service has these GPUs only, and its clients count them from 0.
            numbers = range(len(visible.split(",")))
            self.environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, numbers))

    def __enter__(self) -> "Mps":
        if shutil.which(CONTROL) is None:
            raise RuntimeError(f"{CONTROL} is not on the PATH: is this a GPU machine?")
        self._control("-d")
        return self

    def __exit__(self, *_) -> None:
        try:
            # After a client was killed while it ran a kernel, a plain quit may hang.
            self._control(stdin="quit -t 5\n")
            pid_file = pathlib.Path(
                self.environment["CUDA_MPS_PIPE_DIRECTORY"], f"{CONTROL}.pid"
            )
            for _ in range(100):
                if not pid_file.exists():
                    break
                time.sleep(0.1)
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    def log(self) -> str:
        """What the service has written so far."""
        folder = pathlib.Path(self.environment["CUDA_MPS_LOG_DIRECTORY"])
        return "".join(
            f"--- {path.name}\n{path.read_text(errors='replace')}"
            for path in sorted(folder.glob("*.log"))
        )

    def _control(self, *arguments: str, stdin: str = "") -> None:
        # Not our stderr: the daemon would keep a pipe open behind it for ever.
        with (self._folder / "control.txt").open("a") as output:
            subprocess.run(
                [CONTROL, *arguments],
                input=stdin,
                env={**os.environ, **self._folders},
                text=True,
                check=True,
                timeout=30,
                stdout=output,
                stderr=output,
            )
