# SPDX-License-Identifier: Apache-2.0
"""The report reads every committed result, and its arithmetic is right."""

import importlib.util
import json

import pytest


@pytest.fixture(scope="module")
def report(root):
    path = root / "benchmarks" / "report.py"
    spec = importlib.util.spec_from_file_location("report", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_reads_every_result(report, root):
    files = sorted((root / "benchmarks" / "results").glob("*.jsonl"))
    assert files
    for path in files:
        lines = report.table(report.load(path))
        assert sum(line.startswith("| ") for line in lines) > 6, path
        readme = (root / "benchmarks" / "README.md").read_text()
        assert path.stem.removesuffix("-a").removesuffix("-b") in readme


def test_ratios_and_their_means(report, tmp_path):
    def row(rows, variant, us, comm_ctas=4):
        shape = {"op": "a2a_gemm", "ranks": 2, "rows": rows, "columns": 8, "model": 4}
        return shape | {
            "tile": "t", "variant": variant, "us": us, "comm_ctas": comm_ctas
        }  # fmt: skip

    rows = [
        row(1, "pure", 10), row(1, "fused", 30), row(1, "fused", 20, 8),
        row(1, "separate", 40), row(2, "pure", 10), row(2, "fused", 80),
        row(2, "separate", 80),
    ]  # fmt: skip
    path = tmp_path / "x.jsonl"
    path.write_text("\n".join(map(json.dumps, [{"about": "no timing"}, *rows])))
    text = "\n".join(report.table(report.load(path)))
    # Shape 1: the faster of two fused rows, 2.0; shape 2: 8.0; their mean is 4.
    assert "| a2a_gemm | P=2 | 1x4x8 | t |  | 10 | free | 2.000 | 2.000 |" in text
    assert "- a2a_gemm, free, fused / pure: 4.000 (2 rows)" in text
    assert "throttled" not in text

    # Other modes are other measurements.
    for mode, factor in (("eager", 1), ("graph", 2)):
        rows += [r | {"mode": mode, "us": factor * r["us"]} for r in rows[:4]]
    path.write_text("\n".join(map(json.dumps, rows)))
    text = "\n".join(report.table(report.load(path)))
    assert text.count("| t |  | 10 | free | 2.000 | 2.000 |") == 2
    assert text.count("| t |  | 20 | free | 2.000 | 2.000 |") == 1
