# SPDX-License-Identifier: Apache-2.0
"""The backward passes in two halves, for pipelines that schedule them apart.

``*_bwd_input`` gives the gradient of the activations, on which the previous stage
waits: one exchange, in the same kernel as under ``jax.grad``. ``*_bwd_weight`` gives
the gradient of the weight: a local GEMM that can run in any later gap, and that adds
to a main gradient in place. Letters are those of ``jax_ulysses._typing``.

None of these is differentiable, and none sums over ranks.
"""

import jax.numpy as jnp

from jax_ulysses import api, dispatch, sharding, spec, vjp
from jax_ulysses._typing import Activations, Array, AxisName, HeadShard
from jax_ulysses.dispatch import Implementation
from jax_ulysses.reference import accumulation_dtype
from jax_ulysses.spec import HeadExchange, TokenOrder

# What a main gradient may be, besides the dtype of the weight.
_MAIN_DTYPES = ("float32", "bfloat16", "float64")


def qkv_proj_a2a_bwd_input(
    dq: HeadShard,
    dk: HeadShard,
    dv: HeadShard,
    w_qkv: Array,
    *,
    axis_name: AxisName,
    num_heads: int,
    num_kv_heads: int,
    token_order: TokenOrder = TokenOrder.CONTIGUOUS,
    implementation: Implementation = None,
) -> tuple[Activations, Activations]:
    """Gradient of ``x`` of ``qkv_proj_a2a``: A2A -> GEMM.

    Args:
      dq: [B, S, N/P, H], cotangent of q.
      dk: [B, S, max(K/P, 1), H], cotangent of k on this rank.
      dv: likewise, of v.
      w_qkv: [D, (N+2K)*H] of the forward call.
      axis_name: context-parallel mesh axis, or a tuple of axes, major first.
      num_heads: N of the forward call.
      num_kv_heads: K of the forward call.
      token_order: of the forward call.
      implementation: None for the best that can, a name, or a sequence of names.

    Returns:
      dx [B, T, D], and dy [B, T, (N+2K)*H], the gathered cotangent, which
      ``qkv_proj_a2a_bwd_weight`` needs. dq, dk, dv and w_qkv may be freed.

    Raises:
      ValueError: as ``qkv_proj_a2a``.
      NotImplementedError: as ``qkv_proj_a2a``.
    """
    operator = "qkv_proj_a2a_bwd_input"
    axes, num_ranks = sharding.check_manual(operator, axis_name)
    spec.check_query_heads(num_heads, num_kv_heads, num_ranks)
    heads = (num_heads, num_kv_heads, num_kv_heads)
    cotangents = {"dq": dq, "dk": dk, "dv": dv}
    return _proj_bwd_input(
        "qkv_proj_a2a", operator, cotangents, ("w_qkv", w_qkv), heads, axes, num_ranks,
        token_order, implementation,
    )  # fmt: skip


def q_proj_a2a_bwd_input(
    dq: HeadShard,
    w_q: Array,
    *,
    axis_name: AxisName,
    token_order: TokenOrder = TokenOrder.CONTIGUOUS,
    implementation: Implementation = None,
) -> tuple[Activations, Activations]:
    """Gradient of ``x`` of ``q_proj_a2a``: A2A -> GEMM.

    Args:
      dq: [B, S, N/P, H], cotangent of the result.
      w_q: [D, N*H] of the forward call.
      axis_name: context-parallel mesh axis, or a tuple of axes, major first.
      token_order: of the forward call.
      implementation: None for the best that can, a name, or a sequence of names.

    Returns:
      dx [B, T, D], and dy [B, T, N*H] for ``q_proj_a2a_bwd_weight``.

    Raises:
      ValueError: as ``q_proj_a2a``.
      NotImplementedError: as ``q_proj_a2a``.
    """
    operator = "q_proj_a2a_bwd_input"
    axes, num_ranks = sharding.check_manual(operator, axis_name)
    spec.check_rank("dq", dq.shape, "B S N/P H")
    return _proj_bwd_input(
        "q_proj_a2a", operator, {"dq": dq}, ("w_q", w_q), (dq.shape[2] * num_ranks,),
        axes, num_ranks, token_order, implementation,
    )  # fmt: skip


