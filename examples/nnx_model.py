# SPDX-License-Identifier: Apache-2.0
"""A Flax NNX block with ``UlyssesAttention`` on a 2 x 4 mesh, trained for a few steps.

Run it with `python examples/nnx_model.py`; it needs no GPU.
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jax_ulysses
from jax_ulysses.models import UlyssesAttention

B, S, D, N, K, H = 4, 96, 32, 8, 2, 4  # 2 KV heads on 4 context-parallel ranks
jax.set_mesh(mesh := jax.make_mesh((2, 4), ("dp", "cp")))
jax_ulysses.initialize(mesh, axis_name="cp")  # on GPUs the fused kernels need it
sharded = jax.P("dp", "cp")  # of [B, S, D]


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.RMSNorm(D, rngs=rngs)
        self.attention = UlyssesAttention(D, N, K, H, rope_theta=None, rngs=rngs)

    def __call__(self, x):
        return x + self.attention(self.norm(x))


def dense(block, x):  # the same weights, without shard_map and without the library
    w_qkv, w_out = block.attention.w_qkv[...], block.attention.w_out[...]
    qkv = (block.norm(x) @ w_qkv).reshape(B, S, N + 2 * K, H)
    q, k, v = jnp.split(qkv, (N, N + K), axis=2)
    a = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    return x + a.reshape(B, S, N * H) @ w_out


@nnx.jit
def train_step(block, optimizer, x, y):
    loss, gradients = nnx.value_and_grad(lambda b: jnp.mean((b(x) - y) ** 2))(block)
    optimizer.update(block, gradients)
    return loss


block = Block(nnx.Rngs(0))
optimizer = nnx.Optimizer(block, optax.adam(1e-2), wrt=nnx.Param)
x = jax.random.normal(jax.random.key(1), (B, S, D))
x_sharded, target = (jax.reshard(a, sharded) for a in (x, jnp.roll(x, 1, axis=1)))
losses = [float(train_step(block, optimizer, x_sharded, target)) for _ in range(20)]
error = abs(jax.device_get(block(x_sharded)) - jax.device_get(dense(block, x))).max()
print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, largest error {error:.1e}")
assert losses[-1] < 0.8 * losses[0]
assert error < 1e-5
