# SPDX-License-Identifier: Apache-2.0
"""A process that fails after it has joined the others ends while they go on."""

import os
import subprocess
import sys
import time

import pytest

PROGRAM = """
import atexit, sys, time
from jax_ulysses import launch
index, count = launch.join()
import jax
assert jax.device_count() == 2
atexit.register(print, "registered by the program")
try:
    sys.exit(9)
except SystemExit:
    pass
if index == FAILING:
    ENDING
time.sleep(DELAY)
"""
# The exit of JAX waits for minutes.
SOON_S = 20
# What srun sets for two tasks on this host.
SLURM = {
    "SLURM_STEP_NODELIST": "localhost",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_NTASKS": "2",
}


def _program(folder, ending, failing, delay=200):
    path = folder / "program.py"
    text = PROGRAM.replace("ENDING", ending).replace("FAILING", str(failing))
    path.write_text(text.replace("DELAY", str(delay)))
    return str(path)


def _launch(folder, *args, **kwargs):
    logs = folder / "logs"
    command = [sys.executable, "-m", "jax_ulysses.launch", "-n", "2", "--cpu"]
    command += ["--log-dir", str(logs), _program(folder, *args, **kwargs)]
    start = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return done, time.monotonic() - start, logs


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize(
    ("ending", "status", "words"),
    [
        ("raise RuntimeError('boom')", 1, ["Traceback", "RuntimeError: boom"]),
        ("raise SystemExit(7)", 7, []),
        ("sys.exit('no such thing')", 1, ["no such thing"]),
    ],
)
def test_the_launcher_ends_soon(tmp_path, ending, status, words, failing):
    done, seconds, _ = _launch(tmp_path, ending, failing)
    assert done.returncode == status, done.stderr
    assert seconds < SOON_S
    assert f"process {failing} ended with code {status}; the end of" in done.stderr
    # What Python does at exit, it has done.
    for expected in [*words, "registered by the program"]:
        assert expected in done.stderr


def test_all_fail_and_each_says_why(tmp_path):
    """JAX aborts the others when process 0 is gone, so it waits a little."""
    ending = "time.sleep(0.5 * index); raise RuntimeError(f'boom {index}')"
    done, seconds, logs = _launch(tmp_path, ending, "index")
    assert done.returncode == 1
    assert seconds < SOON_S
    for index in range(2):
        log = (logs / f"rank_{index}.log").read_text()
        assert f"boom {index}\n" in log
        assert "coordination" not in log


@pytest.mark.parametrize("status", [0, 130])
def test_other_ends_wait_as_before(tmp_path, status):
    """Process 0 must not leave: the other would be aborted before it has finished."""
    done, _, logs = _launch(tmp_path, f"sys.exit({status})", 0, delay=6)
    assert done.returncode == status, done.stderr
    assert (logs / "rank_1.log").read_text() == "registered by the program\n"


def test_a_slurm_task_ends_soon(tmp_path):
    path = _program(tmp_path, "raise RuntimeError('boom')", 1)
    base = {**os.environ, **SLURM, "JAX_PLATFORMS": "cpu"}
    base |= {"SLURM_JOB_ID": str(os.getpid()), "XLA_FLAGS": ""}
    tasks = [
        subprocess.Popen(
            [sys.executable, path],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**base, "SLURM_PROCID": str(index), "SLURM_LOCALID": str(index)},
        )
        for index in range(2)
    ]
    try:
        _, err = tasks[1].communicate(timeout=SOON_S)
        assert tasks[1].returncode == 1
        assert "RuntimeError: boom" in err
        # srun --kill-on-bad-exit ends the others.
        assert tasks[0].poll() is None
    finally:
        for task in tasks:
            task.kill()
            task.communicate(timeout=30)
