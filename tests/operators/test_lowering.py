# SPDX-License-Identifier: Apache-2.0
"""Lowering and export for CUDA from a host that has no GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_ulysses as ju
from tests.helpers import oracle
from tests.helpers.worlds import world


def _layer(w):
    def call(x, w_qkv, w_out):
        return ju.ulysses_attention(
            x,
            ju.AttentionParams(w_qkv, w_out),
            axis_name="cp",
            num_heads=8,
            num_kv_heads=2,
            implementation="xla",
        )

    specs = (w.tokens, P(), P())
    mapped = w.shard_map(call, specs, w.tokens)

    def step(*operands):
        return jax.grad(lambda *a: jnp.sum(jnp.sin(mapped(*a))), (0, 1, 2))(*operands)

    rng = np.random.default_rng(0)
    shapes = ((2, 16, 12), (12, 12 * 4), (32, 12))
    values = [rng.normal(size=s).astype(np.float32) for s in shapes]
    return jax.jit(mapped), jax.jit(step), w.place(values, specs)


@pytest.mark.user_case(43)
@pytest.mark.parametrize("mesh", ["cp4", "dp2cp4-explicit", "dp2cp4-auto"])
def test_lowers_for_both_platforms(mesh):
    forward, step, values = _layer(world(mesh))
    for fn, exchanges in ((forward, 2), (step, 4)):
        texts = [
            fn.trace(*values).lower(lowering_platforms=(platform,)).as_text()
            for platform in ("cpu", "cuda")
        ]
        for text in texts:
            assert text.count("all_to_all") == exchanges
            assert "custom_call @jax_ulysses" not in text


@pytest.mark.user_case(43)
def test_export_for_both_platforms_and_run():
    w = world("cp4")
    forward, _, values = _layer(w)
    exported = jax.export.export(forward, platforms=("cpu", "cuda"))(*values)
    assert exported.platforms == ("cpu", "cuda")
    assert exported.nr_devices == 4
    assert exported.mlir_module().count('"stablehlo.all_to_all"') == 2
    assert oracle.rel_l2(exported.call(*values), forward(*values)) < 1e-6
