# SPDX-License-Identifier: Apache-2.0
"""``UlyssesAttention``: the attention layer as a Flax nnx module on global arrays."""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_ulysses import AttentionParams, TokenOrder, ulysses_attention
from jax_ulysses._typing import Array, AxisName
from jax_ulysses.dispatch import Implementation, normalise
from jax_ulysses.local_attention import AttentionFn
from jax_ulysses.sharding import axis_tuple


class UlyssesAttention(nnx.Module):
    """Multi-head attention over a sequence that is sharded over a mesh axis.

    Called with global arrays under ``jax.jit`` it makes its own ``shard_map``; called
    inside a ``shard_map`` whose axes are manual it works on the local shapes.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        axis_name: AxisName = "cp",
        batch_axes: AxisName | None = ("dp",),
        causal: bool = True,
        window: int | tuple[int, int] | None = None,
        rope_theta: float | None = 10000.0,
        qk_norm: bool = False,
        use_bias: bool = False,
        sinks: bool = False,
        cross_attention: bool = False,
        token_order: TokenOrder = TokenOrder.CONTIGUOUS,
        attention_fn: AttentionFn | None = None,
        implementation: Implementation = None,
        dtype: Dtype = jnp.float32,
        param_dtype: Dtype = jnp.float32,
        mesh: Mesh | None = None,
        rngs: nnx.Rngs,
    ):
        """Creates the parameters.

        Args:
          d_model: D.
          num_heads: N.
          num_kv_heads: K; None for N.
          head_dim: H; None for D / N.
          axis_name: context-parallel mesh axis, or a tuple of axes, major first.
          batch_axes: mesh axes over which the batch is sharded, or None; axes that
            the mesh does not have are left out.
          causal: token i sees tokens 0..i.
          window: sliding window in tokens, see ``ulysses_attention``.
          rope_theta: RoPE base, None for no RoPE.
          qk_norm: RMSNorm on each query head, and on each key head that is projected
            here.
          use_bias: biases on both projections.
          sinks: one learned attention-sink logit a head.
          cross_attention: only queries are projected; calls need ``cross_kv``.
          token_order: order of the tokens in the arrays given.
          attention_fn: local attention, see ``ulysses_attention``.
          implementation: of the fused operators.
          dtype: dtype of the computation.
          param_dtype: dtype of the parameters.
          mesh: mesh with the axes; None takes the one of ``jax.set_mesh`` at the call.
          rngs: parameter randomness.

        Raises:
          ValueError: D not divisible by N when ``head_dim`` is None, or no heads.
        """
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if min(num_heads, num_kv_heads) < 1:
            raise ValueError(
                f"num_heads={num_heads} and num_kv_heads={num_kv_heads} must be at "
                "least 1."
            )
        if head_dim is None:
            if d_model % num_heads:
                raise ValueError(
                    f"d_model={d_model} is not divisible by num_heads={num_heads}; "
                    "give head_dim."
                )
            head_dim = d_model // num_heads
        # Plain values, which compare by what they are: modules that were made alike
        # have one graph definition, so that jit traces once for all of them.
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.head_dim = head_dim
        self.causal = causal and not cross_attention
        self.axis_name, self.batch_axes = axis_name, batch_axes
        self.token_order = TokenOrder(token_order)
        self.cross_attention, self.dtype, self.mesh = cross_attention, dtype, mesh
        self.window, self.rope_theta, self.attention_fn = (
            window,
            rope_theta,
            attention_fn,
        )
        self.implementation = normalise(implementation)

        projected = num_heads + (0 if cross_attention else 2 * num_kv_heads)
        init = nnx.initializers.lecun_normal()
        columns, features = projected * head_dim, num_heads * head_dim

        def param(value_init, *shape):
            return nnx.Param(value_init(rngs.params(), shape, param_dtype))

        zeros, ones = nnx.initializers.zeros_init(), nnx.initializers.ones_init()
        self.w_qkv = param(init, d_model, columns)
        self.w_out = param(init, features, d_model)
        self.b_qkv = param(zeros, columns) if use_bias else None
        self.b_out = param(zeros, d_model) if use_bias else None
        self.q_norm = param(ones, head_dim) if qk_norm else None
        own_keys = qk_norm and not cross_attention
        self.k_norm = param(ones, head_dim) if own_keys else None
        self.sinks = param(zeros, num_heads) if sinks else None

    def params(self) -> AttentionParams:
        """Parameters cast to the computation's dtype, for ``ulysses_attention``."""

        def cast(param):
            return param[...].astype(self.dtype)

        optional = ("b_qkv", "b_out", "q_norm", "k_norm", "sinks")
        given = {n: cast(p) for n in optional if (p := getattr(self, n)) is not None}
        return AttentionParams(cast(self.w_qkv), cast(self.w_out), **given)

    def __call__(
        self,
        x: Array,
        *,
        positions: Array | None = None,
        segment_ids: Array | None = None,
        padding_mask: Array | None = None,
        cross_kv: tuple[Array, Array] | None = None,
        joint_kv: tuple[Array, Array] | None = None,
    ) -> Array:
        """Applies the layer.

        Args:
          x: [B, S, D] (inside ``shard_map``: [B, T, D]), tokens in ``token_order``.
            Any S: it is padded to a multiple of P, masked and cut again. In zigzag
            order, and inside ``shard_map``, it must fit.
          positions: [B, S] int for RoPE; None for true global positions.
          segment_ids: [B, S] int document ids; None for one document a row.
          padding_mask: [B, S] bool, False for padding.
          cross_kv: keys and values [B, L, K, H], needed with ``cross_attention``.
          joint_kv: likewise, attended to beside the sequence.

        Returns:
          Same shape as ``x``.

        Raises:
          ValueError: no mesh, a mesh without the axis, ``x`` sharded otherwise, or
            arguments that do not fit.
        """
        if self.cross_attention != (cross_kv is not None):
            raise ValueError(
                f"cross_attention={self.cross_attention}, so cross_kv must "
                f"{'be' if self.cross_attention else 'not be'} given."
            )
        tokens = {
            "positions": positions,
            "segment_ids": segment_ids,
            "padding_mask": padding_mask,
        }
        context = {"cross_kv": cross_kv, "joint_kv": joint_kv}
        x = x.astype(self.dtype)
        for name, value in tokens.items():
            if value is not None and value.shape != x.shape[:2]:
                raise ValueError(
                    f"{name} must have shape [B, S] = {x.shape[:2]}, that of x without "
                    f"D; got {value.shape}."
                )
        if jax.sharding.get_abstract_mesh().manual_axes:
            return self._attend(x, self.params(), tokens, context)
        return self._sharded(x, tokens, context)

    def _attend(self, x, params, tokens, context):
        return ulysses_attention(
            x,
            params,
            axis_name=self.axis_name,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            causal=self.causal,
            window=self.window,
            rope_theta=self.rope_theta,
            token_order=self.token_order,
            attention_fn=self.attention_fn,
            implementation=self.implementation,
            **tokens,
            **context,
        )

    def _sharded(self, x, tokens, context):
        mesh = self._find_mesh()
        axes = axis_tuple(self.axis_name)
        missing = [a for a in axes if a not in mesh.shape]
        if missing:
            raise ValueError(
                f"UlyssesAttention: axis_name {self.axis_name!r} is not in the "
                f"mesh, whose axes are {dict(mesh.shape)}; nothing would be sharded."
            )
        batch = None
        if self.batch_axes is not None:
            batch = tuple(a for a in axis_tuple(self.batch_axes) if a in mesh.shape)
        batch_size = math.prod(mesh.shape[a] for a in batch or ())
        if x.ndim != 3:
            raise ValueError(f"x must have shape [B, S, D], got {x.shape}.")
        if x.shape[0] % batch_size:
            raise ValueError(
                f"The batch B={x.shape[0]} cannot be shared by {batch_size} devices of "
                f"axes {batch}: {x.shape[0]} % {batch_size} = "
                f"{x.shape[0] % batch_size}."
            )
        length = x.shape[1]
        num_ranks = math.prod(mesh.shape[a] for a in axes)
        token_spec = P(batch or None, axes)
        _check_batch_sharding(x, batch or ())
        if length % num_ranks == 0:
            _check_sequence_sharding(x, axes)
        x, tokens = self._pad(x, tokens, num_ranks)
        in_specs = (
            token_spec,
            P(),
            dict.fromkeys(tokens, token_spec),
            dict.fromkeys(context, P(batch or None)),
        )
        # Explicit meshes want operands that carry these specs already.
        operands = (x, self.params(), tokens, context)
        operands = (_place(mesh, *pair) for pair in zip(operands, in_specs))
        out = jax.shard_map(
            self._attend, mesh=mesh, in_specs=in_specs, out_specs=token_spec
        )(*operands)
        if out.shape[1] == length:
            return out
        # S does not divide, so an Explicit mesh cannot type the result as sharded.
        return _place(mesh, out, P(batch or None))[:, :length]

    def _find_mesh(self):
        if self.mesh is not None:
            return self.mesh
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty:
            raise ValueError(
                "UlyssesAttention needs a mesh: pass mesh=..., or call it under "
                "jax.set_mesh(mesh)."
            )
        return mesh

    def _pad(self, x, tokens, num_ranks):
        """Pads S to a multiple of P and hides the added tokens."""
        extra = -x.shape[1] % num_ranks
        if self.token_order is TokenOrder.ZIGZAG:
            if x.shape[1] % (2 * num_ranks):
                raise ValueError(
                    f"With TokenOrder.ZIGZAG, S={x.shape[1]} must be a multiple of "
                    f"2P={2 * num_ranks}: x is permuted already, so the layer cannot "
                    "pad it. Pad before to_zigzag, and pass padding_mask."
                )
            return x, tokens
        if not extra:
            return x, tokens
        # Added tokens come last, so causal attention hides them without a mask.
        if tokens["padding_mask"] is None and not self.causal:
            tokens["padding_mask"] = jnp.ones(x.shape[:2], bool)

        def pad(value):
            if value is None:
                return None
            return jnp.pad(value, ((0, 0), (0, extra)) + ((0, 0),) * (value.ndim - 2))

        return pad(x), {name: pad(value) for name, value in tokens.items()}


