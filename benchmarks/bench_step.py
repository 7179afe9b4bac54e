# SPDX-License-Identifier: Apache-2.0
"""Training steps: ``python benchmarks/bench_step.py --help``.

One process with P GPUs, or the processes of ``python -m jax_ulysses.launch -n P
[--one-gpu] benchmarks/bench_step.py``, of which the first one reports, train the first
layers of a published model's geometry. Time and memory of a whole step (forward,
backward with rematerialisation, sums of gradients, AdamW) by every implementation, and
by *no exchange*: XLA's step with every all-to-all left out, so that the share of a step
in which nothing but the exchange runs is its difference to the others. Its numbers are
wrong on purpose.

``--implementations "cuda unmarked"`` does without the mark that makes a fused call a
collective for XLA, so that sums of gradients may run beside it. It can deadlock with
them, until the deadline, unless ``--sm-budget`` leaves NCCL some multiprocessors.

Where ranks share a GPU there is no ``xla``: NCCL refuses to work there. The heap then
sums the gradients, in *no exchange* too.

Writes one JSON object a line. ``modes`` says in which modes.
"""

import argparse
import concurrent.futures
import contextlib
import pathlib
import sys
from collections.abc import Iterator
from unittest import mock

from modes import run_modes

NO_EXCHANGE = "no exchange"
UNMARKED = " unmarked"


def add_cases(parser: argparse.ArgumentParser, implementations: str) -> None:
    """Adds the options that say which steps; ``implementations`` is a default."""
    parser.add_argument("--geometries", default="llama3_8b,qwen25_14b,gpt_oss_d64")
    parser.add_argument("--sequences", default="4096,16384,65536")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--attention", default="cudnn", help="local: xla or cudnn")
    parser.add_argument("--implementations", default=implementations)
    parser.add_argument("--native", default="cuda", help="host: without GPUs")
    parser.add_argument("--workspace-mib", type=int, default=4096)
    parser.add_argument("--out", type=pathlib.Path, help="result file to append to")
    parser.add_argument("--commit", default="", help="noted in every row")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_cases(parser, "cuda,separate,pallas,xla")
    parser.add_argument("--devices", type=int, default=2, help="P, ranks")
    parser.add_argument("--modes", default="graph,overlap")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--sm-budget", type=int, help="of each call (all)")
    parser.add_argument("--one-mode", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


@contextlib.contextmanager
def tracing(implementation: str) -> Iterator[str]:
    """What a program traced in this block uses; yields what to ask for."""
    import jax_ulysses as ju
    from jax_ulysses import reference

    if implementation == NO_EXCHANGE:
        with mock.patch.object(reference, "_all_to_all", lambda ex, x: x):
            yield "xla"
    elif implementation.endswith(UNMARKED):
        with ju.settings(collective_calls=False):
            yield implementation.removesuffix(UNMARKED)
    else:
        yield implementation


def make_trainers(
    args: argparse.Namespace,
    geometry: str,
    sequence: int,
    num_ranks: int,
    *,
    names: list[str],
    devices: list | None = None,
    shared: bool = False,
):
    """Yields (implementation, its traced trainer or why it refuses).

    Args:
      args: command line.
      geometry: name of a preset.
      sequence: S.
      num_ranks: P.
      names: implementations.
      devices: where to run; None for the first ones of all processes.
      shared: whether ranks share a device.
    """
    import dataclasses

    from jax_ulysses import TokenOrder
    from jax_ulysses.models import get_preset
    from jax_ulysses.models.config import TrainConfig
    from jax_ulysses.models.data import load_corpus
    from jax_ulysses.models.trainer import Trainer

    preset = get_preset(geometry)
    corpus = load_corpus(None, sequence)
    for name in names:
        if shared and name == "xla":
            yield name, "NCCL does not work where ranks share a GPU"
            continue
        with tracing(name) as implementation:
            config = TrainConfig(
                preset=geometry,
                model=dataclasses.replace(preset.model, num_layers=args.layers),
                dp=1,
                cp=num_ranks,
                seq_len=sequence,
                batch=1,
                steps=1000,
                lr=preset.lr,
                seed=0,
                dtype="bf16",
                token_order=TokenOrder.CONTIGUOUS,
                implementation=implementation,
                checkpoint_every=1000,
                attention=args.attention,
            )
            trainer = Trainer(config, corpus, devices)
            try:
                _ = trainer.lowered
                yield name, trainer
            except NotImplementedError as error:
                yield name, str(error)


class Steps:
    """Runs steps of one trainer, one after the other: each donates its state."""

    def __init__(self, trainer):
        self._trainer = trainer
        self._step = trainer.compiled
        self._state = trainer.init_state()
        self._batch = trainer.put_batch(*trainer._train_batch(0))

    def __call__(self):
        """Starts one step; returns its loss."""
        self._state, metrics = self._step(self._state, *self._batch)
        return metrics["loss"]


def measure_mode(args: argparse.Namespace) -> None:
    """All cases in this process, whose XLA flags are set."""
    import jax
    import separate
    from timing import emit, interleaved_us, summary

    import jax_ulysses as ju
    from jax_ulysses.launch import join
    from jax_ulysses.models.placement import make_mesh

    index, processes = join()
    separate.register(args.native)
    devices = jax.devices()[: args.devices]
    mesh = make_mesh(1, args.devices)
    report = ju.initialize(
        mesh, "cp", args.workspace_mib << 20, sm_budget=args.sm_budget
    )
    cases = [
        (geometry, sequence)
        for geometry in args.geometries.split(",")
        for sequence in map(int, args.sequences.split(","))
    ]
    for geometry, sequence in cases:
        shared = report.ranks_per_device > 1
        names = [*args.implementations.split(","), NO_EXCHANGE]
        traced = make_trainers(
            args, geometry, sequence, args.devices, names=names, shared=shared
        )
        by_name = dict(traced)
        # XLA takes some seconds for each: beside each other, before anything is timed.
        with concurrent.futures.ThreadPoolExecutor() as pool:
            trainers = [t for t in by_name.values() if not isinstance(t, str)]
            list(pool.map(lambda t: t.compiled, trainers))
        about = {
            "mode": args.one_mode,
            "geometry": geometry,
            "sequence": sequence,
            "devices": args.devices,
            "processes": processes,
            "ranks_per_device": report.ranks_per_device,
            "layers": args.layers,
            "attention": args.attention,
            "commit": args.commit,
            "device": devices[0].device_kind,
            "jax": jax.__version__,
            "heap_mib": report.heap_bytes >> 20,
            "sm_budget": report.sm_budget,
        }
        rows, steps = [], {}
        for name, trainer in by_name.items():
            if isinstance(trainer, str):
                rows.append({"variant": name, "refused": trainer})
                continue
            steps[name] = Steps(trainer)
            plan = {f"{k}_mib": v >> 20 for k, v in trainer.step_memory().items()}
            rows.append({"variant": name, **plan})
        times = interleaved_us(steps, calls=1, rounds=args.rounds)
        for row in rows:
            if row["variant"] in times:
                row |= summary(times[row["variant"]])
                row["loss"] = round(float(steps[row["variant"]]()), 4)
            if index == 0:
                emit(about | row, args.out)
    ju.finalize()


if __name__ == "__main__":
    arguments = parse()
    sys.exit(run_modes(__file__, arguments, measure_mode))
