# SPDX-License-Identifier: Apache-2.0
"""The memory benchmark, on virtual CPU devices."""

import json
import os
import subprocess
import sys

import pytest


@pytest.fixture(scope="module")
def rows(root, tmp_path_factory):
    out = tmp_path_factory.mktemp("memory") / "rows.jsonl"
    options = {
        "ranks": "2,4", "geometries": "tiny", "sequences": "64,512", "layers": 1,
        "native": "host", "implementations": "host,separate,xla,cuda",
        "attention": "xla", "workspace-mib": 64, "out": out,
    }  # fmt: skip
    command = [sys.executable, str(root / "benchmarks" / "bench_memory.py")]
    for name, value in options.items():
        command += [f"--{name}", str(value)]
    flags = "--xla_force_host_platform_device_count=4"
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_every_case_is_there(rows):
    cases = {(row["ranks"], row["sequence"], row["variant"]) for row in rows}
    variants = ("host", "separate", "xla", "cuda")
    wanted = {(p, s, v) for p in (2, 4) for s in (64, 512) for v in variants}
    assert cases == wanted
    assert len(rows) == len(wanted)


def test_what_cannot_be_compiled_says_why(rows):
    for row in rows:
        if row["variant"] == "cuda":
            assert "not on cpu" in row["refused"]
        else:
            assert row["arguments_mib"] > 0


def test_longer_sequences_need_more_and_more_ranks_less(rows):
    plan = {
        (row["ranks"], row["sequence"]): row["temporaries_mib"]
        for row in rows
        if row["variant"] == "host"
    }
    assert plan[2, 512] > plan[2, 64] > 0
    assert plan[2, 512] > plan[4, 512]
