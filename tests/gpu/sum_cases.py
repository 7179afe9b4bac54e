# SPDX-License-Identifier: Apache-2.0
"""Sums over the heap on ranks."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import jax_ulysses as ju
from tests.gpu.basics import initialize
from tests.gpu.shards import RANKS, local_shards, place, worst_error
from tests.helpers import hlo

COUNTS = (1, 3, 1003, 65536, 300_001)


def _in_rank_order(values):
    """Sum of [P, n] as the kernel adds: in float32, in rank order, rounded once."""
    total = np.zeros(values.shape[1:], np.float32)
    for value in values:
        total = total + value.astype(np.float32)
    return total.astype(values.dtype)


def sums(rank, workspace_bytes=1 << 20):
    """Vectors of all types and sizes, larger than a slot too; 50 times X and -X."""
    ju.initialize(rank.mesh, "cp", workspace_bytes, sm_budget=rank.sm_budget)
    program = jax.jit(
        jax.shard_map(
            lambda *parts: ju.psum(tuple(p[0] for p in parts), "cp", via="heap"),
            mesh=rank.mesh,
            in_specs=(RANKS,) * len(COUNTS),
            out_specs=(P(),) * len(COUNTS),
        )
    )
    for dtype in (np.float32, ml_dtypes.bfloat16, np.float16):
        rng = np.random.default_rng(0)
        xs = [
            rng.standard_normal((rank.num_ranks, n), np.float32).astype(dtype)
            for n in COUNTS
        ]
        signed = {s: [place(rank.mesh, s * x, RANKS) for x in xs] for s in (1, -1)}
        text = program.lower(*signed[1]).compile().as_text()
        assert not hlo.parse(text).count, "a collective of XLA"
        wanted = [_in_rank_order(x) for x in xs]
        for i in range(50):
            sign = (1, -1)[i % 2]
            for total, expected in zip(program(*signed[sign]), wanted):
                for copy in local_shards(total):
                    assert np.array_equal(sign * copy, expected), (dtype, i, copy.size)
    assert 4 * max(COUNTS) * rank.num_ranks > workspace_bytes // 2


def sums_along_both_axes(rank):
    """Groups along both axes of a mesh, one sum after the other, and its gradient."""
    if rank.num_ranks < 4:
        return  # Too few for two axes.
    devices = rank.mesh.devices.reshape(2, -1)
    mesh = Mesh(devices, ("dp", "cp"), axis_types=(AxisType.Explicit,) * 2)
    for axis in ("cp", "dp"):
        initialize(rank, axis, mesh)
    x = np.random.default_rng(0).standard_normal((rank.num_ranks, 100), np.float32)

    def local(x):
        def loss(x):
            return jnp.sum(jnp.sin(ju.psum(jnp.square(x), ("dp", "cp"), via="heap")))

        return jax.value_and_grad(loss)(x)

    spec = P(("dp", "cp"))
    mapped = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=(P(), spec))
    value, gradient = jax.jit(mapped)(place(mesh, x, spec))
    total = np.square(x.astype(np.float64)).sum(0)
    np.testing.assert_allclose(local_shards(value)[0], np.sin(total).sum(), rtol=1e-4)
    assert worst_error(gradient, np.cos(total) * 2 * x) < 1e-5
