# SPDX-License-Identifier: Apache-2.0
"""The default attention on one rank's heads, and the masks it is given.

Between the two exchanges a rank holds the whole sequence of its heads, so any
single-device attention works there. The default is
``jax.nn.dot_product_attention``; features that it lacks are built around it.
"""

import inspect
import numbers
from collections.abc import Callable, Sequence
from typing import Literal

import jax
import jax.numpy as jnp

from jax_ulysses._typing import Array

type AttentionFn = Callable[..., Array]


def local_attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    is_causal: bool = False,
    local_window_size: tuple[int, int] | None = None,
    mask: Array | None = None,
    sinks: Array | None = None,
    implementation: Literal["xla", "cudnn"] | None = None,
) -> Array:
    """Attention over a full sequence, for the heads of one rank.

    Args:
      query: [B, S, n, H].
      key: [B, L, k, H] with n a multiple of k.
      value: [B, L, k, H].
      is_causal: query i sees keys 0..i.
      local_window_size: (left, right): query i sees keys i-left..i+right.
      mask: bool, broadcastable to [B, n, S, L]; True may attend. Rows that may
        attend to nothing give zeros.
      sinks: [n] logits of one extra key per head that has no value (gpt-oss).
      implementation: of ``jax.nn.dot_product_attention``: "xla", "cudnn" or None.

    Returns:
      [B, S, n, H].
    """
    sees, bias, allowed = mask, None, None
    if mask is not None or sinks is not None:
        allowed = _explicit_mask(query, key, mask, is_causal, local_window_size)
    if sinks is not None and allowed is not None:
        # A key and value of zero behind the others, whose logit is the sink. (Scaling
        # the result by the softmax's residual would be cheaper, but JAX gives that
        # residual no gradient.)
        is_causal, local_window_size = False, None
        is_sink = jnp.arange(key.shape[1] + 1) == key.shape[1]
        bias = jnp.where(is_sink, sinks.astype(jnp.float32)[None, :, None, None], 0)
        sees = jnp.pad(allowed, ((0, 0),) * 3 + ((0, 1),), constant_values=True)
        key, value = (
            jnp.pad(t, ((0, 0), (0, 1), (0, 0), (0, 0))) for t in (key, value)
        )
    out = jax.nn.dot_product_attention(
        query,
        key,
        value,
        bias=bias,
        mask=sees,
        is_causal=is_causal,
        local_window_size=local_window_size,
        implementation=implementation,
    )
    if mask is not None and allowed is not None:
        sees_any = jnp.any(allowed, axis=-1)  # [B|1, n|1, S]
        sees_any = jnp.moveaxis(sees_any, 1, 2)[..., None]
        out = jnp.where(sees_any, out, jnp.zeros((), out.dtype))
    return out


def _explicit_mask(query, key, mask, is_causal, window) -> Array:
    """All masks in one, bool [B or 1, n or 1, S, L]."""
    distance = jnp.arange(query.shape[1])[:, None] - jnp.arange(key.shape[1])
    sees = jnp.ones(distance.shape, bool)
    if is_causal:
        sees = sees & (distance >= 0)
    if window is not None:
        sees = sees & (distance <= window[0]) & (distance >= -window[1])
    sees = sees[None, None]
    if mask is None:
        return sees
    return jnp.broadcast_to(mask & sees, (*mask.shape[:2], *distance.shape))


def normalise_window(
    window: int | tuple[int, int] | None, is_causal: bool
) -> tuple[int, int] | None:
    """Turns a window argument into (left, right) distances in tokens.

    Args:
      window: W means that a token sees the W nearest tokens on each visible side,
        itself included (Mistral's convention: causal W = left distance W-1). A pair
        is (left, right) distances, as in ``jax.nn.dot_product_attention``.
      is_causal: whether the right side is hidden anyway.

    Returns:
      (left, right), or None for no window.

    Raises:
      ValueError: W < 1, a negative distance, or neither a number nor a pair.
    """
    if window is None:
        return None
    if isinstance(window, numbers.Integral):
        window = int(window)
        if window < 1:
            raise ValueError(
                f"window={window}: a token sees at least itself, so it must be >= 1."
            )
        return (window - 1, 0 if is_causal else window - 1)
    if not (
        isinstance(window, Sequence)
        and len(window) == 2
        and all(isinstance(side, numbers.Integral) for side in window)
    ):
        raise ValueError(
            f"window={window!r} must be a number of tokens or a pair of distances."
        )
    left, right = map(int, window)
    if left < 0 or right < 0:
        raise ValueError(f"window={window}: distances must be >= 0.")
    return (left, 0 if is_causal else right)


def build_mask(
    length: int,
    *,
    is_causal: bool,
    window: tuple[int, int] | None,
    segment_ids: Array | None,
    key_mask: Array | None,
    num_joint: int = 0,
) -> Array:
    """Builds the explicit mask of a self-attention over a full sequence.

    Args:
      length: S.
      is_causal: query i sees keys 0..i.
      window: (left, right) distances or None.
      segment_ids: [B, S] int; tokens see only their own segment. None: one segment.
      key_mask: [B, S] bool, False hides a key. None: all visible.
      num_joint: keys put before the sequence that every token sees.

    Returns:
      Bool [B or 1, 1, S, num_joint + S].
    """
    position = jnp.arange(length)
    distance = position[:, None] - position[None, :]  # Query minus key.
    mask = jnp.ones((1, length, length), bool)
    if is_causal:
        mask = mask & (distance >= 0)
    if window is not None:
        mask = mask & (distance <= window[0]) & (distance >= -window[1])
    if segment_ids is not None:
        mask = mask & (segment_ids[:, :, None] == segment_ids[:, None, :])
    if key_mask is not None:
        mask = mask & key_mask[:, None, :]
    if num_joint:
        mask = jnp.pad(mask, ((0, 0), (0, 0), (num_joint, 0)), constant_values=True)
    return mask[:, None]


def call_attention(
    attention_fn: AttentionFn | None, query: Array, key: Array, value: Array, **features
) -> Array:
    """Calls a user's attention function with only the features that are in use.

    Args:
      attention_fn: takes (query, key, value) and keywords of ``local_attention``;
        None for ``local_attention``.
      query: [B, S, n, H].
      key: [B, L, k, H].
      value: [B, L, k, H].
      **features: keywords; None and False mean unused and are left out.

    Returns:
      [B, S, n, H].

    Raises:
      NotImplementedError: the function has no keyword for a feature in use. A
        mask is never dropped silently.
      ValueError: its result has another shape than the query.
    """
    fn = local_attention if attention_fn is None else attention_fn
    used = {k: v for k, v in features.items() if v is not None and v is not False}
    lacking = sorted(set(used) - _keywords(fn, set(used)))
    if lacking:
        raise NotImplementedError(
            f"attention_fn {getattr(fn, '__name__', fn)!r} takes no keyword {lacking}, "
            "which this call needs. Accept it there, or leave the feature out."
        )
    out = fn(query, key, value, **used)
    if out.shape != query.shape:
        raise ValueError(
            f"attention_fn returned shape {out.shape} for queries of shape "
            f"{query.shape}; it must keep [B, S, N/P, H]."
        )
    return out


def _keywords(fn: AttentionFn, wanted: set[str]) -> set[str]:
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):  # No signature, as for some built-ins.
        return wanted
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return wanted
    return {p.name for p in parameters}
