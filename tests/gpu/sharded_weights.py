# SPDX-License-Identifier: Apache-2.0
"""A training step as people with sharded weights have it, on GPUs of a rig.

Weights lie in shards on all ranks (FSDP): XLA gathers them before each layer and
scatters sums of their gradients behind it, and sums those of the replicated ones.
Between these collectives are the fused calls, with data parallelism where four ranks
allow it.
"""

from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import jax_ulysses as ju
from tests.gpu.shards import place

LAYERS, HEAD_DIM = 3, 64
AXES = ("dp", "cp")
TOKENS = P("dp", "cp")
# Sums of gradients by reduce-scatter, by reduce-scatter and by all-reduce.
LAYOUTS = {"qkv": P(None, AXES), "out": P(None, AXES), "mlp": P()}


def _layer(x, weights, implementation):
    whole = {
        name: lax.all_gather(w.astype(jnp.bfloat16), AXES, axis=1, tiled=True)
        for name, w in weights.items()
        if name != "mlp"
    }
    keywords = {"axis_name": "cp", "implementation": implementation}
    heads = x.shape[-1] // HEAD_DIM
    q, k, v = ju.qkv_proj_a2a(
        _norm(x), whole["qkv"], num_heads=heads, num_kv_heads=heads // 2, **keywords
    )
    a = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    x = x + ju.a2a_out_proj(a, whole["out"], **keywords)
    gate, up = jnp.split(_norm(x) @ weights["mlp"].astype(jnp.bfloat16), 2, axis=-1)
    return x + jax.nn.silu(gate) * up


def _norm(x):
    x32 = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + 1e-6)
    return (x32 * scale).astype(x.dtype)


def _make_step(mesh, implementation) -> Callable:
    def local(weights, x, target):
        def loss_of(weights):
            y = x
            for layer in weights:
                y = _layer(y, layer, implementation)
            error = y.astype(jnp.float32) - target
            return lax.pmean(jnp.mean(error * error), AXES)

        loss, gradients = jax.value_and_grad(loss_of)(weights)
        update = jax.tree.map(lambda w, g: w - 0.3 * g, weights, gradients)
        return loss, update

    specs = [LAYOUTS] * LAYERS
    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=(specs, TOKENS, TOKENS), out_specs=(P(), specs)
    )
    return jax.jit(mapped, donate_argnums=0)


def _operands(mesh, width, tokens):
    rng = np.random.default_rng(0)
    columns = {"qkv": 2 * width, "out": width, "mlp": 2 * width}

    def weight(name):
        value = rng.standard_normal((width, columns[name]), np.float32)
        return place(mesh, value / width**0.5, LAYOUTS[name])

    weights = [{name: weight(name) for name in LAYOUTS} for _ in range(LAYERS)]
    x = rng.standard_normal((2, tokens * mesh.shape["cp"], width), np.float32)
    return (
        weights,
        place(mesh, x.astype(jnp.bfloat16.dtype), TOKENS),
        place(mesh, np.roll(x, 1, axis=1), TOKENS),
    )


def _train(mesh, implementation, counts, *sizes) -> Iterator[dict]:
    """Trains from the start for each of the numbers of steps, by one program."""
    step = _make_step(mesh, implementation).lower(*_operands(mesh, *sizes)).compile()
    text = step.as_text()

    def count_of(name):
        # Asynchronous ones have a start and a done.
        return text.count(f" {name}(") + text.count(f" {name}-start(")

    for count in counts:
        weights, x, target = _operands(mesh, *sizes)
        losses, fault = [], None
        try:
            for i in range(count):
                loss, weights = step(weights, x, target)
                losses.append(loss)
                if i % 10 == 9:
                    jax.block_until_ready(weights)
            losses = [float(loss) for loss in losses]
        except jax.errors.JaxRuntimeError as error:
            losses, fault = [], {"step": i, "text": str(error)}
        yield {
            "losses": losses,
            "fault": fault,
            "calls": text.count('custom_call_target="jax_ulysses.'),
            "sums": count_of("all-reduce"),
            "scatters": count_of("reduce-scatter"),
            "gathers": count_of("all-gather"),
        }


def compare(rank, count: int, width: int, tokens: int) -> dict:
    """Steps by the library's kernels, the first fifth of them again, and by XLA.

    Args:
      rank: given by the rig.
      count: steps.
      width: D, of which heads of 64 are made; half as many KV heads.
      tokens: T.

    Returns:
      For "first", "again" and "xla" the losses, the step in which a call met its
      deadline, or None, and how many collectives the program has.
    """
    dp = 2 if rank.num_ranks % 4 == 0 else 1
    devices = rank.mesh.devices.reshape(dp, -1)
    mesh = Mesh(devices, AXES, axis_types=(AxisType.Explicit,) * 2)
    with ju.settings(deadline_s=5.0):
        ju.initialize(mesh, "cp", 64 << 20, sm_budget=rank.sm_budget)
        sizes = (width, tokens)
        few = count // 5
        first, again = _train(mesh, rank.implementation, (count, few), *sizes)
        (xla,) = _train(mesh, "xla", (few,), *sizes)
        ju.finalize()
    return {"first": first, "again": again, "xla": xla}
