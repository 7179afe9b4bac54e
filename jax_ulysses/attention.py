# SPDX-License-Identifier: Apache-2.0
"""``ulysses_attention``: attention on sequence shards in two exchanges."""

import contextlib
import contextvars
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_ulysses import api, sharding, spec
from jax_ulysses._typing import Activations, Array, AxisName
from jax_ulysses.dispatch import Implementation
from jax_ulysses.local_attention import (
    AttentionFn,
    build_mask,
    call_attention,
    normalise_window,
)
from jax_ulysses.order import global_order
from jax_ulysses.rotary import apply_rope, rms_norm
from jax_ulysses.spec import TokenOrder


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionParams:
    """Parameters of one attention layer, a pytree.

    Attributes:
      w_qkv: [D, (N+2K)*H], columns [Q heads, K heads, V heads]. With ``cross_kv``
        only queries are projected: [D, N*H].
      w_out: [N*H, D].
      b_qkv: [(N+2K)*H] (with ``cross_kv`` [N*H]) or None.
      b_out: [D] or None.
      q_norm: [H] RMSNorm scale of queries, or None for no QK-norm.
      k_norm: [H] RMSNorm scale of keys, or None.
      sinks: [N] attention-sink logits, or None.
    """

    w_qkv: Array
    w_out: Array
    b_qkv: Array | None = None
    b_out: Array | None = None
    q_norm: Array | None = None
    k_norm: Array | None = None
    sinks: Array | None = None


