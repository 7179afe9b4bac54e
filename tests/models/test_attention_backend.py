# SPDX-License-Identifier: Apache-2.0
"""Which attention a training step contains."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from jax_ulysses.local_attention import local_attention
from jax_ulysses.models import get_preset
from jax_ulysses.models.cli import parse
from jax_ulysses.models.data import load_corpus
from jax_ulysses.models.trainer import Trainer


@pytest.fixture
def config():
    arguments = "--dp 1 --cp 2 --seq-len 64 --batch 2 --dtype bf16 --steps 1"
    options = parse(arguments.split())
    small = dataclasses.replace(get_preset("tiny").model, num_layers=1, d_model=64)
    return dataclasses.replace(options.config, model=small)


@pytest.mark.parametrize("backend", ["xla", "cudnn"])
def test_the_step_asks_for_it(backend, config, monkeypatch):
    """Of cuDNN there is none here: only what JAX is asked for can be seen."""
    asked = []
    attention = jax.nn.dot_product_attention

    def record(*args, implementation=None, **kwargs):
        asked.append(implementation)
        return attention(*args, implementation="xla", **kwargs)

    monkeypatch.setattr(jax.nn, "dot_product_attention", record)
    corpus = load_corpus(None, config.seq_len)
    trainer = Trainer(config, corpus)
    # After the check of the devices, which cuDNN does not pass on CPUs.
    trainer.config = dataclasses.replace(config, attention=backend)
    with jax.set_mesh(trainer.mesh):
        trainer._graph = trainer._graphdef()
        batch = trainer.put_batch(*trainer._train_batch(0))
        jax.eval_shape(trainer.loss, trainer.abstract_state()["params"], *batch)
    assert asked
    assert set(asked) == {backend}


def test_cudnn_lowers_inside_shard_map(monkeypatch):
    """Forward and backward, with the types of varying arrays checked."""
    cudnn = pytest.importorskip("jax._src.cudnn.fused_attention_stablehlo")
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91600)
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda _: True)
    mesh = jax.make_mesh((2,), ("cp",), devices=jax.devices()[:2])
    heads = jax.P(None, None, "cp")

    def gradients(q, k, v):
        def loss(*qkv):
            out = local_attention(*qkv, is_causal=True, implementation="cudnn")
            return jnp.sum(out.astype(jnp.float32))

        return jax.grad(loss, argnums=(0, 1, 2))(q, k, v)

    mapped = jax.shard_map(
        gradients, mesh=mesh, in_specs=(heads,) * 3, out_specs=(heads,) * 3
    )
    sharding = jax.sharding.NamedSharding(mesh, heads)
    x = jax.ShapeDtypeStruct((1, 128, 8, 64), jnp.bfloat16, sharding=sharding)
    text = jax.jit(mapped).trace(x, x, x).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @__cudnn$fmhaSoftmax(") == 1
    assert text.count("custom_call @__cudnn$fmhaSoftmaxBackward(") == 1
