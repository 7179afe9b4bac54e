# SPDX-License-Identifier: Apache-2.0
"""The Pallas GEMM with each of its tilings, on one GPU and without an exchange."""

import json
import os
import subprocess
import sys

import pytest

from jax_ulysses.testing.rigs import environment_of
from tests.gpu import tilings
from tests.gpu.conftest import RIG, ROOT
from tests.pallas.run_kernel import LIMITS

if RIG == "cpu":
    pytest.skip("needs a GPU: Mosaic GPU kernels", allow_module_level=True)


@pytest.fixture(scope="module")
def outcomes():
    """Of all cases, which one process runs: pytest's own must not hold the GPU."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.gpu.tilings"],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
        env=os.environ | environment_of("devices", 1),
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.timeout(330)
@pytest.mark.parametrize("name", tilings.cases())
def test_tiling(name, outcomes):
    outcome = outcomes[name]
    assert outcome["distance"] <= LIMITS[tilings.cases()[name]["dtype"]]
    assert outcome["same"], "a second call gave other bits"
