# SPDX-License-Identifier: Apache-2.0
"""Lives of groups on the ranks of a rig: replays, faults, recovery, errors."""

import numpy as np
import pytest

from tests.gpu import scenarios
from tests.gpu.conftest import RANKS, RIG
from tests.gpu.faults import OWN_PROGRAMS

NAMES = [s.__name__ for s in scenarios.SCENARIOS]
# Every call in a CUDA graph, however small the program is.
FLAGS = f"--xla_gpu_graph_min_graph_size=1 {OWN_PROGRAMS}"
_results: dict[int, list] = {}


@pytest.fixture
def results(request, make_rig):
    num_ranks = request.param
    if num_ranks not in _results:
        environment = {} if RIG == "cpu" else {"XLA_FLAGS": FLAGS}
        _results[num_ranks] = make_rig(num_ranks).run(
            "tests.gpu.scenarios:run_all", timeout_s=380, environment=environment
        )
    return _results[num_ranks]


@pytest.mark.user_case(40, 45, 47, 49, 55)
@pytest.mark.timeout(400)
@pytest.mark.parametrize("results", RANKS, indirect=True, ids=lambda p: f"P{p}")
@pytest.mark.parametrize("name", NAMES)
def test_scenario(name, results):
    for result in results:
        outcome = result.value[name]
        assert outcome["failure"] is None, f"process {result.index}: {outcome}"
    value = results[0].value[name]["value"]
    if isinstance(value, dict) and "not_run" in value:
        pytest.skip(value["not_run"])


@pytest.mark.user_case(43)
@pytest.mark.skipif(RIG == "cpu", reason="there are no graphs on CPUs")
@pytest.mark.timeout(400)
@pytest.mark.parametrize("results", RANKS, indirect=True, ids=lambda p: f"P{p}")
def test_plain_calls_are_captured_into_graphs(results):
    """Otherwise the replay scenario would test nothing but eager calls."""
    for result in results:
        value = result.value["replays_plain"]["value"]
        assert value["handler_calls"] < value["runs"] * value["calls_a_run"] / 4, value


@pytest.mark.user_case(58)
@pytest.mark.skipif(RIG not in ("shared", "processes"), reason="needs a process a rank")
@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("case", ["killed", "killed_in_kernel"])
def test_killed_process(case, num_ranks, make_rig):
    victim = num_ranks - 1
    results = make_rig(num_ranks).run(
        f"tests.gpu.faults:{case}", victim, timeout_s=90, may_fail=[victim]
    )
    assert results[victim].returncode == -9
    named = f"rank {victim} (process "
    for value in [result.value for result in results[:victim]]:
        (heard,) = value["heard"]
        assert named in heard, value
        # At once, not after the deadline of 20 s.
        assert value["later_s"] < 5, value
        assert value["finalize_s"] < 15, value
        # MPS ends the contexts of all its clients when one dies with work under way.
        lost = RIG == "shared" and case == "killed_in_kernel"
        named_later = named in value["later"]
        assert named_later or (lost and "CUDA_ERROR" in value["later"]), value
    # The GPU is usable.
    for result in make_rig(num_ranks).run("tests.gpu.faults:healthy", timeout_s=90):
        assert result.value == "right"


@pytest.mark.user_case(48)
@pytest.mark.skipif(
    RIG not in ("devices", "processes"), reason="needs XLA's collectives on GPUs"
)
@pytest.mark.timeout(200)
@pytest.mark.parametrize("num_ranks", RANKS)
def test_beside_collectives_of_xla(num_ranks, make_rig):
    """With the latency-hiding scheduler, which makes the sums asynchronous.

    Calls that XLA takes for computation were seen to deadlock with the sums here.
    """
    flags = "--xla_gpu_enable_latency_hiding_scheduler=true"
    results = make_rig(num_ranks).run(
        "tests.gpu.beside_collectives:steps",
        300,
        True,
        environment={"XLA_FLAGS": flags},
    )
    for value in [result.value for result in results]:
        assert value["fault"] is None, value
        assert value["finite"]
        assert value["async_sums"] + value["sums"] >= 4, value
        assert value["annotated"] > 0, value


GRAPHS = "--xla_gpu_graph_min_graph_size=1"
NO_GRAPHS = "--xla_gpu_enable_command_buffer="


@pytest.mark.user_case(48)
@pytest.mark.skipif(RIG == "shared", reason="needs XLA's collectives")
@pytest.mark.timeout(400)
@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("hiding", [True, False], ids=["hiding", "in order"])
@pytest.mark.parametrize("graphs", [GRAPHS, NO_GRAPHS], ids=["graphs", "eager"])
def test_sharded_weights(num_ranks, hiding, graphs, make_rig):
    """A whole training step beside all-gathers, reduce-scatters and all-reduces."""
    flags = f"--xla_gpu_enable_latency_hiding_scheduler={str(hiding).lower()} {graphs}"
    if RIG == "cpu":
        if (hiding, graphs) != (True, GRAPHS):
            pytest.skip("CPUs have neither a choice of order nor graphs")
        sizes, environment = (10, 256, 16), {}
    else:
        sizes, environment = (500, 1024, 512), {"XLA_FLAGS": flags}
    results = make_rig(num_ranks).run(
        "tests.gpu.sharded_weights:compare",
        *sizes,
        timeout_s=380,
        environment=environment,
    )
    for value in [result.value for result in results]:
        first, again, xla = (value[name] for name in ("first", "again", "xla"))
        for run in (first, again, xla):
            assert run["fault"] is None, run
            assert min(run[k] for k in ("sums", "scatters", "gathers")) > 0, run
        assert first["calls"] >= 12, first
        losses, few = first["losses"], len(xla["losses"])
        assert losses[-1] < losses[0]
        assert 0 < few < len(losses)
        assert losses[:few] == again["losses"]
        np.testing.assert_allclose(losses[:few], xla["losses"], rtol=1e-2)
