# SPDX-License-Identifier: Apache-2.0
"""A decoder-only transformer whose attention runs sequence-parallel.

Letters: B batch, S global sequence, D model width, V vocabulary, L layers. All arrays
here are global arrays: `UlyssesAttention` is the only part that looks at ranks.
Everything else acts on one token at a time, so it needs no communication at all when
activations are sharded [B over dp, S over cp].
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

import jax_ulysses
from jax_ulysses.dispatch import Implementation
from jax_ulysses.local_attention import AttentionFn

from .attention import UlyssesAttention
from .backward_order import weights_first
from .presets import ModelConfig


class SwiGLU(nnx.Module):
    """The gated feed-forward layer: down(silu(gate(x)) * up(x)).

    Args:
      d_model: D, width of input and output.
      ffn_dim: Width between.
      dtype: Compute type; parameters are float32.
      rngs: Source of initial values.
    """

    def __init__(self, d_model: int, ffn_dim: int, *, dtype, rngs: nnx.Rngs):
        # Gate and up are one GEMM: they share their input.
        self.gate_up = nnx.Linear(
            d_model, 2 * ffn_dim, use_bias=False, dtype=dtype, rngs=rngs
        )
        self.down = nnx.Linear(ffn_dim, d_model, use_bias=False, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "B S D"]) -> Float[Array, "B S D"]:
        """Applies the layer to every token."""
        gate, up = jnp.split(self.gate_up(x), 2, axis=-1)
        down, hidden = weights_first(self.down, jax.nn.silu(gate) * up)
        return down(hidden)


class Block(nnx.Module):
    """One layer: attention and feed-forward, each behind an RMSNorm, each residual.

    Args:
      config: The model's shape.
      token_order: Order of the tokens along the sequence.
      implementation: Passed to `UlyssesAttention`.
      attention_fn: Likewise.
      dtype: Compute type; parameters are float32.
      rngs: Source of initial values.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        token_order: jax_ulysses.TokenOrder,
        implementation: Implementation,
        attention_fn: AttentionFn | None,
        dtype,
        rngs: nnx.Rngs,
    ):
        self.attention_norm = nnx.RMSNorm(config.d_model, dtype=dtype, rngs=rngs)
        self.attention = UlyssesAttention(
            config.d_model,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            rope_theta=config.rope_theta,
            qk_norm=config.qk_norm,
            token_order=token_order,
            attention_fn=attention_fn,
            implementation=implementation,
            dtype=dtype,
            rngs=rngs,
        )
        self.ffn_norm = nnx.RMSNorm(config.d_model, dtype=dtype, rngs=rngs)
        self.ffn = SwiGLU(config.d_model, config.ffn_dim, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "B S D"], **attention) -> Float[Array, "B S D"]:
        """Applies the layer; keywords go to the attention."""
        x = x + self.attention(self.attention_norm(x), **attention)
        ffn, normed = weights_first(self.ffn, self.ffn_norm(x))
        return x + ffn(normed)


