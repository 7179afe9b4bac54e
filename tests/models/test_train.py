# SPDX-License-Identifier: Apache-2.0
"""Whole runs: summary, parity, resume, Ctrl-C."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import pytest

from jax_ulysses.models import train
from jax_ulysses.models.report import Metrics

_STEPS = 12
_STOP_AFTER = 5


def _arguments(text, out, *more):
    sizes = ["--seq-len", "32", "--batch", "4", "--steps", str(_STEPS)]
    return ["--data", str(text), "--out", str(out), *sizes, *more]


def _losses(out):
    lines = (out / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert [record["step"] for record in records] == list(range(_STEPS))
    return [record["loss"] for record in records]


@pytest.fixture(scope="module")
def finished(text, tmp_path_factory):
    """A run to the end, and its folder."""
    out = tmp_path_factory.mktemp("finished")
    capture = pytest.MonkeyPatch()
    lines = []
    capture.setattr("builtins.print", lambda *a, **k: lines.append((a[0], k)))
    try:
        assert train.main(_arguments(text, out)) == 0
    finally:
        capture.undo()
    (summary,) = [text for text, options in lines if "file" not in options]
    return out, json.loads(summary)


@pytest.fixture(scope="module")
def interrupted(text, tmp_path_factory):
    """A run that gets Ctrl-C during a step, in this process."""
    out = tmp_path_factory.mktemp("interrupted")
    add = Metrics.add

    def add_and_interrupt(self, record):
        add(self, record)
        if record.step == _STOP_AFTER - 1:
            signal.raise_signal(signal.SIGINT)

    patch = pytest.MonkeyPatch()
    patch.setattr(Metrics, "add", add_and_interrupt)
    # Not always Python's own: a background job of a shell ignores SIGINT.
    before = signal.getsignal(signal.SIGINT)
    try:
        assert train.main(_arguments(text, out, "--no-parity")) == 130
    finally:
        patch.undo()
    assert signal.getsignal(signal.SIGINT) is before
    return out


def test_summary(finished):
    out, summary = finished
    assert summary["devices"] == 8
    assert summary["mesh"] == {"dp": 2, "cp": 4}
    assert summary["implementation"]["qkv_proj_a2a"]["implementation"] == "xla"
    assert summary["implementation"]["a2a_out_proj"]["implementation"] == "xla"
    losses = _losses(out)
    assert summary["first_loss"] == round(losses[0], 4)
    assert summary["last_loss"] == round(losses[-1], 4)
    assert losses[-1] < losses[0]
    assert summary["tokens_per_s"] > 0
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_context_parallelism_does_not_change_the_losses(finished):
    parity = finished[1]["parity"]
    assert parity["against"] == {"dp": 2, "cp": 1}
    assert parity["steps"] == _STEPS
    assert parity["loss_max_abs_diff"] <= 1e-5
    assert parity["params_relative_l2_diff"] <= 1e-4
    assert parity["params_max_abs_diff"] > 0, "compared with itself?"


@pytest.mark.parametrize("mesh", [(2, 4), (4, 2)])
def test_resume_continues_the_same_run(mesh, finished, interrupted, tmp_path):
    out = tmp_path / "copy"
    subprocess.run(["cp", "-r", interrupted, out], check=True)
    assert len((out / "metrics.jsonl").read_text().splitlines()) == _STOP_AFTER
    dp, cp = map(str, mesh)
    arguments = ["--resume", "--out", str(out), "--dp", dp, "--cp", cp, "--no-parity"]
    assert train.main(arguments) == 0
    resumed, straight = _losses(out), _losses(finished[0])
    if mesh == (2, 4):
        assert resumed == straight
    else:
        assert resumed == pytest.approx(straight, abs=1e-5)


def test_a_finished_run_resumed_without_its_metrics(finished, tmp_path, capsys):
    out = tmp_path / "copy"
    shutil.copytree(finished[0], out)
    (out / "metrics.jsonl").write_text("")
    assert train.main(["--resume", "--out", str(out)]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["first_loss"] is summary["last_loss"] is None
    for name in ("steps", "valid_loss", "params_sha256"):
        assert summary[name] == finished[1][name]


def test_resume_refuses_another_run(interrupted, capsys):
    arguments = ["--resume", "--out", str(interrupted), "--lr", "0.5"]
    assert train.main(arguments) == 2
    assert "cannot resume: the checkpoint was made with lr=" in capsys.readouterr().err


def test_a_run_inside_the_folder_of_its_text(text, tmp_path, capsys):
    root = shutil.copytree(text, tmp_path / "text")
    assert train.main(_arguments(root, root / "out", "--no-parity")) == 0
    resume = ["--resume", "--no-parity", "--out", str(root / "out")]
    assert train.main(resume) == 0
    (root / "c.txt").write_text("more")
    assert train.main(resume) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"error: cannot resume: the text has changed, {root} is")


def test_zigzag_is_the_same_run(text, tmp_path, finished):
    arguments = _arguments(text, tmp_path, "--token-order", "zigzag", "--no-parity")
    assert train.main(arguments) == 0
    assert _losses(tmp_path) == pytest.approx(_losses(finished[0]), abs=1e-5)


def test_bf16_trains(text, tmp_path, finished):
    arguments = _arguments(text, tmp_path, "--dtype", "bf16", "--no-parity")
    assert train.main(arguments) == 0
    losses, exact = _losses(tmp_path), _losses(finished[0])
    assert losses != exact
    assert losses == pytest.approx(exact, abs=0.1)


def test_ctrl_c_in_a_process_of_its_own(text, tmp_path):
    out = tmp_path / "run"
    sizes = ["--seq-len", "32", "--batch", "4", "--steps", "100000", "--no-parity"]
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    process = subprocess.Popen(
        [sys.executable, "-m", "jax_ulysses.models.train"]
        + ["--data", str(text), "--out", str(out), *sizes],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        _wait_for_steps(process, out, 2)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, stderr
    assert stdout == ""
    assert "Traceback" not in stderr
    done = len((out / "metrics.jsonl").read_text().splitlines())
    assert f"interrupted: {done} of 100000 steps are saved in {out}" in stderr
    command = f"{sys.executable} -m jax_ulysses.models.train --resume --out {out}"
    assert f"\n  {command} --no-parity\n" in stderr
    assert (out / "checkpoints" / str(done)).is_dir()


def _wait_for_steps(process: subprocess.Popen, out: pathlib.Path, steps: int):
    deadline = time.monotonic() + 120
    metrics = out / "metrics.jsonl"
    while time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()
        if metrics.exists() and len(metrics.read_text().splitlines()) >= steps:
            return
        time.sleep(0.2)
    pytest.fail("no step within two minutes")


def test_the_host_protocol_trains_the_same(text, tmp_path, finished):
    # In a process of its own: a crash of native code must not end the test run.
    arguments = _arguments(text, tmp_path, "--implementation", "host", "--no-parity")
    result = subprocess.run(
        [sys.executable, "-m", "jax_ulysses.models.train", *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    taken = json.loads(result.stdout)["implementation"]
    assert {entry["implementation"] for entry in taken.values()} == {"host"}
    assert _losses(tmp_path) == pytest.approx(_losses(finished[0]), abs=1e-5)
