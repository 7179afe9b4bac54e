# SPDX-License-Identifier: Apache-2.0
"""Results and gradients of the ``pallas`` operators on ranks, against the oracle."""

import dataclasses

import jax_ulysses as ju
from tests.gpu.value_cases import WORKSPACE_BYTES, check_projection, run_jobs
from tests.helpers.projection_cases import Case


def cases(num_ranks: int) -> dict[str, Case]:
    """Shapes with tails in every dimension, both orders, both dtypes."""
    p = num_ranks
    found = {
        "qkv": Case("qkv_proj_a2a", 1, 520, 512, 2 * p, p, 128, "bfloat16"),
        "out": Case("a2a_out_proj", 1, 520, 512, 2 * p, p, 128, "bfloat16"),
        "qkv-h80-b2": Case("qkv_proj_a2a", 2, 37, 320, p, p, 80, "bfloat16"),
        "out-h80-b2": Case("a2a_out_proj", 2, 37, 320, p, p, 80, "float16"),
        "qkv-zigzag": Case("qkv_proj_a2a", 2, 100, 256, 3 * p, p, 96, "float16", True),
        "out-zigzag": Case("a2a_out_proj", 1, 264, 2880, p, p, 256, "bfloat16", True),
        "q": Case("q_proj_a2a", 1, 1000, 640, p, p, 192, "bfloat16", bias=False),
        # Larger ones. Which tilings they take depends on how many SMs a rank has;
        # test_tilings.py has every tiling.
        "out-d5120": Case("a2a_out_proj", 1, 500, 5120, 2 * p, p, 64, "bfloat16"),
        "qkv-d5120": Case("qkv_proj_a2a", 1, 500, 5120, 2 * p, p, 64, "float16"),
        "qkv-d3072": Case("qkv_proj_a2a", 1, 500, 3072, 2 * p, p, 64, "bfloat16"),
        "out-d3584": Case("a2a_out_proj", 1, 500, 3584, 2 * p, p, 64, "bfloat16"),
        "qkv-d3584": Case("qkv_proj_a2a", 1, 500, 3584, 2 * p, p, 64, "float16"),
        "features": Case("a2a_proj/features", 3, 24, 640, p, p, 64, "bfloat16"),
    }
    if p > 2:
        found["replicated"] = Case(
            "qkv_proj_a2a", 2, 64, 128, 2 * p, p // 2, 64, "bfloat16", True
        )
    return found


def run_all(rank, only=None) -> dict:
    """Runs every case on this rank; case name -> errors, failure and seconds."""
    ju.initialize(rank.mesh, "cp", WORKSPACE_BYTES, sm_budget=rank.sm_budget)
    rank = dataclasses.replace(rank, implementation="pallas")
    jobs = {n: (_check, (case,)) for n, case in cases(rank.num_ranks).items()}
    results = run_jobs(rank, jobs, only)
    ju.finalize()
    return results


def _check(rank, case) -> dict:
    result = check_projection(rank, case)
    operator = case.operator.partition("/")[0]
    for part in (operator, f"{operator}.backward"):
        taken = ju.taken_implementations()[part]["implementation"]
        assert taken == "pallas", (part, taken)
    return result
