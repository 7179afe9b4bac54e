# SPDX-License-Identifier: Apache-2.0
"""The public operators. All work on per-device shapes inside ``jax.shard_map``.

Letters (B, S, T, N, K, H, D, P) are those of ``jax_ulysses._typing``. *Scatter*
turns sequence shards into head shards, *gather* turns them back.
"""

from jax_ulysses import dispatch, sharding, spec, vjp
from jax_ulysses._typing import Activations, Array, AxisName, HeadShard, SequenceShard
from jax_ulysses.dispatch import Implementation
from jax_ulysses.spec import HeadExchange, TokenOrder


def scatter_heads(
    x: SequenceShard,
    axis_name: AxisName,
    *,
    token_order: TokenOrder = TokenOrder.CONTIGUOUS,
    implementation: Implementation = None,
) -> HeadShard:
    """Exchanges sequence shards for head shards; bit-exact.

    (One exception: XLA:CPU may change the payload of a bf16 NaN; it stays a NaN.)

    Args:
      x: [B, T, N, H], any dtype of whole bytes (also fp8 and int8). Must be sharded
        on the axis.
      axis_name: context-parallel mesh axis, or a tuple of axes, major first.
      token_order: tokens that a sequence shard holds.
      implementation: None for the best that can, a name, or a sequence of names.

    Returns:
      [B, S, N/P, H] with tokens in global order; rank r holds heads
      [r*N/P, (r+1)*N/P). If N < P and P % N == 0, [B, S, 1, H] with head
      floor(r*N/P); gradients of the copies add up once.

    Raises:
      ValueError: wrong shape, heads that P cannot divide, a replicated operand, or
        a call outside a fully manual ``shard_map`` with ``check_vma=True``.
      NotImplementedError: the implementation named cannot do this call; of several
        names, an ExceptionGroup with the reason of each.
    """
    axes, num_ranks = _enter("scatter_heads", axis_name)
    order = TokenOrder(token_order)
    spec.check_rank("x", x.shape, "B T N H")
    spec.check_payload("x", x.dtype)
    spec.check_heads("N", x.shape[2], num_ranks)
    spec.check_tokens("x", x.shape[1], num_ranks, order, local=True)
    sharding.check_varying("scatter_heads", "x", x, axes)
    exchange = HeadExchange((x.shape[2],), x.shape[3], num_ranks, axes, order)
    call = vjp.Call("scatter_heads", exchange, dispatch.normalise(implementation))
    return vjp.scatter(call, (x,))[0]


def gather_heads(
    x: HeadShard,
    axis_name: AxisName,
    *,
    token_order: TokenOrder = TokenOrder.CONTIGUOUS,
    implementation: Implementation = None,
) -> SequenceShard:
    """Exchanges head shards for sequence shards; bit-exact, undoes ``scatter_heads``.

    Args:
      x: [B, S, N/P, H], tokens in global order, any dtype of whole bytes. Must be
        sharded on the axis.
      axis_name: context-parallel mesh axis, or a tuple of axes, major first.
      token_order: tokens that a sequence shard holds.
      implementation: None for the best that can, a name, or a sequence of names.

    Returns:
      [B, T, N, H]. Replicated heads are not recognised: copies would come back
      as P separate heads.

    Raises:
      ValueError: wrong shape, S not divisible by P (2P for zigzag), a replicated
        operand, or a call outside a fully manual ``shard_map`` with
        ``check_vma=True``.
      NotImplementedError: the implementation named cannot do this call; of several
        names, an ExceptionGroup with the reason of each.
    """
    axes, num_ranks = _enter("gather_heads", axis_name)
    order = TokenOrder(token_order)
    spec.check_rank("x", x.shape, "B S N/P H")
    spec.check_payload("x", x.dtype)
    spec.check_tokens("x", x.shape[1], num_ranks, order, local=False)
    sharding.check_varying("gather_heads", "x", x, axes)
    exchange = HeadExchange(
        (x.shape[2] * num_ranks,), x.shape[3], num_ranks, axes, order
    )
    call = vjp.Call("gather_heads", exchange, dispatch.normalise(implementation))
    return vjp.gather(call, (x,))[0]