def a2a_out_proj_fwd(
    a: HeadShard,
    w_out: Array,
    bias: Array | None = None,
    *,
    axis_name: AxisName,
    token_order: TokenOrder = TokenOrder.CONTIGUOUS,
    implementation: Implementation = None,
) -> tuple[Activations, Activations]:
    """``a2a_out_proj`` that also returns what its weight gradient needs.

    Args:
      a: as in ``a2a_out_proj``, like all other arguments.
      w_out: likewise.
      bias: likewise.
      axis_name: likewise.
      token_order: likewise.
      implementation: likewise.

    Returns:
      y [B, T, D], and the gathered operand [B, T, N*H] for
      ``a2a_out_proj_bwd_weight``; ``a`` may be freed.

    Raises:
      ValueError: as ``a2a_out_proj``.
      NotImplementedError: as ``a2a_out_proj``.
    """
    axes, num_ranks = sharding.check_manual("a2a_out_proj_fwd", axis_name)
    spec.check_rank("a", a.shape, "B S N/P H")
    call = api.a2a_proj_call(
        "a2a_out_proj", ("a", "w_out"), a, w_out, bias, axes, num_ranks, token_order,
        implementation,
    )  # fmt: skip
    return vjp.a2a_gemm_fwd(call, (a,), w_out, bias)


