# SPDX-License-Identifier: Apache-2.0
"""Fixtures of this folder."""

import jax.numpy as jnp
import pytest

from jax_ulysses import mosaic
from jax_ulysses.pallas import projections


def blocks_of(matrix, segments):
    """Cuts a [M, N] array into segments, with plain slices."""
    found = []
    for s in segments:
        part = matrix[:, s.start : s.stop].reshape(-1, s.blocks, s.width)
        found.append(jnp.repeat(jnp.moveaxis(part, 1, 0), s.copies, axis=0))
    return tuple(found)


def matrix_of(parts):
    """The columns of all blocks, side by side."""
    flat = [jnp.moveaxis(p, 0, 1).reshape(p.shape[1], -1) for p in parts]
    return jnp.concatenate(flat, axis=1)


def _multiply(x, w, bias, w_transposed):
    wide = jnp.float32
    y = x.astype(wide) @ (w.T if w_transposed else w).astype(wide)
    return (y if bias is None else y + bias.astype(wide)).astype(x.dtype)


def _to_blocks(x, w, bias, out, *, w_transposed, num_sms):
    del num_sms
    return blocks_of(_multiply(x, w, bias, w_transposed), out)


def _from_blocks(parts, w, bias, a, *, w_transposed, num_sms):
    del a, num_sms
    return _multiply(matrix_of(parts), w, bias, w_transposed)


@pytest.fixture
def on_cpu(monkeypatch):
    """The implementation on CPU devices, with plain dots in place of its kernels.

    Mosaic GPU cannot interpret a kernel on several devices. What lies around the
    kernels can run there.
    """
    monkeypatch.setattr(mosaic, "check", lambda request: None)
    monkeypatch.setattr(projections, "project_to_blocks", _to_blocks)
    monkeypatch.setattr(projections, "project_from_blocks", _from_blocks)
