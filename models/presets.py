# SPDX-License-Identifier: Apache-2.0
"""Model sizes: two small ones for CPUs, and the geometries of published models."""

import dataclasses
import importlib.resources
import json


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of a decoder-only transformer.

    Attributes:
      d_model: D, the width of the residual stream.
      num_layers: Number of blocks.
      num_heads: N, query heads.
      num_kv_heads: K, key/value heads; N must be a multiple of K.
      head_dim: H, the size of one head. N * H need not equal D.
      ffn_dim: Width of the SwiGLU hidden layer.
      vocab_size: Number of token ids; 256 for bytes.
      rope_theta: Base of the rotary frequencies.
      qk_norm: Whether queries and keys are RMS-normalised per head.
      tie_embeddings: Whether the output projection is the embedding's transpose.
    """

    d_model: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_dim: int
    vocab_size: int = 256
    rope_theta: float = 10_000.0
    qk_norm: bool = False
    tie_embeddings: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preset:
    """A model and the training settings that suit it.

    Attributes:
      name: What ``--preset`` calls it.
      model: Its shape.
      seq_len: S, tokens in a sequence.
      batch: B, sequences in a global batch.
      steps: Optimizer steps of a run.
      lr: Peak learning rate.
    """

    name: str
    model: ModelConfig
    seq_len: int
    batch: int
    steps: int
    lr: float


# Sized for two CPU cores: `tiny` is what `make demo` trains, twice, in a few minutes.
_TINY = Preset(
    name="tiny",
    model=ModelConfig(
        d_model=128,
        num_layers=4,
        num_heads=8,
        num_kv_heads=4,
        head_dim=16,
        ffn_dim=384,
    ),
    seq_len=512,
    batch=4,
    steps=100,
    lr=3e-3,
)
_SMALL = Preset(
    name="small",
    model=ModelConfig(
        d_model=512,
        num_layers=8,
        num_heads=16,
        num_kv_heads=8,
        head_dim=32,
        ffn_dim=1408,
    ),
    seq_len=2048,
    batch=8,
    steps=2000,
    lr=1e-3,
)
# The geometries fix the attention and the width. Depth and feed-forward width are
# ours: four layers show the step time of a layer without needing the memory of all.
_GEOMETRY_LAYERS = 4


def _geometries() -> dict[str, dict[str, int]]:
    """Returns the geometries shipped with the package, by name."""
    file = importlib.resources.files("jax_ulysses") / "data" / "shapes.json"
    return json.loads(file.read_text(encoding="utf-8"))["geometries"]


def _from_geometry(name: str, shape: dict[str, int]) -> Preset:
    d_model = shape["d_model"]
    return Preset(
        name=name,
        model=ModelConfig(
            d_model=d_model,
            num_layers=_GEOMETRY_LAYERS,
            num_heads=shape["heads"],
            num_kv_heads=shape["kv_heads"],
            head_dim=shape["head_dim"],
            # SwiGLU's usual 8/3 of the width, in whole tiles of 128.
            ffn_dim=-(-8 * d_model // (3 * 128)) * 128,
            rope_theta=500_000.0,
            # With random weights at these widths it keeps attention logits bounded.
            qk_norm=True,
        ),
        seq_len=16_384,
        batch=8,
        steps=100,
        lr=3e-4,
    )


def preset_names() -> tuple[str, ...]:
    """Returns every name that `get_preset` knows."""
    return ("tiny", "small", *_geometries())


def get_preset(name: str) -> Preset:
    """Returns the preset called `name`.

    Raises:
      ValueError: If there is none; the text lists the names.
    """
    for preset in (_TINY, _SMALL):
        if preset.name == name:
            return preset
    geometries = _geometries()
    if name not in geometries:
        raise ValueError(
            f"unknown preset {name!r}; choose one of {', '.join(preset_names())}"
        )
    return _from_geometry(name, geometries[name])
