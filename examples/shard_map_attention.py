# SPDX-License-Identifier: Apache-2.0
"""Causal GQA attention with the sequence on 8 devices, inside ``jax.shard_map``.

Run it with `python examples/shard_map_attention.py`; it needs no GPU.
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import jax_ulysses

B, S, D = 2, 64, 48  # batch, global sequence, model dimension
N, K, H = 16, 4, 8  # query heads, KV heads, head dimension; 4 KV heads on 8 ranks

jax.set_mesh(mesh := jax.make_mesh((8,), ("cp",)))
jax_ulysses.initialize(mesh, axis_name="cp")  # on GPUs the fused kernels need it
sequence = P(None, "cp")  # [B, S, D] with S cut over "cp"; weights are replicated


@jax.jit
@jax.shard_map(in_specs=(sequence, P(), P()), out_specs=sequence)
def attention(x, w_qkv, w_out):
    q, k, v = jax_ulysses.qkv_proj_a2a(
        x, w_qkv, axis_name="cp", num_heads=N, num_kv_heads=K
    )  # q [B, S, N/P, H]: the whole sequence of this rank's heads
    a = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    return jax_ulysses.a2a_out_proj(a, w_out, axis_name="cp")


def dense(x, w_qkv, w_out):  # the same on one device, without the library
    qkv = (x @ w_qkv).reshape(B, S, N + 2 * K, H)
    q, k, v = jnp.split(qkv, (N, N + K), axis=2)
    a = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    return a.reshape(B, S, N * H) @ w_out


keys = jax.random.split(jax.random.key(0), 3)
x = jax.random.normal(keys[0], (B, S, D))
w_qkv = jax.random.normal(keys[1], (D, (N + 2 * K) * H)) / D**0.5
w_out = jax.random.normal(keys[2], (N * H, D)) / (N * H) ** 0.5


def loss(f):
    return lambda *operands: (f(*operands) ** 2).sum()


x_sharded = jax.reshard(x, sequence)
got = attention(x_sharded, w_qkv, w_out)
gradients = jax.grad(loss(attention), (0, 1, 2))(x_sharded, w_qkv, w_out)
wanted = dense(x, w_qkv, w_out), *jax.grad(loss(dense), (0, 1, 2))(x, w_qkv, w_out)
for name, g, w in zip(("y", "dx", "dw_qkv", "dw_out"), (got, *gradients), wanted):
    error = abs(jax.device_get(g) - jax.device_get(w)).max() / abs(w).max()
    print(f"{name}: relative error {error:.1e}")
    assert error < 1e-5