def ulysses_attention(
    x: Activations,
    params: AttentionParams,
    *,
    axis_name: AxisName,
    num_heads: int,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    causal: bool = True,
    window: int | tuple[int, int] | None = None,
    rope_theta: float | None = 10000.0,
    positions: Array | None = None,
    segment_ids: Array | None = None,
    padding_mask: Array | None = None,
    cross_kv: tuple[Array, Array] | None = None,
    joint_kv: tuple[Array, Array] | None = None,
    norm_epsilon: float = 1e-6,
    tensor_axis: str | None = None,
    token_order: TokenOrder = TokenOrder.CONTIGUOUS,
    attention_fn: AttentionFn | None = None,
    implementation: Implementation = None,
) -> Activations:
    """Self-, cross- or joint attention of a sequence shard, inside ``shard_map``.

    qkv_proj_a2a -> QK-norm -> RoPE -> attention over the full sequence of the local
    heads -> a2a_out_proj. Positions, windows, segments and masks always mean the
    global sequence.

    Args:
      x: [B, T, D], sharded on the axis.
      params: weights; N, K below are those of these weights, after any
        tensor-parallel split.
      axis_name: context-parallel mesh axis, or a tuple of axes, major first.
      num_heads: N.
      num_kv_heads: K; None for N.
      head_dim: H; None takes it from the width of ``w_qkv``.
      causal: token i sees tokens 0..i of the global sequence.
      window: sliding window in tokens: W means that a token sees the W nearest ones
        on each visible side, itself included; a pair is (left, right) distances.
      rope_theta: RoPE base, None for no RoPE. Half-split form: it turns the pairs
        (i, i + H/2). Not applied to ``cross_kv`` and ``joint_kv`` keys.
      positions: [B, T] int positions for RoPE; None for true global positions.
      segment_ids: [B, T] int; tokens see only tokens of the same id (packed
        documents, may differ per row).
      padding_mask: [B, T] bool, False for padding: hidden as a key, and its output
        is zero before the output projection.
      cross_kv: keys and values [B, L, K, H], the same on every rank of the axis;
        queries attend to them alone. Taken as they are, without ``k_norm``. Needs
        ``causal=False``, and no window, segments or ``joint_kv``.
      joint_kv: likewise, attended to beside the sequence by every token.
      norm_epsilon: of the QK-norm.
      tensor_axis: mesh axis over which heads of the weights are split, and x is
        not; the output is summed over it.
      token_order: tokens that a sequence shard holds.
      attention_fn: function (query [B,S,n,H], key, value, **features) -> [B,S,n,H];
        features are keywords of ``jax_ulysses.local_attention.local_attention``,
        given only when in use. None for that function itself.
      implementation: of the fused operators.

    Returns:
      [B, T, D].

    Raises:
      ValueError: shapes or arguments that do not fit.
      NotImplementedError: ``attention_fn`` lacks a feature that is in use, or the
        implementation named cannot do this call.
    """
    if _inside.get():
        raise ValueError(
            "ulysses_attention was called inside the attention_fn of another one: the "
            "exchange would be applied twice. Pass a plain single-device attention."
        )
    axes, num_ranks = sharding.check_manual("ulysses_attention", axis_name)
    order = TokenOrder(token_order)
    spec.check_rank("x", x.shape, "B T D")
    num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    if tensor_axis is not None:
        _check_tensor_axis(tensor_axis, axes, x, params)
    _check_combination(causal, window, segment_ids, cross_kv, joint_kv)
    exchange: dict[str, Any] = {
        "axis_name": axes,
        "token_order": order,
        "implementation": implementation,
    }
    side = _gather_side_inputs(x, axes, order, positions, segment_ids, padding_mask)

    if cross_kv is not None:
        query = api.q_proj_a2a(
            x,
            params.w_qkv,
            params.b_qkv,
            num_heads=num_heads,
            head_dim=head_dim,
            **exchange,
        )
        key, value = _replicated_heads(
            "cross_kv", cross_kv, num_heads, num_kv_heads, query, axes, num_ranks
        )
    else:
        query, key, value = api.qkv_proj_a2a(
            x,
            params.w_qkv,
            params.b_qkv,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            **exchange,
        )

    true_positions = side["positions"]
    if true_positions is None:
        true_positions = jnp.arange(query.shape[1], dtype=jnp.int32)[None]
    query = _norm_and_rotate(
        query, params.q_norm, norm_epsilon, rope_theta, true_positions
    )
    if cross_kv is None:
        key = _norm_and_rotate(
            key, params.k_norm, norm_epsilon, rope_theta, true_positions
        )

    features = _attention_features(
        query.shape[1], causal, normalise_window(window, causal), side, cross_kv
    )
    if joint_kv is not None:
        joint_key, joint_value = _replicated_heads(
            "joint_kv", joint_kv, num_heads, num_kv_heads, query, axes, num_ranks
        )
        key = jnp.concatenate([joint_key, key], axis=1)
        value = jnp.concatenate([joint_value, value], axis=1)
        features = {
            "mask": build_mask(
                query.shape[1],
                is_causal=causal,
                window=normalise_window(window, causal),
                segment_ids=side["segment_ids"],
                key_mask=side["padding_mask"],
                num_joint=joint_key.shape[1],
            )
        }
    if params.sinks is not None:
        features["sinks"] = _local_extras(params.sinks, num_heads, axes, num_ranks)

    with _inside_attention_fn():
        out = call_attention(attention_fn, query, key, value, **features)
    if side["padding_mask"] is not None:
        out = jnp.where(side["padding_mask"][:, :, None, None], out, 0).astype(
            out.dtype
        )
    if tensor_axis is None:
        return api.a2a_out_proj(out, params.w_out, params.b_out, **exchange)
    # Each tensor-parallel rank has a part of the sum over heads; add the bias once.
    out = api.a2a_out_proj(out, params.w_out, **exchange)
    if tensor_axis in sharding.varying_axes(out):
        out = lax.psum(out, tensor_axis)
    if params.b_out is None:
        return out
    spec.check_bias("b_out", params.b_out.shape, out.shape[-1])
    spec.check_same_dtype("b_out", params.b_out.dtype, "x", x.dtype)
    return out + params.b_out


_inside: contextvars.ContextVar[bool] = contextvars.ContextVar("inside", default=False)


@contextlib.contextmanager
def _inside_attention_fn():
    token = _inside.set(True)
    try:
        yield
    finally:
        _inside.reset(token)


def _check_combination(causal, window, segment_ids, cross_kv, joint_kv):
    if cross_kv is None:
        return
    for given, what in (
        (causal, "causal=True"),
        (window is not None, "window"),
        (segment_ids is not None, "segment_ids"),
        (joint_kv is not None, "joint_kv"),
    ):
        if given:
            raise ValueError(
                f"{what} has no meaning with cross_kv, whose keys are another sequence."
            )


def _check_tensor_axis(tensor_axis, axes, x, params) -> None:
    mesh = jax.sharding.get_abstract_mesh()
    if tensor_axis not in mesh.shape or tensor_axis in axes:
        raise ValueError(
            f"tensor_axis={tensor_axis!r} must be a mesh axis besides axis_name "
            f"{sharding.describe_axes(axes)}; the mesh has {dict(mesh.shape)}."
        )
    if mesh.shape[tensor_axis] == 1:
        return
    weights = ("w_qkv", "w_out")
    for name, value, split in (
        ("x", x, False),
        *(
            (name, getattr(params, name), name in weights)
            for name in (*weights, "b_out")
        ),
    ):
        if value is None or (tensor_axis in sharding.varying_axes(value)) == split:
            continue
        raise ValueError(
            f"tensor_axis={tensor_axis!r}: {name} (local shape {value.shape}) is "
            + (
                "replicated over it, but must hold this rank's heads: name the axis in "
                "its in_specs."
                if split
                else "sharded on it, but must be the same on its ranks: leave the axis "
                "out of its in_specs."
            )
        )


