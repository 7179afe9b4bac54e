# SPDX-License-Identifier: Apache-2.0
"""What a compiled training step communicates."""

import re

import jax

from jax_ulysses.models.trainer import Trainer


def _count_in_loops(hlo: str, op: str) -> list[int]:
    """Counts an op in each computation that contains it."""
    computations = re.split(r"\n\n", hlo)
    counts = [len(re.findall(rf" {op}(?:-start)?\(", c)) for c in computations]
    return sorted(count for count in counts if count)


def test_a_step_exchanges_twice_forward_and_twice_backward(train_config, corpus):
    hlo = Trainer(train_config(), corpus).compiled.as_text()
    # Layers are scanned: one loop body forward, one backward. Rematerialisation adds
    # none, and nothing is gathered: activations stay sharded over the sequence.
    assert _count_in_loops(hlo, "all-to-all") == [2, 2]
    assert _count_in_loops(hlo, "all-gather") == []
    # Local sequence 32 / 4, local batch 8 / 2; the whole sequence only inside heads.
    assert "f32[4,8,32]" in hlo
    assert "f32[4,32,32]" not in hlo
    assert "f32[8,8,32]" not in hlo


def test_remat_without_the_policy_would_exchange_again(train_config, corpus):
    """The counter above can see a recomputed exchange."""
    trainer = Trainer(train_config(), corpus)
    with jax.set_mesh(trainer.mesh):
        state = trainer.abstract_state()["params"]
        batch = trainer.put_batch(*trainer._train_batch(0))
        again = jax.checkpoint(trainer.loss)
        step = jax.jit(jax.value_and_grad(again)).lower(state, *batch).compile()
    assert sum(_count_in_loops(step.as_text(), "all-to-all")) > 4


def test_cp_1_has_no_exchange(train_config, corpus):
    hlo = Trainer(train_config(dp=8, cp=1), corpus).compiled.as_text()
    assert " all-to-all(" not in hlo
