# SPDX-License-Identifier: Apache-2.0
"""The Pallas GEMM on one GPU with each of its tilings: ``python -m tests.gpu.tilings``.

On few SMs, so that each CTA has several tiles, and the epilogue of one meets the
multiplication of the next. Prints a line of JSON as soon as a case is done: its
relative L2 distance from float64, whether a second call gave the same bits, seconds.
"""

import dataclasses
import itertools
import json
import time

import jax
import numpy as np

from jax_ulysses.pallas.config import CANDIDATES
from tests.pallas.run_kernel import prepare, worst_distance

# Heads, head dimension, rows, the other dimension, P: tails in rows, columns and depth;
# copies of heads and a depth that is a multiple of every ring; one step of depth.
SHAPES = {
    "tails": ((12, 4, 4), 80, 456, 400, 4),
    "copies": ((16, 2, 2), 64, 384, 1536, 4),
    "short": ((16, 4, 4), 64, 264, 64, 4),
}


def cases() -> dict[str, dict]:
    """Every tiling with every shape, both dataflows and both layouts of the weight."""
    found = {}
    combinations = itertools.product(
        enumerate(CANDIDATES), SHAPES, ("gemm_a2a", "a2a_gemm"), (False, True)
    )
    for (i, (config, *_)), shape, dataflow, w_transposed in combinations:
        heads, head_dim, rows, other, ranks = SHAPES[shape]
        tile = f"{config.tile_m}x{config.tile_n}"
        name = f"{tile} {shape} {dataflow}{' transposed' * w_transposed}"
        found[name] = dict(
            dataflow=dataflow,
            rows=rows,
            other=other,
            heads=heads,
            head_dim=head_dim,
            ranks=ranks,
            dtype="float16" if i % 2 else "bfloat16",
            bias=shape != "short",
            w_transposed=w_transposed,
            sms=3,
            config=dataclasses.asdict(config),
        )
    return found


def _same(x, y) -> bool:
    return np.array_equal(np.asarray(x).view("uint16"), np.asarray(y).view("uint16"))


def main() -> None:
    """Runs all cases, twice."""
    for name, case in cases().items():
        started = time.monotonic()
        kernel, operands, expected = prepare(case)
        kernel = jax.jit(kernel)
        blocks, again = kernel(*operands), kernel(*operands)
        outcome = {
            "name": name,
            "distance": worst_distance(case, blocks, expected),
            "same": all(map(_same, blocks, again)),
            "seconds": round(time.monotonic() - started, 2),
        }
        print(json.dumps(outcome), flush=True)


if __name__ == "__main__":
    main()
