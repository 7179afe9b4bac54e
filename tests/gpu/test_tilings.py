# SPDX-License-Identifier: Apache-2.0
"""The Pallas GEMM with each of its tilings, on one GPU and without an exchange."""

import contextlib
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


LIMIT_S = 400


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    """Of one process that runs all cases: pytest's own must not hold the GPU.

    What it wrote until it ended, or was ended: a kernel that hangs stops all that come
    after it, not those before.
    """
    path = tmp_path_factory.mktemp("tilings") / "output"
    with path.open("w") as file, contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run(
            [sys.executable, "-m", "tests.gpu.tilings"],
            stdout=file,
            stderr=subprocess.STDOUT,
            timeout=LIMIT_S,
            cwd=ROOT,
            env=os.environ | environment_of("devices", 1),
        )
    return path.read_text()


@pytest.fixture(scope="module")
def outcomes(output):
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return {line["name"]: line for line in lines}


@pytest.mark.timeout(LIMIT_S + 30)
@pytest.mark.parametrize("name", tilings.cases())
def test_tiling(name, outcomes, output):
    assert name in outcomes, f"did not end within {LIMIT_S} s: {output[-2000:]}"
    outcome = outcomes[name]
    assert outcome["distance"] <= LIMITS[tilings.cases()[name]["dtype"]]
    assert outcome["same"], "a second call gave other bits"