def _explicit_axes(x, dim):
    """Explicit mesh axes, and those over which a dimension is sharded, by its type."""
    sharding = jax.typeof(x).sharding
    explicit = getattr(sharding.mesh, "explicit_axes", ())
    spec = (*sharding.spec, None, None)[dim]
    return explicit, (spec,) if isinstance(spec, str) else tuple(spec or ())


def _check_batch_sharding(x, batch):
    """Refuses a sharding of B that would be undone: every device would have it all."""
    _, found = _explicit_axes(x, 0)
    mesh = jax.typeof(x).sharding.mesh
    unknown = [a for a in found if a not in batch and mesh.shape[a] > 1]
    if unknown:
        raise ValueError(
            f"x {jax.typeof(x)} is sharded over {unknown} on its batch axis, which "
            f"batch_axes={batch} do not name: pass batch_axes={found}."
        )


def _check_sequence_sharding(x, axes):
    """On Explicit meshes the type says how ``x`` is sharded: refuse a wrong one."""
    explicit, found = _explicit_axes(x, 1)
    if not all(a in explicit for a in axes):
        return
    if found != axes:
        raise ValueError(
            f"x {jax.typeof(x)} is sharded over {found or 'nothing'} on its sequence "
            f"axis, expected {axes}: shard it as P(batch, {axes[0]!r}), for "
            "example with jax.sharding.reshard."
        )


def _place(mesh, tree, spec):
    """Reshards where the mesh is Explicit; elsewhere shard_map does it."""
    explicit = [
        name
        for name, kind in zip(mesh.axis_names, mesh.axis_types)
        if kind == jax.sharding.AxisType.Explicit
    ]
    if not explicit:
        return tree

    def kept(entry):
        return tuple(a for a in axis_tuple(entry) if a in explicit) if entry else None

    def leaf(spec, value):
        where = NamedSharding(mesh, P(*(kept(entry) or None for entry in spec)))
        return jax.tree.map(lambda v: jax.sharding.reshard(v, where), value)

    if isinstance(spec, dict):
        return {name: leaf(spec[name], value) for name, value in tree.items()}
    return leaf(spec, tree)
