# SPDX-License-Identifier: Apache-2.0
"""AdamW with warm-up, cosine decay and clipping."""

from typing import Any

import jax
import optax

from .config import TrainConfig

_WARM_UP_STEPS = 20
# Of Flax's layers, and of UlyssesAttention.
_NOT_DECAYED = {"scale", "bias", "q_norm", "k_norm", "b_qkv", "b_out", "sinks"}


def make_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """Returns the optimizer of a run."""
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=config.lr,
        warmup_steps=min(_WARM_UP_STEPS, config.steps // 4),
        decay_steps=config.steps,
        end_value=0.1 * config.lr,
    )
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(schedule, b1=0.9, b2=0.95, weight_decay=0.1, mask=_decayed),
    )


def _decayed(params) -> Any:
    """Marks matrices for weight decay; norm scales and biases keep their size."""

    def is_matrix(path, _) -> bool:
        # Not by the number of dimensions: layers are stacked.
        names = {str(getattr(key, "key", getattr(key, "name", ""))) for key in path}
        return names.isdisjoint(_NOT_DECAYED)

    return jax.tree_util.tree_map_with_path(is_matrix, params)
