# SPDX-License-Identifier: Apache-2.0
"""One kernel, compared with float64 in numpy; on a GPU, or in Pallas's interpreter.

``python run_kernel.py '<case as JSON>'`` interprets one case and prints the worst
relative L2 distance of a block. It takes a process of its own: after one failure the
interpreter fails everything that comes later in its process.
"""

import json
import sys

import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_ulysses.pallas.config import GemmConfig
from jax_ulysses.pallas.layout import segments_of
from jax_ulysses.pallas.projections import project_from_blocks, project_to_blocks

# Largest distance of a result that is rounded once.
LIMITS = {"bfloat16": 4e-3, "float16": 6e-4}


def _distance(actual, expected) -> float:
    actual = np.asarray(actual, np.float64)
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    error = np.linalg.norm(actual - expected) / np.linalg.norm(expected)
    return np.inf if np.isnan(error) else float(error)


def run(case: dict, interpret=None) -> list[tuple]:
    """(result, what it should be) of every block; on a GPU without ``interpret``."""
    rng = np.random.default_rng(0)
    dtype, rows, other = jnp.dtype(case["dtype"]), case["rows"], case["other"]
    scattered = case["dataflow"] == "gemm_a2a"
    segments = segments_of(
        case["heads"], case["head_dim"], case["ranks"], copies=scattered
    )
    heads = segments[-1].stop
    depth, columns = (other, heads) if scattered else (heads, other)
    x = rng.normal(size=(rows, depth)).astype(dtype)
    w = rng.normal(size=(depth, columns)).astype(dtype)
    bias = rng.normal(size=columns).astype(dtype) if case["bias"] else None
    expected = x.astype(np.float64) @ w.astype(np.float64)
    if bias is not None:
        expected += bias.astype(np.float64)
    weight = jnp.asarray(w.T.copy() if case["w_transposed"] else w)
    kwargs = dict(
        w_transposed=case["w_transposed"],
        num_sms=case["sms"],
        config=GemmConfig(**case["config"]),
        interpret=interpret,
    )
    if not scattered:
        parts = [
            jnp.asarray(
                x[:, s.start : s.stop].reshape(rows, s.blocks, s.width).swapaxes(0, 1)
            )
            for s in segments
        ]
        y = project_from_blocks(parts, weight, bias, segments, **kwargs)
        return [(y, expected)]
    results = project_to_blocks(jnp.asarray(x), weight, bias, segments, **kwargs)
    pairs = []
    for segment, result in zip(segments, results):
        for i, stored in enumerate(result):
            start = segment.start + i // segment.copies * segment.width
            pairs.append((stored, expected[:, start : start + segment.width]))
    return pairs


def worst_distance(case: dict, pairs) -> float:
    """Largest relative L2 distance of a block."""
    assert all(actual.dtype == jnp.dtype(case["dtype"]) for actual, _ in pairs)
    return max(_distance(*pair) for pair in pairs)


if __name__ == "__main__":
    chosen = json.loads(sys.argv[1])
    print(json.dumps(worst_distance(chosen, run(chosen, plgpu.InterpretGPUParams()))))
