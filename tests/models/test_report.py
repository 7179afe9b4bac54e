# SPDX-License-Identifier: Apache-2.0
"""The history of a run survives what may end the run."""

import json
import math
import pathlib

import pytest

from jax_ulysses.models.config import ConfigError
from jax_ulysses.models.report import Metrics, StepRecord, rewrite


def _record(step):
    return StepRecord(step=step, loss=step / 3, grad_norm=1.0, seconds=0.5)


@pytest.fixture
def path(tmp_path) -> pathlib.Path:
    """The file of a run of four steps."""
    path = tmp_path / "metrics.jsonl"
    metrics = Metrics(path, 0)
    for step in range(4):
        metrics.add(_record(step))
    metrics.close()
    return path


def test_a_resumed_run_keeps_what_was_before(path):
    whole = path.read_text()
    metrics = Metrics(path, 2)
    assert metrics.records == [_record(0), _record(1)]
    for step in (2, 3):
        metrics.add(_record(step))
    metrics.close()
    assert path.read_text() == whole
    assert [file.name for file in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(
    "rest", ['{"step": 4, "lo', "\0" * 40, '{"step": 4}', "{\ufffd"]
)
def test_a_cut_last_line_is_left_out(path, rest, capsys):
    with path.open("a") as file:
        file.write(rest)
    metrics = Metrics(path, 4)
    metrics.add(_record(4))
    metrics.close()
    assert metrics.records == [_record(step) for step in range(5)]
    assert "metrics.jsonl:5 is cut and left out" in capsys.readouterr().err
    again = Metrics(path, 5)
    again.close()
    assert again.records == metrics.records


def test_losses_that_are_no_numbers_are_null(path):
    metrics = Metrics(path, 4)
    for step, loss in ((4, math.nan), (5, math.inf)):
        metrics.add(StepRecord(step=step, loss=loss, grad_norm=1.0, seconds=0.5))
    metrics.close()

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    lines = path.read_text().splitlines()
    records = [json.loads(line, parse_constant=refuse) for line in lines]
    assert [r["loss"] for r in records[3:]] == [1.0, None, None]
    again = Metrics(path, 6)
    again.close()
    assert again.records[:4] == [_record(step) for step in range(4)]
    assert [math.isnan(r.loss) for r in again.records[4:]] == [True, True]
    assert path.read_text().splitlines() == lines


@pytest.mark.parametrize("line", ["[]", "7", "null"])
def test_a_line_of_other_json_is_no_record(path, line):
    path.write_text(f"{line}\n" + path.read_text())
    with pytest.raises(ConfigError, match="metrics.jsonl:1 is no record"):
        Metrics(path, 4)


def test_another_line_that_is_no_record(path):
    path.write_text("nonsense\n" + path.read_text())
    with pytest.raises(ConfigError, match="metrics.jsonl:1 is no record"):
        Metrics(path, 4)


class _Full:
    """A file on a full disk."""

    def __init__(self, file):
        self._file = file

    def __getattr__(self, name):
        return getattr(self._file, name)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._file.close()

    def write(self, text):
        raise OSError(28, "No space left on device")


def test_a_full_disk_leaves_the_old_file(path, monkeypatch):
    before = path.read_text()
    open_ = pathlib.Path.open

    def open_full(self, mode="r", *args, **options):
        file = open_(self, mode, *args, **options)
        return _Full(file) if mode in "wa" else file

    monkeypatch.setattr(pathlib.Path, "open", open_full)
    for write in (lambda: Metrics(path, 3), lambda: rewrite(path, "new")):
        with pytest.raises(OSError, match="No space left"):
            write()
    monkeypatch.undo()
    assert path.read_text() == before
