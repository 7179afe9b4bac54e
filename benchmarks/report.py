# SPDX-License-Identifier: Apache-2.0
"""Tables from benchmark results: ``python benchmarks/report.py FILE...``.

A result file has one JSON object a line, written by ``fused_bench``, ``devices_bench``
or ``pure_bench`` (cuda/tests/gpu). Rows of one shape were measured in one run, in
random order; where a variant was measured with several numbers of communicating CTAs,
the fastest counts.
"""

import argparse
import collections
import json
import math
import pathlib
import sys
from typing import Any

# What makes two rows comparable. Files of one rig lack the keys of the other.
SHAPE = (
    "op", "geometry", "sequence", "ranks", "devices", "rows", "columns", "model", "mode"
)  # fmt: skip
LINKS = {"free": "", "throttled": "-throttled"}
# Means of parts of the rows, by sequence length.
PARTS = {"S = 1024": (1024, 1024), "S >= 4096": (4096, math.inf)}

type Row = dict[str, Any]


def load(path: pathlib.Path) -> list[Row]:
    """Reads the timings in a result file."""
    with path.open() as lines:
        rows = [json.loads(line) for line in lines if line.strip()]
    return [row for row in rows if "variant" in row or "kernel" in row]


def geometric_mean(values: list[float]) -> float:
    """Exponential of the mean logarithm."""
    return math.exp(sum(map(math.log, values)) / len(values))


def fastest(rows: list[Row], variant: str) -> float | None:
    """Microseconds of a variant, None if it was not measured."""
    return min((r["us"] for r in rows if r["variant"] == variant), default=None)


def name(row: Row) -> str:
    """Shape, for people."""
    words = [row.get("geometry"), f"P={row.get('ranks') or row.get('devices')}"]
    if row.get("sequence"):
        words.insert(1, f"S={row['sequence']}")
    # a2a_gemm multiplies [M, C] by [C, D], gemm_a2a [M, D] by [D, C].
    n, k = row["columns"], row["model"]
    if row["op"] == "a2a_gemm":
        n, k = k, n
    return " ".join(w for w in words if w) + f" | {row['rows']}x{n}x{k}"


def table(rows: list[Row]) -> list[str]:
    """Markdown: what the rows of a file say."""
    if any("kernel" in row for row in rows):
        return kernel_table(rows)
    if not any(row["variant"] == "pure" for row in rows):
        return plain_table(rows)
    return variant_table(rows)


def plain_table(rows: list[Row]) -> list[str]:
    """Times of what has no pure GEMM beside it."""
    lines = ["| operator | shape | variant | us |", "|" + " --- |" * 4]
    for row in rows:
        shape = " ".join(f"{k}={row[k]}" for k in SHAPE[1:] if row.get(k) is not None)
        lines.append(f"| {row['op']} | {shape} | {row['variant']} | {row['us']:.1f} |")
    return lines


def kernel_table(rows: list[Row]) -> list[str]:
    """GEMMs of ours against CUTLASS's, the faster of its settings."""
    groups = collections.defaultdict(list)
    for row in rows:
        key = (row["op"], row["geometry"], row["sequence"], row["ranks"])
        groups[key].append(row)
    lines = [
        "| operator | geometry | S | P | M x N x K | us | TFLOP/s | CUTLASS | ratio |",
        "|" + " --- |" * 9,
    ]
    ratios = collections.defaultdict(list)
    for (op, geometry, sequence, ranks), group in groups.items():
        stock = min(r["us"] for r in group if r["kernel"].startswith("cutlass"))
        ours = min(
            (r for r in group if not r["kernel"].startswith("cutlass")),
            key=lambda r: r["us"],
        )
        ratios[op].append(ours["us"] / stock)
        lines.append(
            f"| {op} | {geometry} | {sequence} | {ranks} | "
            f"{ours['rows']}x{ours['n']}x{ours['k']} | {ours['us']:.0f} | "
            f"{ours['tflops']:.0f} | {stock:.0f} | {ratios[op][-1]:.3f} |"
        )
    lines += ["", "Geometric means of ours / CUTLASS:", ""]
    for op, values in sorted(ratios.items()):
        mean = geometric_mean(values)
        lines.append(f"- {op}: {mean:.3f} ({len(values)} rows)")
    return lines


def variant_table(rows: list[Row]) -> list[str]:
    """Ratios of each shape and tile, then their geometric means."""
    groups = collections.defaultdict(list)
    for row in rows:
        key = tuple(row.get(k) for k in SHAPE) + (row["tile"], row.get("w"))
        groups[key].append(row)
    lines = [
        "| operator | shape | M x N x K | tile | w | pure us | link | fused / pure | "
        "separate / fused |",
        "|" + " --- |" * 9,
    ]
    ratios = collections.defaultdict(list)
    for group in groups.values():
        first = group[0]
        pure = fastest(group, "pure")
        for link, suffix in LINKS.items():
            fused = fastest(group, "fused" + suffix)
            separate = fastest(group, "separate" + suffix)
            if pure is None or fused is None or separate is None:
                continue
            found = {"fused / pure": fused / pure, "separate / fused": separate / fused}
            for what, value in found.items():
                ratios[first["op"], link, what].append(value)
                for part, (least, most) in PARTS.items():
                    if least <= first.get("sequence", 0) <= most:
                        ratios[first["op"], link, f"{what}, {part}"].append(value)
            cells = [
                first["op"], name(first), first["tile"], first.get("w", ""),
                f"{pure:.0f}", link, *(f"{v:.3f}" for v in found.values()),
            ]  # fmt: skip
            lines.append("| " + " | ".join(cells) + " |")
    lines += ["", "Geometric means:", ""]
    for (op, link, what), values in sorted(ratios.items()):
        mean = geometric_mean(values)
        lines.append(f"- {op}, {link}, {what}: {mean:.3f} ({len(values)} rows)")
    return lines


def main() -> int:
    """Prints one table a file."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="+", type=pathlib.Path)
    for path in parser.parse_args().files:
        print(f"## {path.name}\n")
        print("\n".join(table(load(path))), end="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
