# SPDX-License-Identifier: Apache-2.0
"""Who a process is: what the launcher and SLURM say, and what the launcher refuses."""

import os
import subprocess
import sys

import pytest

from jax_ulysses import launch, launch_options


@pytest.mark.parametrize(
    ("arguments", "visible", "message"),
    [
        (["-n", "2", "nothing.py"], "0,1", "no such file: nothing.py"),
        (["-n", "3", __file__], "0,1", "3 processes, but 2 GPUs are visible"),
        (["-n", "0", __file__], "0,1", "-n must be at least 1, got 0"),
        ([__file__], "", "how many processes? Say -n"),
        (["--cpu", __file__], "0,1", "how many processes? Say -n"),
    ],
)
def test_wrong_arguments(arguments, visible, message, monkeypatch, capsys):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert launch.main(arguments) == 2
    assert message in capsys.readouterr().err


def test_no_gpus(monkeypatch, capsys):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setenv("PATH", "/nothing")
    assert launch.main(["-n", "2", __file__]) == 2
    error = capsys.readouterr().err
    assert "error: no GPUs were found" in error
    assert "--cpu" in error


@pytest.mark.parametrize(
    ("arguments", "own"),
    [
        (["-n", "2", "--cpu", "prog.py", "-n", "7"], ["-n", "2", "--cpu"]),
        (["--cpu", "-n2", "-m", "mod", "-m", "x"], ["--cpu", "-n2"]),
        (["-n", "1", "--cpu", "--", "prog.py"], ["-n", "1", "--cpu"]),
    ],
)
def test_own_arguments(arguments, own, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prog.py").touch()
    options = launch_options.parse(arguments)
    assert not isinstance(options, str)
    assert options.own == own


def test_same_launch(monkeypatch):
    monkeypatch.delenv("JAX_ULYSSES_LAUNCH", raising=False)
    assert launch.same_launch("mod", "a b") == f"{sys.executable} -m mod 'a b'"
    monkeypatch.setenv("JAX_ULYSSES_LAUNCH", "-n 2 --log-dir 'my logs'")
    assert launch.same_launch("mod", "--resume") == (
        f"{sys.executable} -m jax_ulysses.launch -n 2 --log-dir 'my logs' "
        "-m mod --resume"
    )


def test_environments(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--a=1 --xla_force_host_platform_device_count=8")
    base = {"KEPT": "yes", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    env = {
        mode: launch.process_environment(3, 4, 1234, mode, base)
        for mode in ("gpus", "one-gpu", "cpu")
    }
    for found in env.values():
        assert found["KEPT"] == "yes"
        assert found["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
        assert found["JAX_COORDINATOR_ADDRESS"] == "127.0.0.1:1234"
        assert found["JAX_ULYSSES_PROCESS_ID"] == "3"
        assert found["JAX_ULYSSES_NUM_PROCESSES"] == "4"
    assert env["gpus"]["JAX_LOCAL_DEVICE_IDS"] == "3"
    assert env["one-gpu"]["JAX_LOCAL_DEVICE_IDS"] == "0"
    assert "JAX_LOCAL_DEVICE_IDS" not in env["cpu"]
    assert env["gpus"]["XLA_FLAGS"] == env["one-gpu"]["XLA_FLAGS"] == "--a=1"
    assert env["cpu"]["JAX_PLATFORMS"] == "cpu"
    # All four pools together leave room for heaps and contexts.
    assert 4 * float(env["one-gpu"]["XLA_PYTHON_CLIENT_MEM_FRACTION"]) <= 0.5
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" not in env["gpus"]


def test_slurm_tasks_join(tmp_path):
    """What srun sets for two tasks on this host, without SLURM."""
    program = tmp_path / "task.py"
    program.write_text(
        "import os\n"
        "from jax_ulysses import launch\n"
        "index, count = launch.join()\n"
        "import jax\n"
        "assert (index, count) == (jax.process_index(), 2) == "
        "(int(os.environ['SLURM_PROCID']), jax.process_count())\n"
    )
    job = str(os.getpid())
    tasks = [
        subprocess.Popen(
            [sys.executable, str(program)],
            stderr=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "JAX_PLATFORMS": "cpu",
                "SLURM_JOB_ID": job,
                "SLURM_STEP_NODELIST": "localhost",
                "SLURM_STEP_NUM_NODES": "1",
                "SLURM_STEP_NUM_TASKS": "2",
                "SLURM_NTASKS": "2",
                "SLURM_PROCID": str(index),
                "SLURM_LOCALID": str(index),
            },
        )
        for index in range(2)
    ]
    for task in tasks:
        _, err = task.communicate(timeout=60)
        assert task.returncode == 0, err


def test_alone(monkeypatch):
    for name in ("JAX_ULYSSES_NUM_PROCESSES", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    assert launch.join() == (0, 1)
    # The batch script of a job runs outside of its steps.
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    assert launch.join() == (0, 1)
