# SPDX-License-Identifier: Apache-2.0
"""The operator benchmark measures what it says, shown on virtual CPU devices."""

import importlib.util
import json
import subprocess
import sys
import textwrap

import pytest

CALLS, ROUNDS = 3, 4


@pytest.fixture(scope="module")
def rows(root):
    """Every operator at a tiny shape, in a process with two devices."""
    code = f"""
        import json, sys
        sys.path.insert(0, {str(root / "benchmarks")!r})
        import jax, jax_ulysses
        from operator_cases import Case
        mesh = jax.make_mesh((2,), ("cp",))
        jax_ulysses.initialize(mesh, "cp", 4 << 20)
        shape = dict(heads=4, kv_heads=2, head_dim=16, d_model=64)
        case = Case(mesh, shape, 64, {CALLS}, "host")
        compiled, lower = [], case._lower
        def spy(*args):
            compiled.append(0)
            lowered = lower(*args)
            text = lowered.compile().as_text()
            compiled[-1] = text.count('custom_call_target="jax_ulysses')
            return lowered
        case._lower = spy
        for operator in case.operators:
            names = list(case.operators[operator][2]())
            rows = list(case.measure(operator, {ROUNDS}))
            calls = dict(zip(names, compiled))
            compiled.clear()
            for row in rows:
                print(json.dumps(dict(row, op=operator, calls=calls[row["variant"]])))
    """
    environment = {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
    }
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=environment, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_all_variants_are_timed_and_agree(rows):
    by_operator = {}
    for row in rows:
        by_operator.setdefault(row["op"], {})[row["variant"]] = row
    assert len(by_operator) == 4
    for operator, variants in by_operator.items():
        for name in ("xla", "host", "separate"):
            row = variants[name]
            assert 0 < row["us_p10"] <= row["us"] <= row["us_p90"]
            assert row["error"] < 8e-3, (operator, name)
        assert variants["host"]["rows"] == 32


def test_no_call_is_merged_or_dropped(rows):
    """XLA must run every call of a chain; an exchange of ours is one call."""
    for row in rows:
        ours = row["variant"] in ("host", "host unmarked", "separate", "only exchange")
        assert row["calls"] == (CALLS if ours else 0), row


def test_what_cannot_run_is_said(rows):
    refused = [r["refused"] for r in rows if r["variant"] == "cuda" and "refused" in r]
    assert refused
    assert all("not on cpu" in text for text in refused)


def test_report(root, tmp_path, monkeypatch):
    # As where the program runs: its own modules beside it.
    monkeypatch.syspath_prepend(root / "benchmarks")
    path = root / "benchmarks" / "bench_operators.py"
    spec = importlib.util.spec_from_file_location("bench_operators", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    shape = dict(mode="graph", op="o", geometry="g", sequence=8, devices=2)
    lines = [
        shape | {"variant": "xla", "us": 30.0},
        shape | {"variant": "cuda", "us": 20.0},
        shape | {"variant": "pallas", "refused": "why"},
    ]
    file = tmp_path / "x.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    assert "| graph | o | g | 8 | 2 | 20 | 30 | 1.50 |" in module.report([file])
