# SPDX-License-Identifier: Apache-2.0
"""The ``xla`` implementation: ``lax.all_to_all`` and dots. It defines correctness.

Every function works on per-device arrays inside ``shard_map``. All segments of a
call travel in one all-to-all.
"""

import jax.numpy as jnp
from jax import lax

from jax_ulysses._typing import Array
from jax_ulysses.order import global_order, shard_order
from jax_ulysses.spec import HeadExchange, Request


def check(request: Request) -> None:
    """Accepts everything: any device, any number of hosts."""
    del request


def scatter(ex: HeadExchange, parts: tuple[Array, ...]) -> tuple[Array, ...]:
    """Sequence shards to head shards.

    Args:
      ex: the routing.
      parts: per segment [B, T, M, H], all of one dtype.

    Returns:
      Per segment [B, S, local heads, H], tokens in global order.
    """
    batch, tokens = parts[0].shape[:2]
    by_rank = [
        # [B, T, P, local, H]; a replicated head is sent to each of its owners.
        jnp.repeat(part, replicas, axis=2).reshape(
            batch, tokens, ex.num_ranks, local, ex.head_dim
        )
        for part, local, replicas in zip(parts, ex.local_heads, ex.replicas)
    ]
    send = jnp.moveaxis(jnp.concatenate(by_rank, axis=3), 2, 0)
    received = _all_to_all(ex, send)  # [P source, B, T, sum(local), H]
    return _split_segments(ex, global_order(received, ex.token_order))


def gather(
    ex: HeadExchange, parts: tuple[Array, ...], *, sum_replicas: bool = True
) -> tuple[Array, ...]:
    """Head shards to sequence shards, the inverse (and transpose) of ``scatter``.

    Args:
      ex: the routing.
      parts: per segment [B, S, local heads, H].
      sum_replicas: add the copies of a replicated head up (its gradient), in
        fp32 with one rounding; otherwise take the copy of the first owner.

    Returns:
      Per segment [B, T, M, H].
    """
    send = shard_order(jnp.concatenate(parts, axis=2), ex.num_ranks, ex.token_order)
    received = jnp.moveaxis(_all_to_all(ex, send), 0, 2)  # [B, T, P, sum(local), H]
    result, start = [], 0
    for heads, local, replicas in zip(ex.heads, ex.local_heads, ex.replicas):
        part = received[:, :, :, start : start + local]
        start += local
        batch, tokens = part.shape[:2]
        if replicas == 1:
            part = part.reshape(batch, tokens, heads, ex.head_dim)
        else:
            part = part.reshape(batch, tokens, heads, replicas, ex.head_dim)
            part = _sum_copies(part) if sum_replicas else part[:, :, :, 0]
        result.append(part)
    return tuple(result)


def gemm_a2a(
    ex: HeadExchange, x: Array, w: Array, bias: Array | None, *, w_transposed: bool
) -> tuple[Array, ...]:
    """Projection, then scatter.

    Args:
      ex: the routing.
      x: [B, T, D].
      w: [D, C], or [C, D] if ``w_transposed``; C = all heads times H.
      bias: [C] or None.
      w_transposed: multiply by the transpose of ``w``.

    Returns:
      Per segment [B, S, local heads, H].
    """
    y = project(x, w, bias, w_transposed=w_transposed)
    return scatter(ex, _columns_to_segments(ex, y))


def a2a_gemm(
    ex: HeadExchange,
    parts: tuple[Array, ...],
    w: Array,
    bias: Array | None,
    *,
    w_transposed: bool,
    want_gathered: bool = True,
) -> tuple[Array, Array]:
    """Gather, then projection.

    Args:
      ex: the routing.
      parts: per segment [B, S, local heads, H].
      w: [C, D], or [D, C] if ``w_transposed``.
      bias: [D] or None.
      w_transposed: multiply by the transpose of ``w``.
      want_gathered: whether the second result is used. Here it costs nothing.

    Returns:
      y [B, T, D], and the gathered operand [B, T, C], which weight gradients need.
    """
    del want_gathered
    gathered = join_segments(gather(ex, parts))
    return project(gathered, w, bias, w_transposed=w_transposed), gathered


def join_segments(segments: tuple[Array, ...]) -> Array:
    """Per segment [B, T, M, H] to [B, T, C], segments side by side."""
    batch, tokens = segments[0].shape[:2]
    return jnp.concatenate([s.reshape(batch, tokens, -1) for s in segments], axis=-1)


def accumulation_dtype(dtype):
    """fp32 for everything but fp64 and complex numbers."""
    wide = jnp.dtype(dtype) == jnp.float64 or jnp.issubdtype(dtype, jnp.complexfloating)
    return jnp.dtype(dtype) if wide else jnp.dtype(jnp.float32)


def project(x: Array, w: Array, bias: Array | None, *, w_transposed: bool) -> Array:
    """x @ w (+ bias) over the last axis, accumulated wide, rounded once to x.dtype."""
    dims = (((x.ndim - 1,), (1 if w_transposed else 0,)), ((), ()))
    y = lax.dot_general(x, w, dims, preferred_element_type=accumulation_dtype(x.dtype))
    if bias is not None:
        y = y + bias.astype(y.dtype)
    return y.astype(x.dtype)


def _all_to_all(ex: HeadExchange, x: Array) -> Array:
    """Block p of the leading axis goes to rank p, arrives in block source."""
    return lax.all_to_all(x, ex.axis_name, split_axis=0, concat_axis=0, tiled=True)


def _columns_to_segments(ex: HeadExchange, y: Array) -> tuple[Array, ...]:
    """[B, T, C] to per segment [B, T, M, H]."""
    result, start = [], 0
    for heads in ex.heads:
        width = heads * ex.head_dim
        part = lax.slice_in_dim(y, start, start + width, axis=2)
        result.append(part.reshape(*y.shape[:2], heads, ex.head_dim))
        start += width
    return tuple(result)


def _split_segments(ex: HeadExchange, x: Array) -> tuple[Array, ...]:
    """[B, S, sum(local), H] to per segment [B, S, local, H]."""
    result, start = [], 0
    for local in ex.local_heads:
        result.append(lax.slice_in_dim(x, start, start + local, axis=2))
        start += local
    return tuple(result)


def _sum_copies(x: Array) -> Array:
    """Sums axis 3 in the accumulation dtype, rounds once."""
    return jnp.sum(x, axis=3, dtype=accumulation_dtype(x.dtype)).astype(x.dtype)
