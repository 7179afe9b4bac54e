# SPDX-License-Identifier: Apache-2.0
"""Training whose every sum and exchange goes over the heap: no collective of XLA."""

import jax
import numpy as np
import pytest

import jax_ulysses
from jax_ulysses.models.trainer import Trainer
from tests.helpers import hlo

_WORKSPACE_BYTES = 4 << 20


@pytest.fixture
def heap_trainer(train_config, corpus):
    """A trainer on host groups along both axes."""

    def make(**changes):
        settings = {"implementation": "host", "reductions": "heap"} | changes
        trainer = Trainer(train_config(**settings), corpus)
        for axis in ("cp", "dp") if trainer.mesh.shape["dp"] > 1 else ("cp",):
            jax_ulysses.initialize(trainer.mesh, axis, _WORKSPACE_BYTES)
        return trainer

    yield make
    jax_ulysses.finalize()


def _losses(trainer, steps=4):
    """Losses, gradient norms and final parameters of a few steps."""
    records = []

    def on_step(record, _):
        records.append((record.loss, record.grad_norm))
        return len(records) == steps

    state = trainer.run(trainer.init_state(), 0, on_step)
    return np.array(records), jax.device_get(state["params"])


@pytest.mark.parametrize(("dp", "cp"), [(2, 4), (1, 4), (1, 2)])
def test_a_step_has_no_collective_of_xla(heap_trainer, dp, cp):
    found = hlo.parse(heap_trainer(dp=dp, cp=cp).compiled.as_text())
    assert not found.count, found.count
    # A layer, forward and backward, and one call a group for the loss and all
    # gradients. Replicated KV heads (cp 4 of 2 heads) change nothing here.
    assert found.fused == {
        "jax_ulysses.gemm_a2a.v1": 2,
        "jax_ulysses.a2a_gemm.v1": 2,
        "jax_ulysses.psum.v1": 1 + (dp > 1),
    }


@pytest.mark.parametrize(("dp", "cp"), [(2, 4), (1, 2)])
def test_training_is_that_of_xla(heap_trainer, train_config, corpus, dp, cp):
    mine, params = _losses(heap_trainer(dp=dp, cp=cp))
    theirs, expected = _losses(Trainer(train_config(dp=dp, cp=cp), corpus))
    # float32: both add the same numbers in another order.
    np.testing.assert_allclose(mine, theirs, rtol=2e-5)
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True):
        # AdamW's first steps have the size of the learning rate, whatever the gradient.
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-4)


def test_two_runs_have_the_same_bits(heap_trainer):
    first, params = _losses(heap_trainer())
    again, same = _losses(heap_trainer())
    np.testing.assert_array_equal(first, again)
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(same), strict=True):
        np.testing.assert_array_equal(a, b)


def test_parameters_stay_the_same_on_all_ranks(heap_trainer):
    trainer = heap_trainer()
    state = trainer.run(trainer.init_state(), 0, lambda record, _: record.step == 2)
    for leaf in jax.tree.leaves(state):
        copies = {np.asarray(s.data).tobytes() for s in leaf.addressable_shards}
        assert len(leaf.addressable_shards) == 8
        assert len(copies) == 1


def test_the_state_is_donated(heap_trainer):
    """The result takes the place of the argument: no second copy of the state."""
    trainer = heap_trainer()
    memory = trainer.compiled.memory_analysis()
    state = trainer.abstract_state()
    size = sum(s.size * s.dtype.itemsize for s in jax.tree.leaves(state))
    assert memory.alias_size_in_bytes >= size


def test_exchanges_run_once_forward_and_once_backward(heap_trainer):
    """Counted by the handlers, in a run: scan, remat under our policy, grad."""
    from jax_ulysses.ffi import targets

    trainer = heap_trainer(dp=1, cp=4)
    (session,) = (g.session for g in jax_ulysses.group._groups.values())

    def calls():
        return targets.group_info(session)["calls"]

    steps, layers, ranks = 3, trainer.config.model.num_layers, 4
    _ = trainer.compiled
    before = calls()
    state = trainer.run(
        trainer.init_state(), 0, lambda record, _: record.step == steps - 1
    )
    made = calls() - before
    # Two exchanges a layer each way, and one sum, on every rank.
    assert made == steps * ranks * (4 * layers + 1)
    before = calls()
    trainer.validate(state["params"])
    assert calls() - before == 4 * ranks * (2 * layers + 1)


def test_a_reduction_that_is_not_possible_is_refused(train_config, corpus):
    trainer = Trainer(train_config(reductions="heap"), corpus)
    with pytest.raises(NotImplementedError, match=r"no peer group with a heap along"):
        _ = trainer.compiled


def test_accumulated_gradients_are_those_of_the_whole_batch(heap_trainer):
    """Two micro-batches, donated accumulators, on a dp x cp mesh."""
    trainer = heap_trainer()
    tokens, targets = trainer._train_batch(0)
    with jax.set_mesh(trainer.mesh):
        params = trainer.init_state()["params"]

        def add(total, params, *batch):
            _, grads = trainer._loss_and_grads(params, *batch)
            return jax.tree.map(lambda t, g: t + g / 2, total, grads)

        whole = jax.jit(trainer._loss_and_grads)
        _, expected = whole(params, *trainer.put_batch(tokens, targets))
        add = jax.jit(add, donate_argnums=0)
        total = jax.tree.map(jax.numpy.zeros_like, params)
        for half in (slice(0, None, 2), slice(1, None, 2)):
            donated = total
            batch = trainer.put_batch(tokens[half], targets[half])
            total = add(donated, params, *batch)
            assert all(leaf.is_deleted() for leaf in jax.tree.leaves(donated))
    for a, b in zip(jax.tree.leaves(total), jax.tree.leaves(expected), strict=True):
        scale = np.abs(np.asarray(b)).max()
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * scale)
