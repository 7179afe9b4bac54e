# SPDX-License-Identifier: Apache-2.0
"""Sums over the heap, split backward passes and training on the ranks of a rig."""

import pytest

from tests.gpu import training_cases
from tests.gpu.conftest import RANKS, RIG

NAMES = [case.__name__ for case in training_cases.CASES]
_results: dict[int, list] = {}


@pytest.fixture
def results(request, make_rig):
    num_ranks = request.param
    if num_ranks not in _results:
        # As the launcher does: ranks that share a GPU must not make graphs.
        flags = "--xla_gpu_enable_command_buffer=" if RIG == "shared" else ""
        _results[num_ranks] = make_rig(num_ranks).run(
            "tests.gpu.training_cases:run_all",
            timeout_s=200,
            environment={} if RIG == "cpu" else {"XLA_FLAGS": flags},
        )
    return _results[num_ranks]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("results", RANKS, indirect=True, ids=lambda p: f"P{p}")
@pytest.mark.parametrize("name", NAMES)
def test_case(name, results):
    for result in results:
        outcome = result.value[name]
        assert outcome["failure"] is None, f"process {result.index}: {outcome}"


@pytest.mark.timeout(240)
@pytest.mark.parametrize("results", RANKS, indirect=True, ids=lambda p: f"P{p}")
def test_all_processes_report_the_same_losses(results):
    first, *others = [r.value["training"]["value"]["losses"] for r in results]
    assert first
    if not others:
        pytest.skip("needs several processes")
    assert all(losses == first for losses in others)