def qkv_proj_a2a(
    x: Activations,
    w_qkv: Array,
    bias: Array | None = None,
    *,
    axis_name: AxisName,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int | None = None,
    token_order: TokenOrder = TokenOrder.CONTIGUOUS,
    implementation: Implementation = None,
) -> tuple[HeadShard, HeadShard, HeadShard]:
    """QKV projection fused with the scatter of its result: GEMM -> A2A.

    Q, K and V travel in one exchange, and their gradients in one.

    Args:
      x: [B, T, D], f32, bf16, f16 or f64. Must be sharded on the axis.
      w_qkv: [D, (N+2K)*H] with columns [Q heads, K heads, V heads]; dtype of x.
      bias: [(N+2K)*H] or None.
      axis_name: context-parallel mesh axis, or a tuple of axes, major first.
      num_heads: N, of the weight given (after any tensor-parallel split).
      num_kv_heads: K, likewise. K % P == 0 splits KV heads; P % K == 0 replicates
        them: rank r holds KV head floor(r*K/P).
      head_dim: H; None takes it from the width of ``w_qkv``.
      token_order: tokens that a sequence shard holds.
      implementation: None for the best that can, a name, or a sequence of names.

    Returns:
      q [B, S, N/P, H], k and v [B, S, max(K/P, 1), H], tokens in global order.
      Accumulated in fp32 (fp64 for f64), rounded once.

    Raises:
      ValueError: shapes, dtypes or head counts that do not fit, or a call outside a
        fully manual ``shard_map`` with ``check_vma=True``.
      NotImplementedError: the implementation named cannot do this call; of several
        names, an ExceptionGroup with the reason of each.
    """
    axes, num_ranks = _enter("qkv_proj_a2a", axis_name)
    spec.check_query_heads(num_heads, num_kv_heads, num_ranks)
    heads = (num_heads, num_kv_heads, num_kv_heads)
    q, k, v = _proj_a2a(
        "qkv_proj_a2a",
        "w_qkv",
        x,
        w_qkv,
        bias,
        heads,
        head_dim,
        axes,
        num_ranks,
        token_order,
        implementation,
    )
    return q, k, v


def q_proj_a2a(
    x: Activations,
    w_q: Array,
    bias: Array | None = None,
    *,
    axis_name: AxisName,
    num_heads: int,
    head_dim: int | None = None,
    token_order: TokenOrder = TokenOrder.CONTIGUOUS,
    implementation: Implementation = None,
) -> HeadShard:
    """Query projection alone, fused with its scatter (for cross-attention).

    Args:
      x: [B, T, D]. Must be sharded on the axis.
      w_q: [D, N*H]; dtype of x.
      bias: [N*H] or None.
      axis_name: context-parallel mesh axis, or a tuple of axes, major first.
      num_heads: N.
      head_dim: H; None takes it from the width of ``w_q``.
      token_order: tokens that a sequence shard holds.
      implementation: None for the best that can, a name, or a sequence of names.

    Returns:
      [B, S, N/P, H].

    Raises:
      ValueError: as ``qkv_proj_a2a``.
      NotImplementedError: as ``qkv_proj_a2a``.
    """
    axes, num_ranks = _enter("q_proj_a2a", axis_name)
    spec.check_query_heads(num_heads, num_heads, num_ranks)
    return _proj_a2a(
        "q_proj_a2a",
        "w_q",
        x,
        w_q,
        bias,
        (num_heads,),
        head_dim,
        axes,
        num_ranks,
        token_order,
        implementation,
    )[0]


def a2a_out_proj(
    a: HeadShard,
    w_out: Array,
    bias: Array | None = None,
    *,
    axis_name: AxisName,
    token_order: TokenOrder = TokenOrder.CONTIGUOUS,
    implementation: Implementation = None,
) -> Activations:
    """Gather of attention outputs fused with the output projection: A2A -> GEMM.

    Args:
      a: [B, S, N/P, H], tokens in global order. Must be sharded on the axis.
      w_out: [N*H, D]; dtype of a.
      bias: [D] or None; added once.
      axis_name: context-parallel mesh axis, or a tuple of axes, major first.
      token_order: tokens that the resulting sequence shard holds.
      implementation: None for the best that can, a name, or a sequence of names.

    Returns:
      [B, T, D]. Accumulated in fp32 (fp64 for f64), rounded once.

    Raises:
      ValueError: shapes or dtypes that do not fit, or a call outside a fully manual
        ``shard_map`` with ``check_vma=True``.
      NotImplementedError: the implementation named cannot do this call; of several
        names, an ExceptionGroup with the reason of each.
    """
    axes, num_ranks = _enter("a2a_out_proj", axis_name)
    spec.check_rank("a", a.shape, "B S N/P H")
    return _a2a_proj(
        "a2a_out_proj",
        ("a", "w_out"),
        a,
        w_out,
        bias,
        axes,
        num_ranks,
        token_order,
        implementation,
    )


