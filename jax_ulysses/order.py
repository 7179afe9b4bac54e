# SPDX-License-Identifier: Apache-2.0
"""Token orders as permutations of global arrays and of gathered shards."""

import jax.numpy as jnp
from jax import lax

from jax_ulysses._typing import Array
from jax_ulysses.spec import TokenOrder


def global_order(x: Array, order: TokenOrder) -> Array:
    """Puts gathered sequence shards into global order.

    Args:
      x: [P, B, T, ...], shards by rank.
      order: tokens that each shard holds.

    Returns:
      [B, S, ...].
    """
    if order is TokenOrder.ZIGZAG:
        halves = x.reshape(*x.shape[:2], 2, x.shape[2] // 2, *x.shape[3:])
        first, second = (_take(halves, 2, i) for i in (0, 1))
        # Second halves run backwards: rank r holds chunk 2P-1-r.
        x = jnp.concatenate([first, jnp.flip(second, 0)], axis=0)
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], x.shape[1] * x.shape[2], *x.shape[3:])


def shard_order(x: Array, num_ranks: int, order: TokenOrder) -> Array:
    """Cuts a sequence in global order into shards by rank; inverse of ``global_order``.

    Args:
      x: [B, S, ...].
      num_ranks: P.
      order: tokens that each shard shall hold.

    Returns:
      [P, B, T, ...].
    """
    chunks = 2 * num_ranks if order is TokenOrder.ZIGZAG else num_ranks
    x = x.reshape(x.shape[0], chunks, x.shape[1] // chunks, *x.shape[2:])
    x = jnp.moveaxis(x, 1, 0)
    if order is TokenOrder.ZIGZAG:
        first, second = jnp.split(x, 2)
        x = jnp.concatenate([first, jnp.flip(second, 0)], axis=2)
    return x


def to_zigzag(x: Array, num_ranks: int, axis: int = 1) -> Array:
    """Permutes a global array so that even shards over P ranks are zigzag shards.

    Args:
      x: global array with S tokens along ``axis``, in true order.
      num_ranks: P.
      axis: sequence axis.

    Returns:
      Same shape; sharding ``axis`` over P ranks gives rank r chunks r and 2P-1-r.

    Raises:
      ValueError: S is not divisible by 2P.
    """
    x = jnp.moveaxis(x, axis, 0)[None]
    _check_zigzag(x.shape[1], num_ranks)
    x = shard_order(x, num_ranks, TokenOrder.ZIGZAG).squeeze(1)
    return jnp.moveaxis(x.reshape(-1, *x.shape[2:]), 0, axis)


def from_zigzag(x: Array, num_ranks: int, axis: int = 1) -> Array:
    """Undoes ``to_zigzag``.

    Args:
      x: global array with S tokens along ``axis``, in zigzag order.
      num_ranks: P.
      axis: sequence axis.

    Returns:
      Same shape, tokens in true order.

    Raises:
      ValueError: S is not divisible by 2P.
    """
    x = jnp.moveaxis(x, axis, 0)
    _check_zigzag(x.shape[0], num_ranks)
    x = x.reshape(num_ranks, 1, x.shape[0] // num_ranks, *x.shape[1:])
    return jnp.moveaxis(global_order(x, TokenOrder.ZIGZAG).squeeze(0), 0, axis)


def _take(x: Array, axis: int, index: int) -> Array:
    """``x`` at one index of an axis.

    Outside of ``jit`` x[...] is a gather, whose result JAX does not shard by itself on
    axes that are Explicit.
    """
    return lax.index_in_dim(x, index, axis, keepdims=False)


def _check_zigzag(length: int, num_ranks: int) -> None:
    if length % (2 * num_ranks):
        raise ValueError(
            f"Zigzag order cuts S={length} tokens into 2P={2 * num_ranks} chunks, but "
            f"{length} % {2 * num_ranks} = {length % (2 * num_ranks)}. Pad first."
        )
