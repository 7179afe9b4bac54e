# SPDX-License-Identifier: Apache-2.0
"""The ``pallas`` implementation beside XLA, on one GPU, without the exchange.

``python benchmarks/bench_pallas.py --out FILE`` measures, for geometries of
jax_ulysses/data/shapes.json, what one rank does around the all-to-all:

- ``pallas``: the operator of ``jax_ulysses.mosaic``, its exchange replaced by a barrier
  that XLA cannot move anything across;
- ``xla``: the operator of ``jax_ulysses.reference``, likewise;
- ``dot``: XLA's matrix product of the same sizes, alone, its result in one piece;
- with ``--tilings all``, ``pallas`` with each of ``CANDIDATES`` in
  jax_ulysses/pallas/config.py (``tiling 0``, ``tiling 1``, ...).

All variants of a shape run in random order in each of ``--rounds`` rounds. Times are
those of the kernels on the GPU, from CUPTI; the median counts. Before that, results of
``pallas``, with each tiling, are compared with those of ``xla``. One JSON object a line
goes to the file.
"""

import argparse
import concurrent.futures
import dataclasses
import itertools
import json
import pathlib
import random
import statistics
import subprocess
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jax_ulysses
from jax_ulysses import blocks, mosaic, reference
from jax_ulysses.pallas import config as configs
from jax_ulysses.pallas.config import GemmConfig
from jax_ulysses.spec import HeadExchange

SHAPES = pathlib.Path(jax_ulysses.__file__).parent / "data" / "shapes.json"
DTYPE = jnp.bfloat16
# Of two results that are each rounded once, against each other.
TOLERANCE = 6e-3


@dataclasses.dataclass(frozen=True)
class Shape:
    """One operator on one rank.

    Attributes:
      op: "gemm_a2a" (QKV) or "a2a_gemm" (output projection).
      geometry: name in shapes.json.
      sequence: S.
      ranks: P.
      heads: of each segment.
      head_dim: H.
      d_model: D.
    """

    op: str
    geometry: str
    sequence: int
    ranks: int
    heads: tuple[int, ...]
    head_dim: int
    d_model: int

    @property
    def gemm(self) -> tuple[int, int, int]:
        """M, N, K."""
        width = sum(self.heads) * self.head_dim
        n, k = (width, self.d_model) if self.op == "gemm_a2a" else (self.d_model, width)
        return self.sequence // self.ranks, n, k

    @property
    def exchange(self) -> HeadExchange:
        """The routing."""
        return HeadExchange(self.heads, self.head_dim, self.ranks, ("cp",))

    def operands(self) -> tuple[Any, jax.Array]:
        """Random activations, as the operator takes them, and weight."""
        m, n, k = self.gemm
        keys = jax.random.split(jax.random.key(0), len(self.heads) + 1)
        w = jax.random.normal(keys[0], (k, n), DTYPE)
        if self.op == "gemm_a2a":
            return jax.random.normal(keys[1], (1, m, k), DTYPE), w
        local = self.exchange.local_heads
        shapes = [(1, self.sequence, heads, self.head_dim) for heads in local]
        parts = [jax.random.normal(key, s, DTYPE) for key, s in zip(keys[1:], shapes)]
        return tuple(parts), w


def variants(shape: Shape, tilings: dict[str, GemmConfig]) -> dict[str, Callable]:
    """What is measured: functions of (activations, weight).

    Beside ``pallas`` as it is, once with each of ``tilings``.
    """

    def operator(module):
        def run(x, w):
            call = getattr(module, shape.op)
            result = call(shape.exchange, x, w, None, w_transposed=False)
            return result if shape.op == "gemm_a2a" else result[0]

        return run

    def tiled(config):
        def run(x, w):
            with mock.patch.object(configs, "choose", return_value=config):
                return operator(mosaic)(x, w)

        return run

    def dot(x, w):
        m, _, k = shape.gemm
        x = x if shape.op == "gemm_a2a" else x[0]
        # The bytes of the activations are as many as those of its rows.
        return x.reshape(m, k) @ w

    found = {"pallas": operator(mosaic), "xla": operator(reference), "dot": dot}
    return found | {name: tiled(config) for name, config in tilings.items()}


def without_exchange() -> None:
    """Puts a barrier in place of every all-to-all."""
    reference._all_to_all = lambda ex, x: lax.optimization_barrier(x)
    blocks.exchange = lambda ex, x: lax.optimization_barrier(x)


