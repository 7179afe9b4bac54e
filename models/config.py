# SPDX-License-Identifier: Apache-2.0
"""The settings of a training run, checked before anything is compiled."""

import dataclasses
import json
import math
import pathlib
from typing import Literal, get_args

from jax_ulysses import TokenOrder
from jax_ulysses.dispatch import ImplementationName

from .presets import ModelConfig

# Backends of `jax.nn.dot_product_attention`.
type AttentionBackend = Literal["xla", "cudnn"]
ATTENTION = get_args(AttentionBackend.__value__)


class ConfigError(ValueError):
    """The run cannot start as asked; the text is one line for the user."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything that decides what a run computes, and how it is spread.

    Attributes:
      preset: Name of the preset, for the record.
      model: The model's shape.
      dp: Ranks on the data-parallel axis.
      cp: P, ranks on the context-parallel axis.
      seq_len: S, tokens in a sequence.
      batch: B, sequences in a global batch.
      steps: Optimizer steps of the whole run.
      lr: Peak learning rate.
      seed: Seeds the initial parameters and the choice of batches.
      dtype: "fp32" or "bf16", the compute type. Parameters are always float32.
      token_order: Order of the tokens along the sequence.
      implementation: Passed to the operators; None takes the best that can.
      checkpoint_every: Steps between checkpoints.
      reductions: How gradients are summed over ranks: "auto", "xla" or "heap".
      attention: Who computes a rank's local attention: "xla", whose memory grows with
        S * S, or "cudnn", flash attention for bf16 on GPUs.
      data: Path of the text; None takes Python's standard library.
      fingerprint: What `Corpus.fingerprint` says of that text.
    """

    preset: str
    model: ModelConfig
    dp: int
    cp: int
    seq_len: int
    batch: int
    steps: int
    lr: float
    seed: int
    dtype: str
    token_order: TokenOrder
    implementation: ImplementationName | None
    checkpoint_every: int
    reductions: str = "auto"
    attention: AttentionBackend = "xla"
    data: str | None = None
    fingerprint: str = ""

    def to_json(self) -> str:
        """Returns the settings as JSON text."""
        fields = dataclasses.asdict(self) | {"token_order": self.token_order.value}
        return json.dumps(fields, indent=2) + "\n"

    @classmethod
    def from_file(cls, path: pathlib.Path) -> "TrainConfig":
        """Reads what `to_json` wrote.

        Raises:
          ConfigError: If the file cannot be read as settings.
        """
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
            fields["model"] = ModelConfig(**fields["model"])
            fields["token_order"] = TokenOrder(fields["token_order"])
            return cls(**fields)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"cannot read settings from {path}: {error}") from error


# What a resumed run must keep, or its losses would not be those of the first run. How
# the work is spread (dp, cp, token order, implementation) may change.
_FIXED = ("model", "seq_len", "batch", "steps", "lr", "seed", "dtype", "fingerprint")


def check_resumable(saved: TrainConfig, now: TrainConfig) -> None:
    """Checks that `now` continues the run that was `saved`.

    Raises:
      ConfigError: If a setting that decides the losses differs.
    """
    for name in _FIXED:
        before, after = getattr(saved, name), getattr(now, name)
        if before != after:
            raise ConfigError(
                f"cannot resume: the checkpoint was made with {name}={before}, "
                f"this run has {name}={after}"
            )


def check(config: TrainConfig) -> None:
    """Checks a run's settings against each other.

    Raises:
      ConfigError: Naming the numbers that do not fit and the rule.
    """
    for name in ("dp", "cp", "seq_len", "batch", "steps", "checkpoint_every"):
        value = getattr(config, name)
        if value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}")
    if not 0 < config.lr < math.inf:
        raise ConfigError(f"lr must be positive and finite, got {config.lr}")
    # More bits than JAX takes without x64 would be dropped.
    if not 0 <= config.seed < 2**32:
        raise ConfigError(f"seed must be from 0 to 2**32 - 1, got {config.seed}")
    if config.attention == "cudnn" and config.dtype != "bf16":
        raise ConfigError(f"attention cudnn needs dtype bf16, got {config.dtype}")
    if config.batch % config.dp:
        raise ConfigError(
            f"batch {config.batch} is not divisible by dp {config.dp}: "
            f"every data-parallel rank needs the same number of sequences"
        )
    zigzag = config.token_order is TokenOrder.ZIGZAG
    pieces = config.cp * (2 if zigzag else 1)
    if config.seq_len % pieces:
        rule = f"2 * cp = {pieces} in zigzag order" if zigzag else f"cp {config.cp}"
        raise ConfigError(f"seq_len {config.seq_len} is not divisible by {rule}")
    n, k, p = config.model.num_heads, config.model.num_kv_heads, config.cp
    if n % p:
        raise ConfigError(
            f"{n} query heads cannot be split over cp {p}: "
            f"cp must divide the number of query heads"
        )
    if k % p and p % k:
        raise ConfigError(
            f"{k} KV heads and cp {p} do not fit: one must be a multiple of the other"
        )
