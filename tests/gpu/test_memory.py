# SPDX-License-Identifier: Apache-2.0
"""What XLA plans for a fused step, against the separate one, compiled on one GPU."""

import json
import os
import subprocess
import sys

import pytest

from jax_ulysses.testing.rigs import environment_of
from tests.gpu.conftest import RIG, ROOT

if RIG == "cpu":
    pytest.skip("needs a GPU: compiles for GPUs like it", allow_module_level=True)

LIMIT_S = 120


@pytest.mark.timeout(LIMIT_S + 30)
def test_a_fused_step_needs_no_more_than_a_separate_one(tmp_path):
    out = tmp_path / "rows.jsonl"
    options = {
        "ranks": "2,8", "geometries": "llama3_8b,gpt_oss_d64", "sequences": 65536,
        "implementations": "cuda,separate", "out": out,
    }  # fmt: skip
    command = [sys.executable, str(ROOT / "benchmarks" / "bench_memory.py")]
    for name, value in options.items():
        command += [f"--{name}", str(value)]
    done = subprocess.run(
        command,
        env=os.environ | environment_of("devices", 1),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    plan = {
        (r["variant"], r["ranks"], r["geometry"]): r["temporaries_mib"] for r in rows
    }
    for ranks in (2, 8):
        for geometry in ("llama3_8b", "gpt_oss_d64"):
            fused, separate = (plan[v, ranks, geometry] for v in ("cuda", "separate"))
            assert 1000 < fused <= separate, (ranks, geometry, plan)
