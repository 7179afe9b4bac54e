# SPDX-License-Identifier: Apache-2.0
"""The split over ranks changes nothing, and each rank sees the whole sequence."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jax_ulysses import TokenOrder, from_zigzag, to_zigzag
from jax_ulysses.models import Transformer, next_token_loss
from jax_ulysses.models.trainer import Trainer, make_mesh

_SPLITS = [(8, 1), (4, 2), (2, 4), (1, 8)]


def _dense_logits(params, config, tokens):
    """The same model written plainly, in float64, on one device, without JAX."""
    # Parameters by name, from the stacked tree.
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)

    def norm(x, scale):
        return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-6) * scale

    def rope(x):
        half = config.head_dim // 2
        frequency = config.rope_theta ** (-np.arange(half) / half)
        turn = np.exp(1j * np.arange(x.shape[1])[:, None] * frequency)[:, None]
        z = (x[..., :half] + 1j * x[..., half:]) * turn
        return np.concatenate([z.real, z.imag], -1)

    n, k, h = config.num_heads, config.num_kv_heads, config.head_dim
    batch, length = tokens.shape
    hidden = np.tri(length) == 0
    x = p["embedding"][tokens]
    for layer in range(config.num_layers):
        block = jax.tree.map(lambda leaf, i=layer: leaf[i], p["blocks"])
        attention, ffn = block["attention"], block["ffn"]
        qkv = norm(x, block["attention_norm"]["scale"]) @ attention["w_qkv"]
        heads = qkv.reshape(batch, length, n + 2 * k, h)
        query = rope(norm(heads[:, :, :n], attention["q_norm"]))
        key = rope(norm(heads[:, :, n : n + k], attention["k_norm"]))
        value = heads[:, :, n + k :]
        out = np.empty_like(query)
        for head in range(n):
            kv = head * k // n
            scores = query[:, :, head] @ key[:, :, kv].swapaxes(1, 2) / np.sqrt(h)
            scores[:, hidden] = -np.inf
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            out[:, :, head] = weights @ value[:, :, kv]
        x = x + out.reshape(batch, length, n * h) @ attention["w_out"]
        gate, up = np.split(
            norm(x, block["ffn_norm"]["scale"]) @ ffn["gate_up"]["kernel"], 2, axis=-1
        )
        x = x + (gate / (1 + np.exp(-gate)) * up) @ ffn["down"]["kernel"]
    return norm(x, p["final_norm"]["scale"]) @ p["unembedding"].T


@functools.cache
def _build(config, mesh, **kwargs):
    """Returns a model's structure and parameters on a mesh."""
    with jax.set_mesh(mesh):
        make = jax.jit(
            lambda: nnx.state(
                Transformer(config, rngs=nnx.Rngs(0), **kwargs), nnx.Param
            ),
            out_shardings=NamedSharding(mesh, PartitionSpec()),
        )
        shape = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0), **kwargs))
        return nnx.graphdef(shape), make()


def _put(mesh, *arrays):
    return jax.device_put(arrays, NamedSharding(mesh, PartitionSpec("dp", "cp")))


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(0).integers(0, 256, (8, 32))


@pytest.mark.parametrize("order", list(TokenOrder))
def test_logits_equal_a_plain_model_in_float64(model_config, tokens, order):
    mesh = make_mesh(2, 4)
    graph, params = _build(model_config, mesh, token_order=order)
    expected = _dense_logits(nnx.to_pure_dict(params), model_config, tokens)
    zigzag = order is TokenOrder.ZIGZAG
    with jax.set_mesh(mesh):
        (given,) = _put(mesh, np.asarray(to_zigzag(tokens, 4)) if zigzag else tokens)
        logits = jax.jit(lambda p, t: nnx.merge(graph, p)(t))(params, given)
    logits = np.asarray(logits)
    if zigzag:
        logits = np.asarray(from_zigzag(logits, 4))
    np.testing.assert_allclose(logits, expected, rtol=0, atol=2e-5)


@pytest.fixture(scope="module")
def reference(train_config, corpus):
    """Parameters, and their loss and gradients on one device."""
    trainer = Trainer(train_config(dp=1, cp=1), corpus)
    params = jax.device_get(trainer.init_state()["params"])
    return params, *_loss_and_grads(trainer, params)


def _loss_and_grads(trainer, params):
    with jax.set_mesh(trainer.mesh):
        params = trainer.put_state(params)
        batch = trainer.put_batch(*trainer._train_batch(0))
        result = jax.jit(jax.value_and_grad(trainer.loss))(params, *batch)
        return jax.device_get(result)


@pytest.mark.parametrize("order", list(TokenOrder))
@pytest.mark.parametrize(("dp", "cp"), _SPLITS)
def test_loss_and_gradients_do_not_depend_on_the_split(
    dp, cp, order, train_config, corpus, reference
):
    trainer = Trainer(train_config(dp=dp, cp=cp, token_order=order), corpus)
    params, expected_loss, expected = reference
    loss, grads = _loss_and_grads(trainer, params)
    assert abs(loss - expected_loss) < 2e-6
    for (path, mine), theirs in zip(
        jax.tree_util.tree_leaves_with_path(grads),
        jax.tree.leaves(expected),
        strict=True,
    ):
        scale = np.abs(theirs).max()
        assert scale > 0, path
        np.testing.assert_allclose(
            mine, theirs, rtol=0, atol=2e-5 * scale, err_msg=str(path)
        )


