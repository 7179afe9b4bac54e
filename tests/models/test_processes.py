# SPDX-License-Identifier: Apache-2.0
"""Training in several processes, on CPUs: the same run, stopped and continued together.

XLA's collectives carry it here: ``host`` needs all devices in one process. What the
processes themselves do (who writes, when all stop, who reads what) is the same on GPUs.
"""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from jax_ulysses.models.data import load_corpus

_STEPS = 10
_ENVIRONMENT = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}


def _command(text, out, *more, processes=2, steps=_STEPS):
    train = [sys.executable, "-m", "jax_ulysses.models.train"]
    if processes > 1:
        launch = ["-m", "jax_ulysses.launch", "-n", str(processes), "--cpu"]
        train = [train[0], *launch, *train[1:]]
    sizes = ["--seq-len", "32", "--batch", "4", "--steps", str(steps)]
    return [*train, "--data", str(text), "--out", str(out), *sizes, *more]


def _run(command):
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=240, env=_ENVIRONMENT
    )
    return result.returncode, result.stdout, result.stderr


def _losses(out):
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


@pytest.fixture(scope="module")
def straight(text, tmp_path_factory):
    """Two processes, one rank each, to the end; with the comparison."""
    out = tmp_path_factory.mktemp("straight")
    code, stdout, stderr = _run(_command(text, out))
    assert code == 0, stderr
    return out, json.loads(stdout.splitlines()[-1])


def test_one_process_speaks_for_all(straight):
    out, summary = straight
    # The launcher's processes are the context-parallel ranks, without being told.
    assert summary["mesh"] == {"dp": 1, "cp": 2}
    assert summary["processes"] == 2
    assert summary["steps"] == len(_losses(out)) == _STEPS
    assert summary["parity"]["against"] == {"dp": 1, "cp": 1}
    assert summary["parity"]["steps"] == _STEPS
    assert summary["parity"]["loss_max_abs_diff"] <= 1e-5
    assert summary["parity"]["params_max_abs_diff"] > 0, "compared with itself?"
    assert (out / "loss.png").exists()


def test_the_same_as_in_one_process(text, tmp_path, straight):
    more = ["--dp", "1", "--cp", "2", "--no-parity"]
    code, _, stderr = _run(_command(text, tmp_path, *more, processes=1))
    assert code == 0, stderr
    assert _losses(tmp_path) == pytest.approx(_losses(straight[0]), abs=1e-5)


def test_stopped_and_continued_it_has_the_same_bits(text, tmp_path, straight):
    """Ctrl-C reaches all processes, which stop after the same step."""
    out = tmp_path / "run"
    slow = ["--no-parity", "--checkpoint-every", "3"]
    process = subprocess.Popen(
        _command(text, out, *slow),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=_ENVIRONMENT,
    )
    metrics = out / "metrics.jsonl"
    try:
        _wait_for(process, lambda: metrics.exists() and metrics.read_text())
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 130, stderr
    # Gloo, which carries XLA's collectives between processes on CPUs, says hello.
    assert all(line.startswith("[Gloo]") for line in stdout.splitlines())
    assert "Traceback" not in stderr
    done = len(_losses(out))
    assert 1 <= done < _STEPS
    assert f"interrupted: {done} of {_STEPS} steps are saved in {out}" in stderr
    printed = stderr.partition("continue with\n")[2].splitlines()[0].strip()
    launcher = "-m jax_ulysses.launch -n 2 --cpu -m jax_ulysses.models.train "
    assert launcher in printed
    code, stdout, stderr = _run(shlex.split(printed))
    assert code == 0, stderr
    assert f"resumed after step {done}" in stderr
    assert json.loads(stdout.splitlines()[-1])["parity"] is None
    assert _losses(out) == _losses(straight[0])


