# SPDX-License-Identifier: Apache-2.0
"""A checkpoint that cannot be read: the one before it is used, by every process."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from jax_ulysses.models import train

_BEFORE, _LAST = 4, 6
_TEST_PROCESSES = """
import sys
from jax_ulysses.models import checkpoints, train

read = checkpoints.Checkpoints._read

def read_or_not(self, steps_done, trainer):
    if self._processes.main and steps_done == 6:
        raise checkpoints.ConfigError("only the first process cannot read it")
    return read(self, steps_done, trainer)

checkpoints.Checkpoints._read = read_or_not
sys.exit(train.main(sys.argv[1:]))
"""


def _sizes(*more):
    sizes = ["--seq-len", "32", "--batch", "4", "--steps", str(_LAST)]
    return [*sizes, "--checkpoint-every", str(_BEFORE), "--no-parity", *more]


def _losses(out):
    records = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    losses = {record["step"]: record["loss"] for record in records}
    assert list(losses) == list(range(_LAST))
    return losses


@pytest.fixture(scope="module")
def finished(text, tmp_path_factory):
    """A run with checkpoints of steps 4 and 6."""
    out = tmp_path_factory.mktemp("finished")
    assert train.main(_sizes("--data", str(text), "--out", str(out))) == 0
    return out


@pytest.fixture
def copy(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "copy")


def _resume(out):
    """Exit status and what it said, of a process of its own.

    When a read fails, Orbax leaves the others under way. They complain when its event
    loop has gone, in whatever test comes next.
    """
    command = [sys.executable, "-m", "jax_ulysses.models.train", "--resume"]
    result = subprocess.run(
        [*command, "--no-parity", "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=240,
        # Not the root of a clone, where the source folder would be found.
        cwd=out,
    )
    return result.returncode, result.stderr


def _cut(checkpoint):
    """Cuts its largest file in half, as a full disk may."""
    files = [path for path in checkpoint.rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)


def _empty(checkpoint):
    shutil.rmtree(checkpoint / "default")


@pytest.mark.parametrize("damage", [_cut, _empty])
def test_the_one_before_a_damaged_one_is_used(damage, finished, copy):
    damage(copy / "checkpoints" / str(_LAST))
    status, said = _resume(copy)
    assert status == 0, said
    assert "warning: step 4 is used, cannot read the checkpoint of step 6 in" in said
    assert "resumed after step 4" in said
    assert _losses(copy) == _losses(finished)
    assert (copy / "checkpoints" / f"{_LAST}.damaged").is_dir()
    # Step 6 was done again, and written again.
    status, said = _resume(copy)
    assert status == 0, said
    assert f"resumed after step {_LAST}" in said


def test_none_can_be_read(copy):
    for step in (_BEFORE, _LAST):
        _cut(copy / "checkpoints" / str(step))
    status, said = _resume(copy)
    assert status == 2, said
    assert "\nerror: cannot read the checkpoint of step 6 in" in said
    assert {path.name for path in (copy / "checkpoints").iterdir()} == {"4", "6"}


def test_every_process_takes_the_one_of_the_first(text, tmp_path):
    out = tmp_path / "run"
    program = tmp_path / "program.py"
    program.write_text(_TEST_PROCESSES)
    launch = [sys.executable, "-m", "jax_ulysses.launch", "-n", "2", "--cpu"]
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    said, losses = [], []
    for more in (["--data", str(text)], ["--resume"]):
        arguments = _sizes("--out", str(out), *more)
        result = subprocess.run(
            [*launch, str(program), *arguments],
            capture_output=True,
            text=True,
            timeout=240,
            env=environment,
        )
        assert result.returncode == 0, result.stderr
        said.append(result.stderr)
        losses.append(_losses(out))
    assert "only the first process cannot read it (now 6.damaged)" in said[1]
    assert "resumed after step 4" in said[1]
    assert losses[0] == losses[1]
