# SPDX-License-Identifier: Apache-2.0
"""Every example runs, checks itself and stays short."""

import os
import pathlib
import subprocess
import sys

import pytest

EXAMPLES = sorted(
    (pathlib.Path(__file__).resolve().parent.parent / "examples").glob("*.py")
)
MAX_LINES = 60


def run_python(*arguments: str, cwd: pathlib.Path) -> subprocess.CompletedProcess:
    """Runs a fresh interpreter as a user's shell would: no settings of this run."""
    ours = {"XLA_FLAGS", "PYTHONPATH"}
    environment = {k: v for k, v in os.environ.items() if k not in ours}
    environment["JAX_PLATFORMS"] = "cpu"
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_there_are_examples():
    names = {path.name for path in EXAMPLES}
    assert {"linen_model.py", "nnx_model.py", "shard_map_attention.py"} <= names


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(path, tmp_path):
    result = run_python("-W", "error", str(path), cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "error" in result.stdout, "it should print how far it is from the oracle"


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_is_short_and_checks_itself(path):
    lines = path.read_text().splitlines()
    assert len(lines) <= MAX_LINES
    assert any(line.strip().startswith("assert ") for line in lines)


def test_a_wrong_example_would_fail(tmp_path):
    """Negative control: the oracle inside an example sees a wrong token order."""
    source = next(p for p in EXAMPLES if p.stem == "shard_map_attention").read_text()
    broken = source.replace(
        'w_out, axis_name="cp")',
        'w_out, axis_name="cp", token_order=jax_ulysses.TokenOrder.ZIGZAG)',
    )
    assert broken != source
    path = tmp_path / "broken.py"
    path.write_text(broken)
    result = run_python(str(path), cwd=tmp_path)
    assert result.returncode != 0
    assert "AssertionError" in result.stderr
