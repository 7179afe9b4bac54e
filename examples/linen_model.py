# SPDX-License-Identifier: Apache-2.0
"""``UlyssesAttention`` inside a Flax Linen model, through ``flax.nnx.bridge``.

Run it with `python examples/linen_model.py`; it needs no GPU.
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.nnx import bridge

import jax_ulysses
from jax_ulysses.models import UlyssesAttention

B, S, D, N, K, H = 4, 96, 32, 8, 2, 4
jax.set_mesh(mesh := jax.make_mesh((2, 4), ("dp", "cp")))
jax_ulysses.initialize(mesh, axis_name="cp")  # on GPUs the fused kernels need it
sharded = jax.P("dp", "cp")  # of [B, S, D]


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        attention = bridge.to_linen(
            UlyssesAttention, D, N, K, H, rope_theta=None, name="attention"
        )
        return x + attention(nn.RMSNorm(name="norm")(x))


def dense(variables, x):  # the same weights, without shard_map and without the library
    weights = variables["params"]["attention"]
    h = nn.RMSNorm().apply({"params": variables["params"]["norm"]}, x)
    qkv = (h @ weights["w_qkv"]).reshape(B, S, N + 2 * K, H)
    q, k, v = jnp.split(qkv, (N, N + K), axis=2)
    a = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    return x + a.reshape(B, S, N * H) @ weights["w_out"]


x = jax.random.normal(jax.random.key(0), (B, S, D))
x_sharded = jax.reshard(x, sharded)
block = Block()
variables = block.init(jax.random.key(1), x_sharded)
print(jax.tree.map(jnp.shape, variables))
y = jax.device_get(jax.jit(block.apply)(variables, x_sharded))
wanted = jax.device_get(dense(variables, x))
print(f"largest error {abs(y - wanted).max():.1e}")
assert abs(y - wanted).max() < 1e-5