def _gather_side_inputs(x, axes, order, positions, segment_ids, padding_mask):
    """Per-token integers of the full sequence, on every rank, in one all-gather.

    Returns:
      Name -> [B, S] in global order, or None where not given.
    """
    given = {
        name: value
        for name, value in (
            ("positions", positions),
            ("segment_ids", segment_ids),
            ("padding_mask", padding_mask),
        )
        if value is not None
    }
    full = dict.fromkeys(("positions", "segment_ids", "padding_mask"))
    if not given:
        return full
    for name, value in given.items():
        if value.shape != x.shape[:2]:
            raise ValueError(
                f"{name} must have shape [B, T] = {x.shape[:2]}, the tokens of this "
                f"rank's shard in the order of x; got {value.shape}."
            )
        wanted = jnp.bool_ if name == "padding_mask" else jnp.integer
        if not jnp.issubdtype(value.dtype, wanted):
            raise ValueError(
                f"{name} must be of kind {wanted.__name__}, got {value.dtype}."
            )
        sharding.check_varying("ulysses_attention", name, value, axes)
    # As wide as the widest: ids that differ must go on to.
    wide = any(value.dtype.itemsize > 4 for value in given.values())
    dtype = jnp.int64 if wide else jnp.int32
    stacked = jnp.stack([v.astype(dtype) for v in given.values()], axis=-1)
    stacked = lax.all_gather(stacked, axes, axis=0)  # [P, B, T, n]
    stacked = global_order(stacked, order)
    for i, name in enumerate(given):
        full[name] = stacked[..., i]
    if full["padding_mask"] is not None:
        full["padding_mask"] = full["padding_mask"].astype(bool)
    return full


def _norm_and_rotate(x, scale, epsilon, rope_theta, positions):
    if scale is not None:
        spec.check_bias("QK-norm scale", scale.shape, x.shape[-1])
        x = rms_norm(x, scale, epsilon)
    return x if rope_theta is None else apply_rope(x, positions, rope_theta)


def _attention_features(length, causal, window, side, cross_kv):
    """Keywords for the attention function: flags where they suffice, else a mask."""
    if cross_kv is not None:
        return {}
    if side["segment_ids"] is None and side["padding_mask"] is None:
        return {"is_causal": causal, "local_window_size": window}
    return {
        "mask": build_mask(
            length,
            is_causal=causal,
            window=window,
            segment_ids=side["segment_ids"],
            key_mask=side["padding_mask"],
        )
    }


def _replicated_heads(name, key_value, num_heads, num_kv_heads, query, axes, num_ranks):
    """This rank's KV heads of keys and values that every rank holds."""
    spec.check_query_heads(num_heads, num_kv_heads, num_ranks)
    batch, _, _, head_dim = query.shape
    result = []
    for value in key_value:
        spec.check_rank(name, value.shape, "B L K H")
        wanted = (batch, value.shape[1], num_kv_heads, head_dim)
        if value.shape != wanted:
            raise ValueError(
                f"{name} must have shape [B, L, K, H] = {wanted}, got {value.shape}."
            )
        spec.check_same_dtype(name, value.dtype, "q", query.dtype)
        shared = [a for a in axes if a in sharding.varying_axes(value)]
        if shared:
            raise ValueError(
                f"{name} differs between ranks of axis {shared}; it must be replicated "
                "on it: leave the axis out of its in_specs."
            )
        local = max(num_kv_heads // num_ranks, 1)
        start = lax.axis_index(axes) * num_kv_heads // num_ranks
        result.append(lax.dynamic_slice_in_dim(value, start, local, axis=2))
    return tuple(result)


def _local_extras(extras, num_heads, axes, num_ranks):
    """This rank's entries of a per-head parameter [N]."""
    spec.check_bias("sinks", extras.shape, num_heads)
    local = num_heads // num_ranks
    return lax.dynamic_slice_in_dim(extras, lax.axis_index(axes) * local, local)