def test_killed_and_continued_it_has_the_same_bits(text, tmp_path, straight):
    """Without a chance to save: from the last checkpoint on, step by step the same."""
    out = tmp_path / "run"
    process = subprocess.Popen(
        _command(text, out, "--no-parity", "--checkpoint-every", "3"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=_ENVIRONMENT,
    )
    try:
        _wait_for(process, (out / "checkpoints" / "3").is_dir)
    finally:
        process.kill()
        process.wait()
    resume = ["--resume", "--no-parity", "--checkpoint-every", "3"]
    code, _, stderr = _run(_command(text, out, *resume))
    assert code == 0, stderr
    assert "resumed after step " in stderr
    assert _losses(out) == _losses(straight[0])


def test_a_finished_run_resumed_has_nothing_to_do(tmp_path, straight):
    out = tmp_path / "run"
    shutil.copytree(straight[0], out)
    resume = ["--resume", "--out", str(out)]
    launch = ["-m", "jax_ulysses.launch", "-n", "2", "--cpu"]
    train = ["-m", "jax_ulysses.models.train", *resume]
    code, stdout, stderr = _run([sys.executable, *launch, *train])
    assert code == 0, stderr
    summary = json.loads(stdout.splitlines()[-1])
    assert summary["params_sha256"] == straight[1]["params_sha256"]
    assert summary["parity"] is summary["tokens_per_s"] is None
    assert _losses(out) == _losses(straight[0])


def _launch_program(tmp_path, program, *arguments):
    """Two processes of a program that does something else in process 1."""
    file = tmp_path / "program.py"
    file.write_text(textwrap.dedent(program))
    launch = ["-m", "jax_ulysses.launch", "-n", "2", "--cpu"]
    logs = ["--log-dir", str(tmp_path / "logs")]
    return _run([sys.executable, *launch, *logs, str(file), *map(str, arguments)])


_SIZES = ["--seq-len", "32", "--batch", "4", "--no-parity"]


def test_processes_with_different_texts_do_not_train(text, tmp_path):
    program = """
        import os, sys
        from jax_ulysses.models import train
        name = "ab"[int(os.environ["JAX_ULYSSES_PROCESS_ID"])]
        sys.exit(train.main([*sys.argv[2:], "--data", f"{sys.argv[1]}/{name}.txt"]))
    """
    out = tmp_path / "run"
    arguments = [text, "--out", out, *_SIZES]
    code, _, _ = _launch_program(tmp_path, program, *arguments)
    assert code == 2
    prints = [load_corpus(text / name, 32).fingerprint for name in ("a.txt", "b.txt")]
    expected = (
        "error: the fingerprint of the text must be the same in all processes: "
        f"process 0 has {prints[0]}, process 1 has {prints[1]}"
    )
    for index in range(2):
        log = (tmp_path / "logs" / f"rank_{index}.log").read_text()
        assert expected in log.splitlines()
    assert not out.exists()


def test_every_process_can_be_asked_to_stop(text, tmp_path):
    program = """
        import os, signal, sys
        from jax_ulysses.models import train
        from jax_ulysses.models.report import Metrics

        add = Metrics.add

        def add_and_stop(self, record):
            add(self, record)
            if os.environ["JAX_ULYSSES_PROCESS_ID"] == "1" and record.step == 1:
                os.kill(os.getpid(), signal.SIGTERM)

        Metrics.add = add_and_stop
        sys.exit(train.main(sys.argv[1:]))
    """
    out = tmp_path / "run"
    arguments = ["--data", text, "--out", out, *_SIZES, "--steps", "1000"]
    code, _, stderr = _launch_program(tmp_path, program, *arguments)
    assert code == 130, stderr
    done = len(_losses(out))
    assert 2 <= done < 1000
    assert f"interrupted: {done} of 1000 steps are saved in {out}" in stderr
    assert (out / "checkpoints" / str(done)).is_dir()


def test_a_mesh_that_leaves_a_process_idle(text, tmp_path):
    code, _, stderr = _run(_command(text, tmp_path, "--cp", "1", "--dp", "1"))
    assert code == 2
    assert "dp 1 x cp 1 leaves 1 of 2 processes without a device" in stderr


def test_host_needs_one_process(text, tmp_path):
    code, _, stderr = _run(_command(text, tmp_path, "--implementation", "host"))
    assert code == 2
    assert "needs all devices in one process, but 1 of 2 belong to others" in stderr


def _wait_for(process: subprocess.Popen, condition):
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, "ended too early"
        assert time.monotonic() < deadline, "not within two minutes"
        time.sleep(0.02)
