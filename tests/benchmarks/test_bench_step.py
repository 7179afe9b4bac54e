# SPDX-License-Identifier: Apache-2.0
"""The step benchmark, on virtual CPU devices."""

import json
import os
import subprocess
import sys

import pytest


@pytest.fixture(scope="module")
def rows(root, tmp_path_factory):
    implementations = "host,host unmarked,separate,xla,cuda"
    return measure(root, tmp_path_factory, [], implementations, devices=2)


def measure(root, tmp_path_factory, launcher, implementations, devices):
    """Runs the program; variant -> its row."""
    out = tmp_path_factory.mktemp("step") / "rows.jsonl"
    options = {
        "geometries": "tiny", "sequences": 64, "layers": 1, "rounds": 2,
        "native": "host", "implementations": implementations,
        "attention": "xla", "modes": "graph", "workspace-mib": 64, "out": out,
    }  # fmt: skip
    program = str(root / "benchmarks" / "bench_step.py")
    command = [sys.executable, *launcher, program]
    for name, value in options.items():
        command += [f"--{name}", str(value)]
    flags = f"--xla_force_host_platform_device_count={devices}"
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    found = {row["variant"]: row for row in lines}
    assert len(found) == len(lines), lines
    return found


def test_every_variant_is_there(rows):
    names = {"host", "host unmarked", "separate", "xla", "no exchange"}
    assert set(rows) == names | {"cuda"}
    assert "not on cpu" in rows["cuda"]["refused"]
    for name in names:
        assert 0 < rows[name]["us_p10"] <= rows[name]["us"]
        assert rows[name]["temporaries_mib"] > 0


def test_they_train_alike_but_for_the_one_that_is_wrong_on_purpose(rows):
    losses = {name: rows[name]["loss"] for name in rows if "loss" in rows[name]}
    assert abs(losses["host"] - losses["xla"]) < 1e-3, losses
    assert losses["host unmarked"] == losses["host"], losses
    assert abs(losses["separate"] - losses["xla"]) < 1e-3, losses
    assert abs(losses["no exchange"] - losses["xla"]) > 2e-3, losses


def test_of_several_processes_the_first_one_reports(root, tmp_path_factory):
    launcher = ["-m", "jax_ulysses.launch", "-n", "2", "--cpu"]
    rows = measure(root, tmp_path_factory, launcher, "xla,cuda", devices=1)
    assert set(rows) == {"xla", "cuda", "no exchange"}
    assert {row["processes"] for row in rows.values()} == {2}
    assert "not on cpu" in rows["cuda"]["refused"]
    assert rows["xla"]["us"] > 0
    assert abs(rows["no exchange"]["loss"] - rows["xla"]["loss"]) > 2e-3
