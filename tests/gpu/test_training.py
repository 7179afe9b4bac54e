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
        _results[num_ranks] = make_rig(num_ranks).run(
            "tests.gpu.training_cases:run_all", timeout_s=200
        )
    return _results[num_ranks]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("results", RANKS, indirect=True, ids=lambda p: f"P{p}")
@pytest.mark.parametrize("name", NAMES)
def test_case(name, results):
    for result in results:
        outcome = result.value[name]
        assert outcome["failure"] is None, f"process {result.index}: {outcome}"


@pytest.mark.timeout(400)
@pytest.mark.parametrize("num_ranks", RANKS, ids=lambda p: f"P{p}")
def test_a_step_in_cuda_graphs_is_the_same_step(make_rig, num_ranks):
    steps = 30 if RIG != "cpu" else 3  # Where there are no graphs.
    runs = {}
    for name, flag in {
        "graphs": "--xla_gpu_graph_min_graph_size=1",
        "none": "--xla_gpu_enable_command_buffer=",
    }.items():
        flags = f"--xla_gpu_deterministic_ops=true {flag}"
        results = make_rig(num_ranks).run(
            "tests.gpu.training_cases:curve",
            steps,
            timeout_s=180,
            environment={} if RIG == "cpu" else {"XLA_FLAGS": flags},
        )
        runs[name] = [r.value for r in results]
    for with_graphs, without in zip(runs["graphs"], runs["none"], strict=True):
        assert len(with_graphs["losses"]) == steps
        assert with_graphs["losses"] == without["losses"]
        assert with_graphs["params"] == without["params"]
        if RIG != "cpu":  # Captured: most calls are replays, which no handler sees.
            assert without["handler_calls"] % steps == 0
            assert with_graphs["handler_calls"] < without["handler_calls"] / 3


@pytest.mark.timeout(240)
@pytest.mark.parametrize("results", RANKS, indirect=True, ids=lambda p: f"P{p}")
def test_all_processes_report_the_same_losses(results):
    first, *others = [r.value["training"]["value"]["losses"] for r in results]
    assert first
    if not others:
        pytest.skip("needs several processes")
    assert all(losses == first for losses in others)