def a2a_proj(
    x: Array,
    w: Array,
    bias: Array | None = None,
    *,
    axis_name: AxisName,
    token_order: TokenOrder = TokenOrder.CONTIGUOUS,
    implementation: Implementation = None,
) -> Activations:
    """Projects a head- or feature-sharded array on the sequence shard: A2A -> GEMM.

    Args:
      x: [B, S, N/P, H] (heads sharded) or [B, S, F/P] (features sharded, rank r
        holds features [r*F/P, (r+1)*F/P)). Must be sharded on the axis.
      w: [N*H, D] or [F, D]; dtype of x.
      bias: [D] or None.
      axis_name: context-parallel mesh axis, or a tuple of axes, major first.
      token_order: tokens that the resulting sequence shard holds.
      implementation: None for the best that can, a name, or a sequence of names.

    Returns:
      [B, T, D].

    Raises:
      ValueError: as ``a2a_out_proj``.
      NotImplementedError: as ``a2a_out_proj``.
    """
    axes, num_ranks = _enter("a2a_proj", axis_name)
    if x.ndim == 3:
        spec.check_rank("x", x.shape, "B S F/P")
        x = x[:, :, None, :]  # One "head" of F/P features a rank.
    else:
        spec.check_rank("x", x.shape, "B S N/P H")
    return _a2a_proj(
        "a2a_proj", ("x", "w"), x, w, bias, axes, num_ranks, token_order, implementation
    )


def _enter(operator: str, axis_name: AxisName) -> tuple[tuple[str, ...], int]:
    return sharding.check_manual(operator, axis_name)


def _proj_a2a(
    operator,
    w_name,
    x,
    w,
    bias,
    heads,
    head_dim,
    axes,
    num_ranks,
    order,
    implementation,
):
    order = TokenOrder(order)
    x, w, bias = spec.arrays(x, w, bias)
    spec.check_rank("x", x.shape, "B T D")
    spec.check_gemm_dtype("x", x.dtype)
    spec.check_same_dtype(w_name, w.dtype, "x", x.dtype)
    spec.check_tokens("x", x.shape[1], num_ranks, order, local=True)
    spec.check_rank(w_name, w.shape, "D columns")
    total = sum(heads)
    if head_dim is None:
        if w.shape[1] % total:
            raise ValueError(
                f"{w_name} has {w.shape[1]} columns, which {total} heads "
                f"{heads} cannot share: {w.shape[1]} % {total} = {w.shape[1] % total}."
            )
        head_dim = w.shape[1] // total
    spec.check_weight(
        w_name,
        w.shape,
        x.shape[2],
        "D of x",
        total * head_dim,
        f"{total} heads {heads} of head_dim {head_dim}",
    )
    if bias is not None:
        spec.check_bias("bias", bias.shape, w.shape[1])
        spec.check_same_dtype("bias", bias.dtype, "x", x.dtype)
    sharding.check_varying(operator, "x", x, axes)
    exchange = HeadExchange(heads, head_dim, num_ranks, axes, order)
    call = vjp.Call(operator, exchange, dispatch.normalise(implementation))
    return vjp.gemm_a2a(call, x, w, bias)


def _a2a_proj(operator, names, a, w, bias, axes, num_ranks, order, implementation):
    a, w, bias = spec.arrays(a, w, bias)
    call = a2a_proj_call(
        operator, names, a, w, bias, axes, num_ranks, order, implementation
    )
    return vjp.a2a_gemm(call, (a,), w, bias)


def a2a_proj_call(operator, names, a, w, bias, axes, num_ranks, order, implementation):
    """Checks the arguments of an A2A -> GEMM operator; returns its static side."""
    order = TokenOrder(order)
    a_name, w_name = names
    spec.check_gemm_dtype(a_name, a.dtype)
    spec.check_same_dtype(w_name, w.dtype, a_name, a.dtype)
    spec.check_tokens(a_name, a.shape[1], num_ranks, order, local=False)
    num_heads, head_dim = a.shape[2] * num_ranks, a.shape[3]
    spec.check_weight(
        w_name,
        w.shape,
        num_heads * head_dim,
        f"P={num_ranks} times {a.shape[2]}x{head_dim} local features of {a_name}",
        None,
        "",
    )
    if bias is not None:
        spec.check_bias("bias", bias.shape, w.shape[1])
        spec.check_same_dtype("bias", bias.dtype, a_name, a.dtype)
    sharding.check_varying(operator, a_name, a, axes)
    exchange = HeadExchange((num_heads,), head_dim, num_ranks, axes, order)
    return vjp.Call(operator, exchange, dispatch.normalise(implementation))