def kernel_times(calls: list[Callable]) -> list[tuple[str, float]]:
    """Calls functions one after the other; (name, ms) of every kernel, in order."""
    # Comes with JAX's CUDA plugin, and holds its access to CUPTI.
    from jax._src.lib import mosaic_gpu

    cupti = mosaic_gpu._mosaic_gpu_ext
    cupti._cupti_init()
    for call in calls:
        result = call()
    jax.block_until_ready(result)
    return cupti._cupti_get_timings(False)


def measure(compiled: dict[str, Callable], operands, rounds: int) -> dict[str, list]:
    """Times of every variant in each round, in microseconds."""
    calls = {name: lambda f=f: f(*operands) for name, f in compiled.items()}
    for call in calls.values():
        jax.block_until_ready(call())
    count = {name: len(kernel_times([call])) for name, call in calls.items()}
    names = list(calls)
    order = [n for _ in range(rounds) for n in random.sample(names, len(names))]
    kernels = kernel_times([calls[n] for n in order])
    if len(kernels) != rounds * sum(count.values()):
        raise RuntimeError(
            f"{len(kernels)} kernels in {rounds} rounds of {count}: a variant launched "
            "another number of them than before"
        )
    times = iter(kernels)
    found = {name: [] for name in names}
    for name in order:
        parts = itertools.islice(times, count[name])
        found[name].append(1000 * sum(ms for _, ms in parts))
    return found


def distance(a, b) -> float:
    """Largest relative L2 distance of two trees of arrays."""
    worst = 0.0
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        x, y = x.astype(jnp.float32), y.astype(jnp.float32)
        worst = max(worst, float(jnp.linalg.norm(x - y) / jnp.linalg.norm(y)))
    return worst


def shapes_of(args) -> list[Shape]:
    """All shapes that were asked for."""
    geometries = json.loads(SHAPES.read_text())["geometries"]
    found = []
    for name in args.geometries or geometries:
        g = geometries[name]
        n, kv = g["heads"], g["kv_heads"]
        for s, p in itertools.product(args.sequences, args.cp):
            for op, heads in (("gemm_a2a", (n, kv, kv)), ("a2a_gemm", (n,))):
                shape = Shape(op, name, s, p, heads, g["head_dim"], g["d_model"])
                found.append(shape)
    return found


def main() -> None:
    """Measures and writes."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--geometries", nargs="*")
    parser.add_argument("--sequences", nargs="*", type=int, default=[4096, 16384])
    parser.add_argument("--cp", nargs="*", type=int, default=[4])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--tilings", choices=("chosen", "all"), default="chosen")
    parser.add_argument("--commit", help="of the tree, where git cannot tell")
    args = parser.parse_args()
    commit = args.commit or subprocess.check_output(
        ["git", "rev-parse", "--short", "HEAD"], text=True
    )
    without_exchange()
    device = jax.devices()[0]
    shapes, pending = shapes_of(args), {}
    tilings = {}
    if args.tilings == "all":
        tilings = {f"tiling {i}": c[0] for i, c in enumerate(configs.CANDIDATES)}
    with concurrent.futures.ThreadPoolExecutor() as pool:
        for shape in shapes:
            operands = jax.eval_shape(shape.operands)
            for name, function in variants(shape, tilings).items():
                lowered = jax.jit(function).lower(*operands)
                pending[shape, name] = pool.submit(lowered.compile)
    with args.out.open("w") as out:
        for shape in shapes:
            names = variants(shape, tilings)
            compiled = {name: pending[shape, name].result() for name in names}
            operands = shape.operands()
            wanted = compiled["xla"](*operands)
            for name in ("pallas", *tilings):
                error = distance(compiled[name](*operands), wanted)
                if not error < TOLERANCE:
                    raise AssertionError(f"{shape}, {name}: results differ by {error}")
            del wanted
            m, n, k = shape.gemm
            chosen = {"pallas": configs.choose(m, n, k, device.core_count)}
            for name, us in measure(compiled, operands, args.rounds).items():
                tiling = (chosen | tilings).get(name)
                row = {
                    **dataclasses.asdict(shape),
                    **dict(rows=m, columns=n, depth=k, variant=name),
                    "us": round(statistics.median(us), 2),
                    "spread_us": round(float(np.ptp(us)), 2),
                    "tiling": tiling and dataclasses.asdict(tiling),
                    **dict(device=device.device_kind, commit=commit.strip()),
                }
                out.write(json.dumps(row) + "\n")
                out.flush()


if __name__ == "__main__":
    main()