def test_initial_parameters_do_not_depend_on_the_mesh(train_config, corpus, reference):
    params = Trainer(train_config(dp=2, cp=4), corpus).init_state()["params"]
    mine, theirs = jax.tree.leaves(params), jax.tree.leaves(reference[0])
    for a, b in zip(mine, theirs, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("order", list(TokenOrder))
def test_the_first_token_reaches_the_last_rank(model_config, tokens, order):
    mesh = make_mesh(1, 8)
    graph, params = _build(model_config, mesh, token_order=order)
    changed = tokens.copy()
    changed[:, 0] = (changed[:, 0] + 1) % 256
    run = jax.jit(lambda p, t: nnx.merge(graph, p)(t))
    logits = []
    for plain in (tokens, changed):
        zigzag = order is TokenOrder.ZIGZAG
        with jax.set_mesh(mesh):
            (given,) = _put(mesh, np.asarray(to_zigzag(plain, 8)) if zigzag else plain)
            logits.append(run(params, given))
    # Every rank holds four of the 32 tokens of every row, and all of them move.
    before, after = (
        {s.index[1].start or 0: np.asarray(s.data) for s in x.addressable_shards}
        for x in logits
    )
    assert sorted(before) == [4 * rank for rank in range(8)]
    for start in before:
        assert before[start].shape == (8, 4, 256)
        moved = np.abs(after[start] - before[start]).max(axis=-1)
        assert (moved > 1e-6).all(), f"rank {start // 4} does not see token 0"


def test_a_later_token_does_not_reach_an_earlier_one(model_config, tokens):
    mesh = make_mesh(1, 8)
    graph, params = _build(model_config, mesh)
    changed = tokens.copy()
    changed[:, 20] = (changed[:, 20] + 1) % 256
    run = jax.jit(lambda p, t: nnx.merge(graph, p)(t))
    with jax.set_mesh(mesh):
        before, after = (
            np.asarray(run(params, *_put(mesh, t))) for t in (tokens, changed)
        )
    np.testing.assert_array_equal(before[:, :20], after[:, :20])
    assert (np.abs(after - before)[:, 20:].max(axis=-1) > 1e-6).all()


@pytest.mark.parametrize("rank", [0, 3])
def test_a_rank_of_padding_alone_is_harmless(rank, model_config, tokens):
    """One rank holds no real token: no NaN, and the rest is as without it.

    On rank 0 the padding precedes all real tokens, where only the mask hides it, and
    its own rows see nothing at all.
    """
    mesh = make_mesh(2, 4)
    graph, params = _build(model_config, mesh)
    mask = np.ones(tokens.shape, bool)
    padding = slice(8 * rank, 8 * rank + 8)
    mask[:, padding] = False

    def loss(params, tokens, mask):
        logits = nnx.merge(graph, params)(tokens, padding_mask=mask)
        return next_token_loss(logits, tokens, mask), logits

    run = jax.jit(jax.value_and_grad(loss, has_aux=True))
    other = tokens.copy()
    other[:, padding] = 7
    with jax.set_mesh(mesh):
        results = [run(params, *_put(mesh, t, mask)) for t in (tokens, other)]
    for (value, logits), grads in results:
        assert np.isfinite(value)
        assert np.isfinite(np.asarray(logits)).all()
        assert all(np.isfinite(np.asarray(g)).all() for g in jax.tree.leaves(grads))
    # What the padding contains changes nothing at all.
    assert float(results[0][0][0]) == float(results[1][0][0])
    for a, b in zip(*(jax.tree.leaves(r[1]) for r in results), strict=True):
        np.testing.assert_array_equal(a, b)
    # The real tokens' logits are those of the dense model on them alone. (RoPE depends
    # on distances only, so padding in front does not matter.)
    real = mask[0]
    expected = _dense_logits(nnx.to_pure_dict(params), model_config, tokens[:, real])
    np.testing.assert_allclose(
        np.asarray(results[0][0][1])[:, real], expected, rtol=0, atol=2e-5
    )


def test_the_loss_counts_real_tokens_once():
    logits = jnp.log(jnp.array([[[0.5, 0.5], [0.25, 0.75]], [[0.1, 0.9], [0.5, 0.5]]]))
    targets = jnp.array([[0, 1], [1, 0]])
    mask = jnp.array([[True, True], [True, False]])
    losses = -np.log([0.5, 0.75, 0.9, 0.5])
    assert np.isclose(next_token_loss(logits, targets), losses.mean())
    assert np.isclose(next_token_loss(logits, targets, mask), losses[:3].mean())
    nothing = next_token_loss(logits, targets, jnp.zeros((2, 2), bool))
    assert float(nothing) == 0


def test_logits_of_a_bfloat16_model_are_float32(model_config, tokens):
    """Not products that were rounded to bfloat16 before: neighbours would be equal."""
    mesh = make_mesh(2, 4)
    graph, params = _build(model_config, mesh, dtype=jnp.bfloat16)
    with jax.set_mesh(mesh):
        logits = jax.jit(lambda p, t: nnx.merge(graph, p)(t))(
            params, *_put(mesh, tokens)
        )
    assert logits.dtype == jnp.float32
    rounded = logits.astype(jnp.bfloat16).astype(jnp.float32)
    assert (rounded != logits).mean() > 0.9
