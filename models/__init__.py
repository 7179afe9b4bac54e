# SPDX-License-Identifier: Apache-2.0
"""Flax (nnx) models on top of the operators, and the training program.

`UlyssesAttention` is the layer to put into a model of your own. `Transformer` is a
small decoder built around it, and ``python -m jax_ulysses.models.train`` trains it.
"""

from .attention import UlyssesAttention
from .backward_order import weights_first
from .presets import ModelConfig, Preset, get_preset, preset_names
from .transformer import Transformer, next_token_loss

__all__ = [
    "ModelConfig",
    "Preset",
    "Transformer",
    "UlyssesAttention",
    "get_preset",
    "next_token_loss",
    "preset_names",
    "weights_first",
]
