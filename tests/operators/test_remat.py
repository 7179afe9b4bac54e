# SPDX-License-Identifier: Apache-2.0
"""Rematerialisation: which policies run an exchange again; values never change."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jax_ulysses as ju
from tests.helpers import hlo, oracle
from tests.helpers.worlds import world

LAYERS, D, N, K, H = 3, 12, 8, 4, 4

# Exchanges in a compiled training step: the scan's body forward, and backward with
# what it recomputes. Four is the least possible.
POLICIES = {
    "no checkpoint": (None, 4),
    "everything_saveable": (jax.checkpoint_policies.everything_saveable, 4),
    "checkpoint_policy": (ju.checkpoint_policy, 4),
    "checkpoint_policy or dots": (
        jax.checkpoint_policies.save_from_both_policies(
            ju.checkpoint_policy, jax.checkpoint_policies.dots_saveable
        ),
        4,
    ),
    "head shards only": (
        jax.checkpoint_policies.save_only_these_names(ju.CHECKPOINT_NAMES[0]),
        5,
    ),
    "dots_saveable": (jax.checkpoint_policies.dots_saveable, 6),
    "nothing_saveable": (jax.checkpoint_policies.nothing_saveable, 6),
}


def _step(w, name, policy, scanned=True):
    def layer(x, weights):
        q, k, v = ju.qkv_proj_a2a(
            x,
            weights[0],
            axis_name="cp",
            num_heads=N,
            num_kv_heads=K,
            implementation=name,
        )
        k, v = (jnp.repeat(t, N // K, axis=2) for t in (k, v))
        mixed = jnp.tanh(q * k) + v
        return x + ju.a2a_out_proj(
            mixed, weights[1], axis_name="cp", implementation=name
        )

    if policy is not None:
        layer = jax.checkpoint(layer, policy=policy)

    def local(x, *weights):
        if scanned:
            return lax.scan(lambda c, p: (layer(c, p), None), x, weights)[0]
        for i in range(LAYERS):
            x = layer(x, tuple(p[i] for p in weights))
        return x

    specs = (w.tokens, P(), P())
    return w.vjp(local, specs, w.tokens), specs


def _values(w, specs):
    rng = np.random.default_rng(0)
    shapes = ((2, 8, D), (LAYERS, D, (N + 2 * K) * H), (LAYERS, N * H, D))
    values = [rng.normal(size=s).astype(np.float32) / 3 for s in shapes]
    return w.place(values, specs), w.put(values[0], w.tokens)


@pytest.mark.user_case(33)
def test_count_of_exchanges_and_equal_values(implementation):
    w = world("cp4")
    name = implementation.on(w)
    results, counts = {}, {}
    for key, (policy, _) in POLICIES.items():
        step, specs = _step(w, name, policy)
        args = _values(w, specs)
        compiled = step.lower(*args).compile()
        counts[key] = hlo.parse(compiled.as_text()).exchanges
        results[key] = jax.tree.map(np.asarray, compiled(*args))
    expected = {key: count for key, (_, count) in POLICIES.items()}
    assert counts == expected
    for key, result in results.items():
        for a, e in zip(*map(jax.tree.leaves, (result, results["no checkpoint"]))):
            assert oracle.rel_l2(a, e) < 1e-6, key


@pytest.mark.user_case(33)
def test_without_a_scan(implementation):
    w = world("cp4")
    name = implementation.on(w)
    step, specs = _step(w, name, ju.checkpoint_policy, scanned=False)
    assert hlo.of(step, *_values(w, specs)).exchanges == 4 * LAYERS


@pytest.mark.user_case(33)
def test_names_appear_in_the_traced_program():
    w = world("cp4")

    def call(x, w_qkv):
        kwargs = {"num_heads": N, "num_kv_heads": K, "axis_name": "cp"}
        q, _, _ = ju.qkv_proj_a2a(x, w_qkv, **kwargs)
        return ju.a2a_out_proj(q, w_qkv[:, : N * H].T, axis_name="cp")

    specs = (w.tokens, P())
    values = np.zeros((1, 8, D), np.float32), np.zeros((D, (N + 2 * K) * H), np.float32)
    mapped = w.shard_map(call, specs, w.tokens)
    text = str(jax.make_jaxpr(lambda *a: jax.vjp(mapped, *a))(*w.place(values, specs)))
    for name in ju.CHECKPOINT_NAMES:
        assert name in text
