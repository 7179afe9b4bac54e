# SPDX-License-Identifier: Apache-2.0
"""The ``pallas`` implementation: Mosaic GPU GEMMs around an all-to-all.

The kernels read and write the exchange layout in place (``jax_ulysses.pallas``), so the
all-to-all moves contiguous blocks and nothing packs or unpacks them. Where XLA's
collectives cannot run because ranks share a GPU, the exchange kernel of ``cuda``
carries the blocks, and the rest is the same.
"""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_ulysses import blocks, native, reference, sharding
from jax_ulysses._typing import Array
from jax_ulysses.order import global_order, shard_order
from jax_ulysses.spec import HeadExchange, Request

type Exchange = Callable[[HeadExchange, Array], Array]

_HOPPER = re.compile(r"\b(H100|H200|H800|H20|GH200)\b")


def check(request: Request) -> None:
    """Raises NotImplementedError unless the kernels can run ``request`` here."""
    if request.platform != "cuda":
        raise NotImplementedError(f"runs on cuda devices, not on {request.platform}")
    kind = _device().device_kind
    if not _HOPPER.search(kind):
        raise NotImplementedError(
            f"the kernels use WGMMA, which only Hopper GPUs have; this is {kind!r}"
        )
    if request.dataflow in ("gemm_a2a", "a2a_gemm"):
        reason = _refusal(request)
        if reason is not None:
            raise NotImplementedError(reason)
    blocks.check(request)


def scatter(ex: HeadExchange, parts: tuple[Array, ...]) -> tuple[Array, ...]:
    """See ``reference.scatter``. Nothing to fuse: the exchange alone, as elsewhere."""
    return _plain(ex).scatter(ex, parts)


def gather(
    ex: HeadExchange, parts: tuple[Array, ...], *, sum_replicas: bool = True
) -> tuple[Array, ...]:
    """See ``reference.gather``. Nothing to fuse: the exchange alone, as elsewhere."""
    return _plain(ex).gather(ex, parts, sum_replicas=sum_replicas)


def gemm_a2a(
    ex: HeadExchange, x: Array, w: Array, bias: Array | None, *, w_transposed: bool
) -> tuple[Array, ...]:
    """See ``reference.gemm_a2a``.

    One all-to-all a segment, so that each result is what arrives, as it lies, for one
    batch element in contiguous order. Otherwise XLA puts the tokens in order: blocks
    arrive by source, and sources are not the outermost dimension of the result.
    """
    return project_and_exchange(ex, x, w, bias, w_transposed, blocks.exchange)


def project_and_exchange(
    ex: HeadExchange,
    x: Array,
    w: Array,
    bias: Array | None,
    w_transposed: bool,
    exchange: Exchange,
    **kwargs: Any,
) -> tuple[Array, ...]:
    """``gemm_a2a`` by any exchange of blocks, and any arguments of the kernel."""
    layout, projections = _pallas()
    batch, tokens = x.shape[:2]
    sent = projections.project_to_blocks(
        x.reshape(batch * tokens, -1),
        w,
        bias,
        layout.segments_of(ex.heads, ex.head_dim, ex.num_ranks, copies=True),
        w_transposed=w_transposed,
        num_sms=_num_sms(ex),
        **kwargs,
    )
    results = []
    for block, local in zip(_vary(sent, x, w, bias), ex.local_heads):
        arrived = exchange(ex, block)
        arrived = arrived.reshape(ex.num_ranks, batch, tokens, local, ex.head_dim)
        results.append(global_order(arrived, ex.token_order))
    return tuple(results)


def a2a_gemm(
    ex: HeadExchange,
    parts: tuple[Array, ...],
    w: Array,
    bias: Array | None,
    *,
    w_transposed: bool,
    want_gathered: bool = True,
) -> tuple[Array, Array]:
    """See ``reference.a2a_gemm``.

    The GEMM reads what arrived in place. The gathered operand is a copy of it by XLA,
    which drops it where nobody uses it. Copies of a replicated head are added up
    first, in fp32 and rank order.
    """
    del want_gathered
    layout, projections = _pallas()
    batch, length = parts[0].shape[:2]
    tokens = length // ex.num_ranks
    arrived = []
    for part, copies in zip(parts, ex.replicas):
        send = shard_order(part, ex.num_ranks, ex.token_order)
        block = blocks.exchange(ex, send.reshape(ex.num_ranks, batch * tokens, -1))
        if copies > 1:
            block = block.reshape(-1, copies, *block.shape[1:])
            block = jnp.sum(block, axis=1, dtype=jnp.float32).astype(part.dtype)
        arrived.append(block)
    y = projections.project_from_blocks(
        arrived,
        w,
        bias,
        layout.segments_of(ex.heads, ex.head_dim, ex.num_ranks, copies=False),
        w_transposed=w_transposed,
        num_sms=_num_sms(ex),
    )
    (y,) = _vary((y,), *parts, w, bias)
    gathered = [jnp.moveaxis(a, 0, 1).reshape(a.shape[1], -1) for a in arrived]
    return (
        y.reshape(batch, tokens, -1),
        jnp.concatenate(gathered, axis=1).reshape(batch, tokens, -1),
    )


def _refusal(request: Request) -> str | None:
    """Why the GEMM of a projection cannot run, or None."""
    layout, projections = _pallas()
    ex, transposed = request.exchange, request.w_transposed
    w = request.shapes[-1]
    scattered = request.dataflow == "gemm_a2a"
    heads = layout.segments_of(ex.heads, ex.head_dim, ex.num_ranks, copies=scattered)
    other = layout.matrix(w[int(scattered == transposed)])
    a, out = (other, heads) if scattered else (heads, other)
    batch, length = request.shapes[0][:2]
    rows = batch * length // (1 if scattered else ex.num_ranks)
    return projections.refusal(
        rows,
        a,
        out,
        request.dtype,
        w_transposed=transposed,
        num_sms=_num_sms(ex),
    )


def _plain(ex: HeadExchange) -> Any:
    return reference if blocks.heap_plan(ex) is None else native.cuda


def _num_sms(ex: HeadExchange) -> int:
    """SMs that a GEMM may take: all, or the rank's share of a GPU."""
    plan = blocks.heap_plan(ex)
    device = _device()
    count = getattr(device, "num_cores", None) or getattr(device, "core_count", 1)
    return (plan.sm_budget if plan is not None else 0) or count


def _device():
    """The device that the surrounding ``shard_map`` is traced for."""
    mesh = jax.sharding.get_abstract_mesh()
    return getattr(mesh, "abstract_device", None) or jax.devices()[0]


def _vary(results: tuple[Array, ...], *operands: Array | None) -> tuple[Array, ...]:
    """A kernel's results differ between ranks wherever one of its operands does."""
    axes = sharding.varying_axes(*(x for x in operands if x is not None))
    return tuple(sharding.vary_like(r, axes) for r in results)


def _pallas():
    # Imported late: Mosaic GPU is slow to load, and not everybody needs it.
    from jax_ulysses.pallas import layout, projections

    return layout, projections
