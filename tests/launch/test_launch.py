# SPDX-License-Identifier: Apache-2.0
"""The launcher with real processes: failures, signals, and nothing left behind."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

LAUNCH = [sys.executable, "-m", "jax_ulysses.launch"]


def _program(folder: pathlib.Path, text: str) -> str:
    path = folder / "program.py"
    path.write_text(
        "import os, pathlib, signal, subprocess, sys, time\n"
        'index = int(os.environ["JAX_ULYSSES_PROCESS_ID"])\n'
        f"folder = pathlib.Path({str(folder)!r})\n"
        '(folder / f"pid_{index}").write_text(str(os.getpid()))\n' + text
    )
    return str(path)


def _start(folder, text, *options, n=3, env=None, **kwargs):
    """The launcher of n processes that run a program."""
    command = [*LAUNCH, "-n", str(n), *options, _program(folder, text)]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={**os.environ, **(env or {})},
        **kwargs,
    )


def _run(folder, text, *options, **kwargs):
    process = _start(folder, text, *options, **kwargs)
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def _wait_for(condition, what):
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, f"{what}: not within 30 s"
        time.sleep(0.05)


def _alive(pid: int) -> bool:
    try:
        state = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        return False
    return state[0] != "Z"


def _pids(folder):
    return [int(p.read_text()) for p in folder.glob("pid_*")]


def test_processes_join_and_see_each_others_devices(tmp_path):
    text = """
from jax_ulysses import launch
assert launch.join() == (index, 2)
assert launch.join() == (index, 2), "again, it changes nothing"
import jax
assert (jax.process_index(), jax.process_count()) == (index, 2)
assert (jax.device_count(), jax.local_device_count()) == (2, 1)
print("all is well")
print("and on stderr", file=sys.stderr)
"""
    code, out, err = _run(tmp_path, text, "--cpu", "--log-dir", tmp_path / "logs", n=2)
    assert code == 0, err
    # The first process is shown; every one has a log.
    assert out == "all is well\n"
    assert "and on stderr" in err
    for index in range(2):
        log = (tmp_path / "logs" / f"rank_{index}.log").read_text()
        assert "all is well" in log
        assert "and on stderr" in log


def test_the_first_failure_ends_the_rest_and_shows_its_log(tmp_path):
    text = """
if index == 2:
    print("the reason")
    sys.exit(5)
time.sleep(300)
"""
    start = time.monotonic()
    code, _, err = _run(tmp_path, text, "--cpu")
    assert code == 5
    assert time.monotonic() - start < 30
    assert "process 2 ended with code 5; the end of " in err
    assert "the reason" in err
    # Without --log-dir the logs of a failed run stay.
    log = pathlib.Path(err.partition("the end of ")[2].partition(":\n")[0])
    assert log.read_text() == "the reason\n"
    assert not any(_alive(pid) for pid in _pids(tmp_path))


def test_a_process_that_ignores_sigterm_is_killed(tmp_path):
    text = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
(folder / f"ready_{index}").touch()
while index == 0 and len(list(folder.glob("ready_*"))) < 3:
    time.sleep(0.01)
if index == 0:
    os.kill(os.getpid(), signal.SIGSEGV)
time.sleep(300)
"""
    code, _, err = _run(tmp_path, text, "--cpu")
    assert code == 128 + signal.SIGSEGV
    assert "process 0 ended with signal SIGSEGV" in err
    assert not any(_alive(pid) for pid in _pids(tmp_path))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_are_passed_on_and_awaited(tmp_path, number):
    text = """
def stop(number, _):
    time.sleep(0.2 * index)
    print("saved", number)
    sys.exit(130)
for n in (signal.SIGINT, signal.SIGTERM):
    signal.signal(n, stop)
(folder / f"ready_{index}").touch()
time.sleep(300)
"""
    process = _start(tmp_path, text, "--cpu", "--log-dir", tmp_path / "logs")
    _wait_for(lambda: len(list(tmp_path.glob("ready_*"))) == 3, "start")
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    # Asked to stop, they did: no failure.
    assert "ended with" not in err
    assert out == f"saved {int(number)}\n"
    for index in range(3):
        log = (tmp_path / "logs" / f"rank_{index}.log").read_text()
        assert log == f"saved {int(number)}\n"


