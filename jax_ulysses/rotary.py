# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), half-split form."""

import jax.numpy as jnp

from jax_ulysses._typing import Array


def apply_rope(x: Array, positions: Array, theta: float) -> Array:
    """Rotates pairs (i, i + H/2) of each head by position * theta^(-2i/H).

    Args:
      x: [B, S, n, H], H even.
      positions: [B or 1, S] int, true positions in the global sequence.
      theta: base of the frequencies, such as 10000.

    Returns:
      Same shape and dtype as ``x``; computed in fp32.

    Raises:
      ValueError: odd H, or a base that is not positive.
    """
    head_dim = x.shape[-1]
    if head_dim % 2:
        raise ValueError(f"RoPE rotates pairs, so head_dim must be even: {head_dim}.")
    if isinstance(theta, int | float) and not theta > 0:
        raise ValueError(f"RoPE's base theta={theta} must be positive.")
    half = head_dim // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions[..., None].astype(jnp.float32) * frequency  # [B, S, H/2]
    cos, sin = jnp.cos(angle)[:, :, None], jnp.sin(angle)[:, :, None]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


def rms_norm(x: Array, scale: Array, epsilon: float) -> Array:
    """x / rms(x) * scale over the last axis, in fp32 (Zhang and Sennrich 2019).

    Args:
      x: [..., H].
      scale: [H].
      epsilon: added to the mean square.

    Returns:
      Same shape and dtype as ``x``.
    """
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    normed = wide / jnp.sqrt(mean_square + epsilon)
    return (normed * scale.astype(jnp.float32)).astype(x.dtype)
