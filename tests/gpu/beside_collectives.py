# SPDX-License-Identifier: Apache-2.0
"""Calls beside XLA's own asynchronous collectives, which also want multiprocessors.

Runs with a GPU a rank, in one process or in one each.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

import jax_ulysses as ju
from tests.gpu.shards import SEQUENCE, place

ROUNDS = 4


def steps(rank, count: int, collective_calls: bool) -> dict:
    """Rounds of matmul and call, with an independent psum in each.

    Returns:
      The step in which a call met its deadline, or None, and how XLA scheduled the
      sums.
    """
    name, p = rank.implementation, rank.num_ranks
    with ju.settings(deadline_s=2.0, collective_calls=collective_calls):
        ju.initialize(rank.mesh, "cp", 128 << 20, sm_budget=rank.sm_budget)

        def local(x, g, w):
            for _ in range(ROUNDS):
                # No data connects the sums and the calls: XLA may overlap them.
                g = lax.pcast(lax.psum(0.5 * g, "cp"), "cp", to="varying")
                y = ju.q_proj_a2a(
                    x @ w, w, axis_name="cp", num_heads=16, implementation=name
                )
                x = ju.a2a_out_proj(y, w, axis_name="cp", implementation=name)
            return x, g

        rng = np.random.default_rng(0)
        bf16 = jnp.dtype("bfloat16")
        x = rng.standard_normal((1, 2048 * p, 2048)).astype(bf16)
        w = (rng.standard_normal((2048, 2048)) / 45).astype(bf16)
        g = rng.standard_normal((1024 * p, 8192)).astype(np.float32)
        in_specs = (SEQUENCE, P("cp"), P())
        mapped = jax.shard_map(
            local, mesh=rank.mesh, in_specs=in_specs, out_specs=(SEQUENCE, P("cp"))
        )
        operands = [place(rank.mesh, v, s) for v, s in zip((x, g, w), in_specs)]
        program = jax.jit(mapped).lower(*operands).compile()
        text = program.as_text()
        fault, result = None, None
        try:
            for step in range(count):
                result = program(*operands)
                if step % 10 == 9:
                    jax.block_until_ready(result)
        except jax.errors.JaxRuntimeError as error:
            fault = {"step": step, "text": str(error)}
        finite = all(
            bool(np.isfinite(np.asarray(shard.data, np.float32)).all())
            for shard in result[0].addressable_shards
        )
        del program, result
        ju.finalize()
    return {
        "fault": fault,
        "finite": finite,
        "async_sums": text.count(" all-reduce-start("),
        "sums": text.count(" all-reduce("),
        "calls": text.count('custom_call_target="jax_ulysses.'),
        "annotated": text.count("_xla_stream_annotation"),
    }