class Transformer(nnx.Module):
    """Tokens in, logits out.

    The parameters of all blocks are stacked along a leading axis of L and the blocks
    run in one `jax.lax.scan`, so the program's size does not grow with depth. Each
    block is rematerialised in the backward pass under
    `jax_ulysses.checkpoint_policy`, which keeps the results of the exchanges: no
    exchange runs a second time.

    Args:
      config: The model's shape.
      token_order: Order of the tokens that `__call__` gets. In zigzag order the caller
        permutes tokens (and targets) with `jax_ulysses.to_zigzag`.
      implementation: Passed to the operators; None takes the best that can.
      attention_fn: Local attention of a rank, see `jax_ulysses.ulysses_attention`.
      dtype: Compute type; parameters and logits are float32.
      remat: Whether to rematerialise. Off only to compare.
      rngs: Source of initial values.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        token_order: jax_ulysses.TokenOrder = jax_ulysses.TokenOrder.CONTIGUOUS,
        implementation: Implementation = None,
        attention_fn: AttentionFn | None = None,
        dtype=jnp.float32,
        remat: bool = True,
        rngs: nnx.Rngs,
    ):
        self.dtype = dtype
        self.remat = remat
        normal = nnx.initializers.normal(stddev=0.02)
        table = (config.vocab_size, config.d_model)
        self.embedding = nnx.Param(normal(rngs.params(), table, jnp.float32))

        @nnx.split_rngs(splits=config.num_layers)
        @nnx.vmap
        def stacked(rngs: nnx.Rngs) -> Block:
            return Block(
                config,
                token_order=token_order,
                implementation=implementation,
                attention_fn=attention_fn,
                dtype=dtype,
                rngs=rngs,
            )

        self.blocks = stacked(rngs)
        self.final_norm = nnx.RMSNorm(config.d_model, dtype=dtype, rngs=rngs)
        self.unembedding = (
            None
            if config.tie_embeddings
            else nnx.Param(normal(rngs.params(), table, jnp.float32))
        )

    def __call__(
        self,
        tokens: Int[Array, "B S"],
        *,
        positions: Int[Array, "B S"] | None = None,
        segment_ids: Int[Array, "B S"] | None = None,
        padding_mask: Bool[Array, "B S"] | None = None,
    ) -> Float[Array, "B S V"]:
        """Returns the logits of the token after each position, in float32.

        Args:
          tokens: Ids in [0, V), in the model's token order.
          positions: True position of each token; None means 0 to S-1 in plain order.
          segment_ids: Tokens see only tokens of their own segment.
          padding_mask: True where a token is real; others are never attended to.
        """
        attention = {
            "positions": positions,
            "segment_ids": segment_ids,
            "padding_mask": padding_mask,
        }
        x = _look_up(self.embedding[...], tokens).astype(self.dtype)
        graph, layers = nnx.split(self.blocks)

        def layer(x, params):
            return nnx.merge(graph, params)(x, **attention), None

        if self.remat:
            # prevent_cse=False: a scan body cannot be merged with the forward pass.
            layer = jax.checkpoint(
                layer, policy=jax_ulysses.checkpoint_policy, prevent_cse=False
            )
        x, _ = jax.lax.scan(layer, x, layers)
        x = self.final_norm(x)
        table = self.embedding if self.unembedding is None else self.unembedding
        return jnp.einsum(
            "bsd,vd->bsv",
            x,
            table[...].astype(self.dtype),
            preferred_element_type=jnp.float32,
        )


def _look_up(
    table: Float[Array, "V D"], tokens: Int[Array, "B S"]
) -> Float[Array, "B S D"]:
    """Returns rows of `table`, sharded as `tokens` are."""
    sharding = jax.typeof(tokens).sharding
    if AxisType.Explicit not in sharding.mesh.axis_types:
        return table[tokens]
    # On Explicit axes JAX does not guess the layout of a gather's result.
    return table.at[tokens].get(out_sharding=PartitionSpec(*sharding.spec, None))


def next_token_loss(
    logits: Float[Array, "B S V"],
    targets: Int[Array, "B S"],
    mask: Bool[Array, "B S"] | None = None,
) -> Float[Array, ""]:
    """Returns the mean cross-entropy, in nats, over all real tokens of the batch.

    The mean is over the *global* array. A mean of per-rank means would weigh tokens
    differently as soon as ranks hold different numbers of real tokens.

    Args:
      logits: Scores of every id.
      targets: The right id at each position, in the order of the logits.
      mask: True where the target counts; None counts all.
    """
    log_probs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    losses = -jnp.take_along_axis(log_probs, targets[..., None], axis=-1)[..., 0]
    if mask is None:
        return losses.mean()
    return jnp.where(mask, losses, 0).sum() / jnp.maximum(mask.sum(), 1)
