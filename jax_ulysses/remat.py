# SPDX-License-Identifier: Apache-2.0
"""Names and a policy for ``jax.checkpoint``, so that no exchange runs twice.

A fused operator is one opaque call to JAX: ``dots_saveable`` and its relatives do
not see the GEMM inside, and would recompute it together with its exchange. The
operators name their results instead.
"""

import jax
from jax.ad_checkpoint import checkpoint_name

from jax_ulysses._typing import Array

HEAD_SHARDS = "ulysses_head_shards"
GATHERED = "ulysses_gathered"
OUTPUT = "ulysses_output"

CHECKPOINT_NAMES = (HEAD_SHARDS, GATHERED, OUTPUT)


def name_parts(parts: tuple[Array, ...]) -> tuple[Array, ...]:
    """Names head shards that came out of an exchange."""
    return tuple(checkpoint_name(p, HEAD_SHARDS) for p in parts)


def name_gathered(y: Array, gathered: Array) -> tuple[Array, Array]:
    """Names the two results of an A2A -> GEMM dataflow."""
    return checkpoint_name(y, OUTPUT), checkpoint_name(gathered, GATHERED)


def checkpoint_policy(*args, **kwargs) -> bool:
    """Policy for ``jax.checkpoint``: save what came through an exchange, nothing else.

    Under it each exchange runs exactly once forward and once backward. It costs,
    per attention layer and rank, the head shards of Q, K and V, the gathered
    attention output [B, T, N*H], and the layer's output [B, T, D]. Combine it with
    others by ``jax.checkpoint_policies.save_from_both_policies``.

    Args:
      *args: what JAX passes to a policy.
      **kwargs: likewise.

    Returns:
      Whether JAX should save the value.
    """
    return _save_named(*args, **kwargs)


_save_named = jax.checkpoint_policies.save_only_these_names(*CHECKPOINT_NAMES)
