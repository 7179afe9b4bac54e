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


def prepare(case: dict, interpret=None) -> tuple:
    """(function, its operands, the float64 blocks that its result should be).

    For a GPU without ``interpret``.
    """
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

        def from_blocks(parts, weight, bias):
            return [project_from_blocks(parts, weight, bias, segments, **kwargs)]

        return from_blocks, (parts, weight, bias), [expected]

    def to_blocks(x, weight, bias):
        results = project_to_blocks(x, weight, bias, segments, **kwargs)
        return [block for result in results for block in result]

    blocks = []
    for segment in segments:
        for i in range(segment.blocks * segment.copies):
            start = segment.start + i // segment.copies * segment.width
            blocks.append(expected[:, start : start + segment.width])
    return to_blocks, (jnp.asarray(x), weight, bias), blocks


def worst_distance(case: dict, actual, expected) -> float:
    """Largest relative L2 distance of a block."""
    assert all(block.dtype == jnp.dtype(case["dtype"]) for block in actual)
    return max(_distance(*pair) for pair in zip(actual, expected, strict=True))


if __name__ == "__main__":
    chosen = json.loads(sys.argv[1])
    kernel, operands, wanted = prepare(chosen, plgpu.InterpretGPUParams())
    print(json.dumps(worst_distance(chosen, kernel(*operands), wanted)))
