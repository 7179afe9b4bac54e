# SPDX-License-Identifier: Apache-2.0
"""A model and a text small enough that compiling dominates."""

import pathlib

import numpy as np
import pytest

from jax_ulysses import TokenOrder
from jax_ulysses.models.config import TrainConfig
from jax_ulysses.models.data import Corpus, load_corpus
from jax_ulysses.models.presets import ModelConfig


@pytest.fixture(scope="session")
def model_config() -> ModelConfig:
    """Eight query heads, two KV heads: cp 1 and 2 split them, cp 4 and 8 replicate."""
    return ModelConfig(
        d_model=32,
        num_layers=2,
        num_heads=8,
        num_kv_heads=2,
        head_dim=6,
        ffn_dim=48,
        qk_norm=True,
    )


@pytest.fixture(scope="session")
def text(tmp_path_factory) -> pathlib.Path:
    """A folder with three small files, one of them binary."""
    root = tmp_path_factory.mktemp("text")
    rng = np.random.default_rng(1)
    words = np.array(["def ", "return ", "self.", "(x)", ":\n", "    ", "import "])
    for name in ("a.txt", "b.txt"):
        (root / name).write_text("".join(rng.choice(words, 4000)))
    (root / "binary.bin").write_bytes(b"\0" * 100)
    return root


@pytest.fixture(scope="session")
def corpus(text) -> Corpus:
    return load_corpus(text, 32)


@pytest.fixture(scope="session")
def train_config(model_config):
    """Returns a function that makes settings, with changes."""

    def make(**changes) -> TrainConfig:
        settings = {
            "preset": "test",
            "model": model_config,
            "dp": 2,
            "cp": 4,
            "seq_len": 32,
            "batch": 8,
            "steps": 8,
            "lr": 1e-3,
            "seed": 0,
            "dtype": "fp32",
            "token_order": TokenOrder.CONTIGUOUS,
            "implementation": "xla",
            "checkpoint_every": 100,
        }
        return TrainConfig(**settings | changes)

    return make
