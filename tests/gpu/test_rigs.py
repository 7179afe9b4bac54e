# SPDX-License-Identifier: Apache-2.0
"""How ``run_ranks`` reports, on virtual CPU devices."""

import time

import pytest

from jax_ulysses.testing import RanksFailed, run_ranks
from tests.gpu.conftest import ROOT


def _run(function, *args, **kwargs):
    kwargs = {"rig": "cpu", "paths": [ROOT], "timeout_s": 60, **kwargs}
    return run_ranks(f"tests.gpu.misbehaviour:{function}", 3, *args, **kwargs)


def test_results_come_back(tmp_path):
    (result,) = _run("describes", 1, "two", log_dir=tmp_path)
    assert result.value == {
        "ranks": 3,
        "axes": {"cp": 3},
        "implementation": "host",
        "args": [1, "two"],
    }
    assert result.returncode == 0
    assert {p.name for p in tmp_path.iterdir()} == {"rank_0.log", "rank_0.json"}


def test_a_failure_shows_its_log():
    with pytest.raises(RanksFailed, match="process 0 ended with code 1") as caught:
        _run("fails", "because of this")
    assert "RuntimeError: because of this" in str(caught.value)
    assert caught.value.results[0].value is None


def test_time_runs_out():
    start = time.monotonic()
    with pytest.raises(RanksFailed, match=r"\[0\] did not end within 8 s") as caught:
        _run("sleeps", 300, timeout_s=8)
    assert time.monotonic() - start < 30
    assert "asleep" in str(caught.value)


def test_an_expected_death():
    (result,) = _run("dies", may_fail=[0])
    assert (result.returncode, result.value) == (7, None)


def test_an_unknown_function():
    with pytest.raises(RanksFailed, match="has no attribute 'nothing'"):
        _run("nothing")
