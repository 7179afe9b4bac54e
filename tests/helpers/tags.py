# SPDX-License-Identifier: Apache-2.0
"""Payloads in which every element says where it came from.

An element's position b, s, h, d is one number. Narrow dtypes hold it in several
*planes* (digits), each exact in the dtype, so that results are compared bit for bit.
"""

import jax.numpy as jnp
import numpy as np

# How many consecutive integers from 0 the dtype holds exactly.
_RADIX = {
    "bool": 2,
    "float8_e5m2": 8,
    "float8_e4m3fn": 16,
    "int8": 128,
    "uint8": 256,
    "bfloat16": 256,
    "float16": 2048,
    "float32": 1 << 24,
    "int32": 1 << 24,
}


def planes(shape: tuple[int, ...], dtype) -> list[np.ndarray]:
    """Digits of iota(shape), least significant first, in ``dtype``."""
    dtype = jnp.dtype(dtype)
    radix = _RADIX[dtype.name]
    rest = np.arange(np.prod(shape)).reshape(shape)
    result = []
    while not result or rest.any():
        result.append((rest % radix).astype(np.float32).astype(dtype))
        rest = rest // radix
    return result


def equal_bits(actual, expected: np.ndarray) -> None:
    """Asserts equality of every bit, signed zeros included.

    NaN must stay NaN, but its payload may change: XLA:CPU computes bf16 copies in f32.
    """
    actual = np.asarray(actual)
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    assert actual.dtype == expected.dtype, (actual.dtype, expected.dtype)
    here, there = (
        np.ascontiguousarray(a).view(np.uint8).reshape(*a.shape, -1)
        for a in (actual, expected)
    )
    both_nan = (actual != actual) & (expected != expected)
    wrong = np.argwhere((here != there).any(-1) & ~both_nan)
    assert not len(wrong), (
        f"{len(wrong)} of {actual.size} elements differ, first at "
        f"{tuple(wrong[0])}: {actual[tuple(wrong[0])]} instead of "
        f"{expected[tuple(wrong[0])]}"
    )
