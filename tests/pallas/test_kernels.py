# SPDX-License-Identifier: Apache-2.0
"""The kernel in Pallas's interpreter, against numpy; each case in its own process.

tests/gpu has the kernel on a GPU.
"""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from tests.pallas.run_kernel import LIMITS

SCRIPT = pathlib.Path(__file__).with_name("run_kernel.py")
SMALL = {"tile_m": 128, "tile_n": 128, "stages": 2}
# The warpgroups divide the columns.
HALF = {"tile_m": 64, "split": "n"}
BASE = {
    "dataflow": "gemm_a2a",
    "rows": 128,
    "other": 128,
    "heads": (4, 2, 2),
    "head_dim": 64,
    "ranks": 2,
    "dtype": "bfloat16",
    "bias": True,
    "w_transposed": False,
    "sms": 2,
    "config": SMALL,
}
CASES = {
    "split heads": {},
    "transposed weight": {"w_transposed": True, "bias": False},
    "replicated heads, float16": {"ranks": 4, "dtype": "float16"},
    "rows that are no multiple of 8, one tile for two SMs": {"rows": 13},
    "tails in rows, columns and depth": {"rows": 136, "other": 80, "head_dim": 80},
    "columns split between warpgroups": {"config": SMALL | {"split": "n"}},
    "more tiles than SMs": {"rows": 384, "other": 64, "sms": 1, "head_dim": 96},
    "default tiling": {"config": {}, "rows": 72, "other": 64},
    "stored beside the next tile, which has fewer steps than pieces": {
        "config": {},
        "rows": 392,
        "other": 128,
        "sms": 1,
    },
    "stored beside the next tile, replicated heads, tails": {
        "config": {},
        "rows": 200,
        "other": 400,
        "head_dim": 80,
        "ranks": 4,
        "sms": 2,
    },
    "stored beside the next tile, gather, transposed weight": {
        "config": {"tile_n": 192},
        "dataflow": "a2a_gemm",
        "rows": 264,
        "other": 528,
        "w_transposed": True,
        "sms": 2,
    },
    "192 columns": {"config": {"tile_n": 192}, "rows": 72, "other": 64, "ranks": 1},
    "160 columns, five stages": {
        "config": {"tile_n": 160, "stages": 5},
        "rows": 136,
        "w_transposed": True,
    },
    "160 columns, narrow swizzle": {
        "config": {"tile_n": 160, "stages": 5},
        "dataflow": "a2a_gemm",
        "rows": 72,
        "other": 352,
    },
    "64 rows, 128 columns": {
        "config": HALF | {"tile_n": 128, "stages": 8},
        "rows": 136,
        "ranks": 4,
        "dtype": "float16",
    },
    "64 rows, 192 columns, tails in rows, columns and depth": {
        "config": HALF | {"tile_n": 192, "stages": 6},
        "rows": 72,
        "other": 80,
        "head_dim": 80,
    },
    "64 rows, 320 columns": {
        "config": HALF | {"tile_n": 320, "band": 32},
        "rows": 72,
        "sms": 3,
    },
    "64 rows, 320 columns, transposed weight": {
        "config": HALF | {"tile_n": 320},
        "rows": 200,
        "other": 80,
        "head_dim": 80,
        "w_transposed": True,
    },
    "64 rows, 448 columns, three stages": {
        "config": HALF | {"tile_n": 448, "stages": 3},
        "rows": 72,
        "other": 320,
    },
    "64 rows, gather": {
        "config": HALF | {"tile_n": 320},
        "dataflow": "a2a_gemm",
        "rows": 72,
        "other": 384,
    },
    "64 rows, gather, transposed weight, tails": {
        "config": HALF | {"tile_n": 192},
        "dataflow": "a2a_gemm",
        "rows": 40,
        "other": 208,
        "head_dim": 96,
        "w_transposed": True,
    },
    "turns, an odd number of tiles": {
        "config": SMALL | {"split": "tiles"},
        "rows": 392,
        "other": 80,
        "sms": 1,
    },
    "turns, transposed weight, fewer steps than stages, one tile for a CTA": {
        "config": SMALL | {"split": "tiles", "stages": 6},
        "rows": 136,
        "other": 32,
        "w_transposed": True,
    },
    "turns, tails": {
        "config": {"tile_n": 128, "stages": 6, "split": "tiles"},
        "dataflow": "a2a_gemm",
        "rows": 264,
        "other": 144,
        "head_dim": 80,
        "sms": 1,
    },
    "gather": {"dataflow": "a2a_gemm"},
    "gather, transposed weight": {"dataflow": "a2a_gemm", "w_transposed": True},
    "gather, tails": {"dataflow": "a2a_gemm", "rows": 40, "head_dim": 80, "other": 48},
    "gather, one copy": {"dataflow": "a2a_gemm", "ranks": 4, "bias": False},
}


@pytest.mark.parametrize("name", CASES)
def test_interpreted(name):
    case = BASE | CASES[name]
    run = subprocess.run(
        [sys.executable, SCRIPT, json.dumps(case)],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "PYTHONSAFEPATH": "1", "XLA_FLAGS": ""},
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert json.loads(run.stdout.splitlines()[-1]) <= LIMITS[case["dtype"]]
