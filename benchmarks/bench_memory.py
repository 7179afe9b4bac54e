# SPDX-License-Identifier: Apache-2.0
"""Memory of training steps: ``python benchmarks/bench_memory.py --help``.

Compiles the steps of ``bench_step.py`` for P GPUs like the one that is here and says
what XLA plans for each device. Nothing runs and no group is formed, so that one GPU
will do for any P. As XLA cannot measure matrix products for GPUs that are not there, it
takes its default ones, whose workspaces may differ from those of a real run.

Writes one JSON object a line.
"""

import argparse
import concurrent.futures
import contextlib
import os
from collections.abc import Iterator

from bench_step import add_cases, make_trainers
from modes import MODES


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_cases(parser, "cuda,separate,xla")
    parser.add_argument("--ranks", default="2,4,8", help="P, one or several")
    parser.add_argument("--threads", type=int, help="compile so many at a time")
    return parser.parse_args(argv)


@contextlib.contextmanager
def stand_ins(args: argparse.Namespace, num_ranks: int) -> Iterator[list]:
    """Devices to compile for, with a group; on CPUs virtual ones, which are there."""
    import jax
    from jax.experimental import topologies

    import jax_ulysses as ju
    from jax_ulysses.models.placement import make_mesh
    from jax_ulysses.testing import dry_group

    workspace = args.workspace_mib << 20
    if args.native == "host":
        devices = jax.devices()[:num_ranks]
        ju.initialize(make_mesh(1, num_ranks, devices), "cp", workspace)
        try:
            yield devices
        finally:
            ju.finalize()
        return
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name="", topology=f"1x1x{num_ranks}"
    )
    mesh = make_mesh(1, num_ranks, topology.devices)
    with dry_group(mesh, "cp", workspace_bytes=workspace):
        yield topology.devices


def measure(args: argparse.Namespace, num_ranks: int) -> None:
    """All cases for one P."""
    import jax
    from timing import emit

    cases = [
        (geometry, int(sequence))
        for geometry in args.geometries.split(",")
        for sequence in args.sequences.split(",")
    ]
    with (
        stand_ins(args, num_ranks) as devices,
        concurrent.futures.ThreadPoolExecutor(args.threads) as pool,
    ):
        found = [
            (geometry, sequence, name, trainer)
            for geometry, sequence in cases
            for name, trainer in make_trainers(
                args,
                geometry,
                sequence,
                num_ranks,
                names=args.implementations.split(","),
                devices=devices,
            )
        ]
        plans = pool.map(
            lambda case: None if isinstance(case[3], str) else case[3].step_memory(),
            found,
        )
        for (geometry, sequence, name, trainer), plan in zip(found, plans, strict=True):
            row = {
                "ranks": num_ranks,
                "geometry": geometry,
                "sequence": sequence,
                "layers": args.layers,
                "attention": args.attention,
                "commit": args.commit,
                "device": devices[0].device_kind,
                "jax": jax.__version__,
                "variant": name,
            }
            if plan is None:
                row["refused"] = trainer
            else:
                row |= {f"{k}_mib": v >> 20 for k, v in plan.items()}
            emit(row, args.out)


def main() -> None:
    """Measures every P."""
    args = parse()
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {MODES['graph']}"
    import separate

    separate.register(args.native)
    for num_ranks in map(int, args.ranks.split(",")):
        measure(args, num_ranks)


if __name__ == "__main__":
    main()
