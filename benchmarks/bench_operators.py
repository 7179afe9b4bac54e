# SPDX-License-Identifier: Apache-2.0
"""Operators through JAX: ``python benchmarks/bench_operators.py --help``.

One process with P GPUs. For every operator the implementations of the library, our
exchange kernel with XLA's dot (*separate*), and the parts alone: XLA's dot without an
exchange, our exchange and XLA's (NCCL) without a dot. ``modes`` says in which modes.

Writes one JSON object a line. With ``--report FILE...`` prints tables of such files.
"""

import argparse
import importlib.resources
import json
import pathlib
import sys
from typing import Any

from modes import run_modes


def calls_at(sequence: int) -> int:
    """Calls of the operator in one program: enough to hide the start of the program."""
    return min(32, max(4, 65536 // sequence))


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--devices", type=int, default=2, help="P")
    parser.add_argument("--geometries", default="llama3_8b,wan_dit_14b")
    parser.add_argument("--sequences", default="1024,4096,16384,65536")
    parser.add_argument("--modes", default="graph,eager,overlap")
    parser.add_argument("--operators", default="", help="all, if empty")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--workspace-mib", type=int, default=4096)
    parser.add_argument("--out", type=pathlib.Path, help="result file to append to")
    parser.add_argument("--commit", default="", help="noted in every row")
    parser.add_argument("--native", default="cuda", help="host: without GPUs")
    parser.add_argument("--one-mode", help=argparse.SUPPRESS)
    parser.add_argument("--report", nargs="+", type=pathlib.Path)
    return parser.parse_args(argv)


def shapes() -> dict[str, dict[str, int]]:
    """Geometries of the package."""
    file = importlib.resources.files("jax_ulysses") / "data" / "shapes.json"
    return json.loads(file.read_text())["geometries"]


def measure_mode(args: argparse.Namespace) -> None:
    """All cases in this process, whose XLA flags are set."""
    import jax
    from operator_cases import Case
    from timing import emit

    import jax_ulysses as ju

    mesh = jax.make_mesh(
        (args.devices,), ("cp",), devices=jax.devices()[: args.devices]
    )
    ju.initialize(mesh, "cp", args.workspace_mib << 20)
    wanted = [o for o in args.operators.split(",") if o]
    for geometry in args.geometries.split(","):
        for sequence in map(int, args.sequences.split(",")):
            calls = calls_at(sequence)
            case = Case(mesh, shapes()[geometry], sequence, calls, args.native)
            for operator in wanted or case.operators:
                about = {
                    "mode": args.one_mode,
                    "geometry": geometry,
                    "sequence": sequence,
                    "devices": args.devices,
                    "op": operator,
                    "commit": args.commit,
                    "device": jax.devices()[0].device_kind,
                    "jax": jax.__version__,
                }
                for row in case.measure(operator, args.rounds):
                    emit(about | row, args.out)
    ju.finalize()


def report(paths: list[pathlib.Path]) -> str:
    """Markdown: a line per operator and shape, each mode's microseconds and ratios."""
    rows: list[dict[str, Any]] = []
    for path in paths:
        rows += [json.loads(line) for line in path.read_text().splitlines() if line]
    rows = [row for row in rows if "us" in row]
    keys = ("mode", "op", "geometry", "sequence", "devices")
    cases: dict[tuple, dict[str, float]] = {}
    for row in rows:
        cases.setdefault(tuple(row[k] for k in keys), {})[row["variant"]] = row["us"]
    names = sorted({v for times in cases.values() for v in times})
    lines = [
        "| " + " | ".join((*keys, *(f"{n} us" for n in names), "xla / cuda")) + " |",
        "| " + " | ".join(["---"] * (len(keys) + len(names) + 1)) + " |",
    ]
    for key, times in sorted(cases.items()):
        cells = [f"{times[n]:.0f}" if n in times else "" for n in names]
        ratio = ""
        if "xla" in times and "cuda" in times:
            ratio = f"{times['xla'] / times['cuda']:.2f}"
        lines.append("| " + " | ".join([*map(str, key), *cells, ratio]) + " |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Runs every mode in a process of its own, or reports."""
    args = parse(argv)
    if args.report:
        print(report(args.report))
        return 0
    return run_modes(__file__, args, measure_mode)


if __name__ == "__main__":
    sys.exit(main())