def test_who_does_not_stop_in_time_is_killed(tmp_path):
    text = """
(folder / f"ready_{index}").touch()
if index:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (folder / f"deaf_{index}").touch()
time.sleep(300)
"""
    process = _start(tmp_path, text, "--cpu", "--grace", "0.5")
    _wait_for(lambda: len(list(tmp_path.glob("ready_*"))) == 3, "start")
    _wait_for(lambda: len(list(tmp_path.glob("deaf_*"))) == 2, "deaf ones")
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert "processes [1, 2] did not stop within 0.5 s: killed" in err
    assert not any(_alive(pid) for pid in _pids(tmp_path))


def test_nothing_outlives_a_killed_launcher(tmp_path):
    process = _start(tmp_path, "time.sleep(300)", "--cpu")
    _wait_for(lambda: len(_pids(tmp_path)) == 3, "start")
    process.kill()
    process.communicate(timeout=30)
    _wait_for(lambda: not any(_alive(pid) for pid in _pids(tmp_path)), "death")


def test_children_of_processes_do_not_stay(tmp_path):
    text = """
child = subprocess.Popen(["sleep", "300"])
(folder / f"pid_child_{index}").write_text(str(child.pid))
"""
    code, _, err = _run(tmp_path, text, "--cpu")
    assert code == 0, err
    assert len(_pids(tmp_path)) == 6
    assert not any(_alive(pid) for pid in _pids(tmp_path))


def test_a_module_and_its_arguments(tmp_path):
    (tmp_path / "mine.py").write_text("import sys; print(sys.argv[1:])")
    result = subprocess.run(
        [*LAUNCH, "-n", "1", "--cpu", "-m", "mine", "--flag", "-n", "7"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == "['--flag', '-n', '7']\n"


FAKE_MPS = """#!/bin/sh
echo "$@ GPUs $CUDA_VISIBLE_DEVICES" >> "$LOG"
if [ "$1" = -d ]; then exit 0; fi
cat >> "$LOG"
"""


@pytest.mark.parametrize("killed", [False, True])
def test_one_gpu_starts_and_stops_a_service_of_its_own(tmp_path, killed):
    """With a stand-in for NVIDIA's program: the service ends even if we are killed."""
    control = tmp_path / "bin" / "nvidia-cuda-mps-control"
    control.parent.mkdir()
    control.write_text(FAKE_MPS)
    control.chmod(0o755)
    log = tmp_path / "mps.log"
    env = {"PATH": f"{control.parent}:{os.environ['PATH']}", "LOG": str(log)}
    # The service gets this GPU, and its clients count from 0.
    env["CUDA_VISIBLE_DEVICES"] = "3"
    names = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_VISIBLE_DEVICES")
    text = f"print([os.environ[n] for n in {names}])\n" + "time.sleep(300)" * killed
    process = _start(tmp_path, text, "--one-gpu", n=2, env=env)
    if killed:
        _wait_for(lambda: len(_pids(tmp_path)) == 2, "start")
        process.kill()
    out, err = process.communicate(timeout=60)
    if not killed:
        assert process.returncode == 0, err
        assert "jax_ulysses_mps_" in out
        assert "'0']" in out
    _wait_for(lambda: "quit" in log.read_text(), "quit")
    assert log.read_text().split("\n")[0] == "-d GPUs 3"
    assert log.read_text().count("quit") == 1


def test_one_gpu_without_the_service(tmp_path):
    code, _, err = _run(tmp_path, "", "--one-gpu", n=2, env={"PATH": "/nothing"})
    assert code == 2
    assert "nvidia-cuda-mps-control is not on the PATH" in err
