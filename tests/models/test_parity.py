# SPDX-License-Identifier: Apache-2.0
"""What the comparison with cp = 1 says when something is wrong."""

import json
import math
import types

import jax
import numpy as np
import pytest

from jax_ulysses.models import train
from jax_ulysses.models.parity import compare
from jax_ulysses.models.report import StepRecord
from jax_ulysses.models.summary import to_json

_PARAMS = {"a": np.ones(3), "b": np.ones(3)}


def _records(*losses):
    return [
        StepRecord(step=step, loss=loss, grad_norm=1.0, seconds=1.0)
        for step, loss in enumerate(losses)
    ]


def _compare(losses, params):
    """A run's results, compared with losses of 5 and parameters of 1."""

    def run(_state, _first_step, on_step):
        for record in _records(*[5.0] * len(losses)):
            on_step(record, None)
        return {"params": _PARAMS}

    reference = types.SimpleNamespace(
        mesh=types.SimpleNamespace(shape={"dp": 1, "cp": 1}),
        put_state=lambda state: state,
        run=run,
    )
    return compare(reference, None, _records(*losses), params, lambda _: False)


def test_the_largest_differences():
    params = {"a": np.array([1.0, 1.5, 1.0]), "b": np.array([1.0, 1.0, 0.75])}
    result = _compare([5.0, 5.25, 4.5], params)
    assert result["loss_max_abs_diff"] == 0.5
    assert result["first_loss_abs_diff"] == 0
    assert result["params_max_abs_diff"] == 0.5
    assert result["params_relative_l2_diff"] == pytest.approx((0.3125 / 6) ** 0.5, 1e-2)


@pytest.mark.parametrize("where", range(3))
def test_nan_is_the_largest_difference(where):
    losses = [5.0] * 3
    losses[where] = math.nan
    assert math.isnan(_compare(losses, _PARAMS)["loss_max_abs_diff"])


@pytest.mark.parametrize("name", _PARAMS)
def test_nan_in_the_parameters(name):
    result = _compare([5.0], _PARAMS | {name: np.full(3, math.nan)})
    assert math.isnan(result["params_max_abs_diff"])
    assert math.isnan(result["params_relative_l2_diff"])


def test_the_summary_is_json_without_nan():
    numbers = {"a": math.nan, "b": math.inf, "c": 1.5, "d": 2, "e": None}
    line = to_json({"parity": numbers, "loss": math.nan, "out": "NaN"})
    expected = numbers | {"a": None, "b": None}
    assert json.loads(line, parse_constant=pytest.fail) == {
        "parity": expected,
        "loss": None,
        "out": "NaN",
    }


def test_a_run_survives_its_comparison(text, tmp_path, monkeypatch, capsys):
    """Whole sequences on one device need more memory than the run that cuts them."""

    def no_memory(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 128 GiB\nand much more")

    monkeypatch.setattr("jax_ulysses.models.train.compare", no_memory)
    sizes = ["--seq-len", "32", "--batch", "4", "--steps", "1"]
    assert train.main(["--data", str(text), "--out", str(tmp_path), *sizes]) == 3
    captured = capsys.readouterr()
    summary = json.loads(captured.out)
    assert summary["first_loss"] == summary["last_loss"] > 0
    error = "JaxRuntimeError: RESOURCE_EXHAUSTED: 128 GiB"
    assert summary["parity"] == {"error": error}
    last = captured.err.splitlines()[-1]
    assert last == f"error: parity could not be checked: {error}"