def a2a_out_proj_bwd_input(
    dy: Activations,
    w_out: Array,
    *,
    axis_name: AxisName,
    num_heads: int,
    token_order: TokenOrder = TokenOrder.CONTIGUOUS,
    implementation: Implementation = None,
) -> HeadShard:
    """Gradient of ``a`` of ``a2a_out_proj``: GEMM -> A2A.

    Args:
      dy: [B, T, D], cotangent of the result.
      w_out: [N*H, D] of the forward call.
      axis_name: context-parallel mesh axis, or a tuple of axes, major first.
      num_heads: N of the forward call.
      token_order: of the forward call.
      implementation: None for the best that can, a name, or a sequence of names.

    Returns:
      da [B, S, N/P, H]. w_out may be freed; dy is still needed by
      ``a2a_out_proj_bwd_weight``.

    Raises:
      ValueError: as ``a2a_out_proj``, or num_heads does not divide the rows of w_out.
      NotImplementedError: as ``a2a_out_proj``.
    """
    operator = "a2a_out_proj_bwd_input"
    axes, num_ranks = sharding.check_manual(operator, axis_name)
    spec.check_query_heads(num_heads, num_heads, num_ranks)
    order = TokenOrder(token_order)
    spec.check_rank("dy", dy.shape, "B T D")
    spec.check_gemm_dtype("dy", dy.dtype)
    spec.check_same_dtype("w_out", w_out.dtype, "dy", dy.dtype)
    spec.check_tokens("dy", dy.shape[1], num_ranks, order, local=True)
    spec.check_rank("w_out", w_out.shape, "rows cols")
    rows = w_out.shape[0]
    if rows % num_heads:
        raise ValueError(
            f"w_out has {rows} rows, which num_heads N={num_heads} cannot share: "
            f"{rows} % {num_heads} = {rows % num_heads}."
        )
    spec.check_weight("w_out", w_out.shape, rows, "", dy.shape[2], "D of dy")
    sharding.check_varying(operator, "dy", dy, axes)
    exchange = HeadExchange((num_heads,), rows // num_heads, num_ranks, axes, order)
    call = vjp.Call("a2a_out_proj", exchange, dispatch.normalise(implementation))
    return vjp.a2a_gemm_bwd_input(call, dy, w_out)[0]


def qkv_proj_a2a_bwd_weight(
    x: Activations, dy: Activations, *, accumulate_into: Array | None = None
) -> Array:
    """This rank's part of the gradient of ``w_qkv``: a local GEMM.

    Also of ``w_q``. Sum the parts over ranks once, when all micro-batches are in:
    ``jax_ulysses.psum``. ``dy.sum((0, 1))`` is the part of the bias.

    Args:
      x: [B, T, D] of the forward call.
      dy: [B, T, C], second result of ``qkv_proj_a2a_bwd_input``.
      accumulate_into: [D, C] main gradient, float32, bfloat16 or float64 (or the
        dtype of x), different on every rank. Donate it to the surrounding
        ``jax.jit``: the result takes its place. Outside of ``shard_map`` lay the
        ranks' main gradients below each other, [P*D, C] sharded over its rows; a
        leading axis [P, D, C] costs a copy on CPUs.

    Returns:
      x^T dy in float32 (float64 for float64), or accumulate_into + x^T dy in its
      dtype, added in float32 (float64 if either is) and rounded once.

    Raises:
      ValueError: shapes or dtypes that do not fit, or a main gradient that is typed
        as equal on ranks whose parts differ.
    """
    return _bwd_weight(("x", x), ("dy", dy), accumulate_into)


def a2a_out_proj_bwd_weight(
    gathered: Activations, dy: Activations, *, accumulate_into: Array | None = None
) -> Array:
    """This rank's part of the gradient of ``w_out``: a local GEMM.

    Sum the parts over ranks once, when all micro-batches are in:
    ``jax_ulysses.psum``.

    Args:
      gathered: [B, T, N*H], second result of ``a2a_out_proj_fwd``.
      dy: [B, T, D], cotangent of the result.
      accumulate_into: [N*H, D], see ``qkv_proj_a2a_bwd_weight``.

    Returns:
      gathered^T dy, see ``qkv_proj_a2a_bwd_weight``.

    Raises:
      ValueError: see ``qkv_proj_a2a_bwd_weight``.
    """
    return _bwd_weight(("gathered", gathered), ("dy", dy), accumulate_into)


# The same GEMM.
q_proj_a2a_bwd_weight = qkv_proj_a2a_bwd_weight


def _proj_bwd_input(
    forward, operator, cotangents, weight, heads, axes, num_ranks, order, implementation
):
    order = TokenOrder(order)
    w_name, w = weight
    first_name, first = next(iter(cotangents.items()))
    spec.check_rank(first_name, first.shape, "B S heads H")
    spec.check_gemm_dtype(first_name, first.dtype)
    spec.check_tokens(first_name, first.shape[1], num_ranks, order, local=False)
    exchange = HeadExchange(heads, first.shape[3], num_ranks, axes, order)
    for (name, ct), local in zip(cotangents.items(), exchange.local_heads, strict=True):
        expected = (*first.shape[:2], local, first.shape[3])
        if ct.shape != expected:
            raise ValueError(
                f"{name} must have shape {expected} (heads {heads} over P={num_ranks} "
                f"ranks), got {ct.shape}."
            )
        spec.check_same_dtype(name, ct.dtype, first_name, first.dtype)
        sharding.check_varying(operator, name, ct, axes)
    spec.check_rank(w_name, w.shape, "D columns")
    spec.check_same_dtype(w_name, w.dtype, first_name, first.dtype)
    spec.check_weight(
        w_name,
        w.shape,
        w.shape[0],
        "",
        exchange.num_columns,
        f"{sum(heads)} heads {heads} of head_dim {first.shape[3]}",
    )
    call = vjp.Call(forward, exchange, dispatch.normalise(implementation))
    return vjp.gemm_a2a_bwd_input(call, tuple(cotangents.values()), w)


def _bwd_weight(saved, cotangent, main) -> Array:
    (x_name, x), (dy_name, dy) = saved, cotangent
    spec.check_rank(x_name, x.shape, "B T rows")
    spec.check_rank(dy_name, dy.shape, "B T cols")
    spec.check_gemm_dtype(x_name, x.dtype)
    spec.check_same_dtype(dy_name, dy.dtype, x_name, x.dtype)
    if x.shape[:2] != dy.shape[:2]:
        raise ValueError(
            f"{x_name} {x.shape} and {dy_name} {dy.shape} must have the same B and T."
        )
    dw = vjp.weight_gradient(x, dy, w_transposed=False)
    if main is None:
        return dw
    if main.shape != dw.shape:
        raise ValueError(
            f"accumulate_into must have shape {dw.shape} (columns of {x_name}, columns "
            f"of {dy_name}), got {main.shape}."
        )
    if main.dtype.name not in _MAIN_DTYPES and main.dtype != x.dtype:
        raise ValueError(
            f"accumulate_into has dtype {main.dtype.name}; main gradients are "
            f"{', '.join(_MAIN_DTYPES)} or of the dtype of {x_name} ({x.dtype.name})."
        )
    differs = sharding.varying_axes(dw) - sharding.varying_axes(main)
    if differs:
        raise ValueError(
            f"accumulate_into is typed as equal over axes {sorted(differs)}, but each "
            "rank adds its own part. Keep a main gradient a rank (an array whose rows "
            "are sharded over them, or jax.lax.pcast(main, axes, to='varying')), and "
            "sum it once at the end with jax_ulysses.psum."
        )
    wide = jnp.promote_types(accumulation_dtype(x.dtype), main.dtype)
    return (main.astype(wide) + dw.astype(wide)).astype(main.dtype)
