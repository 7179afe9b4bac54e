# SPDX-License-Identifier: Apache-2.0
"""The ``pallas`` implementation: Mosaic GPU GEMMs around an all-to-all.

The kernels read and write the exchange layout in place (``jax_ulysses.pallas``), so the
all-to-all moves contiguous blocks and nothing packs or unpacks them. Where XLA's
collectives cannot run because ranks share a GPU, the exchange kernel of ``cuda``
carries the blocks, and the rest is the same.
"""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_ulysses import group, native, reference, sharding
from jax_ulysses._typing import Array
from jax_ulysses.order import global_order, shard_order
from jax_ulysses.spec import HeadExchange, Request, TokenOrder

type Exchange = Callable[[Array], Array]

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
    if _heap_plan(request.exchange) is not None:
        for moved in _moved(request):
            native.cuda.check(moved)


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
    return project_and_exchange(ex, x, w, bias, w_transposed, _exchange(ex))


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
    blocks = projections.project_to_blocks(
        x.reshape(batch * tokens, -1),
        w,
        bias,
        layout.segments_of(ex.heads, ex.head_dim, ex.num_ranks, copies=True),
        w_transposed=w_transposed,
        num_sms=_num_sms(ex),
        **kwargs,
    )
    blocks = _vary(blocks, x, w, bias)
    results = []
    for block, local in zip(blocks, ex.local_heads):
        arrived = exchange(block)
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
    exchange = _exchange(ex)
    batch, length = parts[0].shape[:2]
    tokens = length // ex.num_ranks
    arrived = []
    for part, copies in zip(parts, ex.replicas):
        send = shard_order(part, ex.num_ranks, ex.token_order)
        block = exchange(send.reshape(ex.num_ranks, batch * tokens, -1))
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


def _exchange(ex: HeadExchange) -> Exchange:
    """What moves [P, ...], block p to rank p, and returns [P, ...] by source."""
    if ex.num_ranks == 1:
        return lambda blocks: blocks
    if _heap_plan(ex) is not None:
        return lambda blocks: _through_heap(ex, blocks)

    def all_to_all(blocks):
        return lax.all_to_all(
            blocks, ex.axis_name, split_axis=0, concat_axis=0, tiled=True
        )

    return all_to_all


def _through_heap(ex: HeadExchange, blocks: Array) -> Array:
    """The same by the exchange kernel, to which a block is a head of its width."""
    one_head = _as_heads(ex, blocks.shape[2])
    heads = jnp.moveaxis(blocks, 0, 1)[None]  # [1, rows, P, width]
    (arrived,) = native.cuda.scatter(one_head, (heads,))
    return arrived.reshape(blocks.shape)


def _as_heads(ex: HeadExchange, width: int) -> HeadExchange:
    return dataclasses.replace(
        ex,
        heads=(ex.num_ranks,),
        head_dim=width,
        token_order=TokenOrder.CONTIGUOUS,
    )


def _moved(request: Request) -> list[Request]:
    """What the exchange kernel is asked for, if it carries a projection's blocks."""
    ex = request.exchange
    if request.dataflow in ("scatter", "gather"):
        return [request]
    batch, length = request.shapes[0][:2]
    rows = batch * length // (1 if request.dataflow == "gemm_a2a" else ex.num_ranks)
    return [
        dataclasses.replace(
            request,
            dataflow="scatter",
            exchange=_as_heads(ex, local * ex.head_dim),
            shapes=((1, rows, ex.num_ranks, local * ex.head_dim),),
        )
        for local in ex.local_heads
    ]


def _plain(ex: HeadExchange) -> Any:
    return reference if _heap_plan(ex) is None else native.cuda


def _heap_plan(ex: HeadExchange):
    """The plan of a peer group whose ranks share a GPU, or None.

    XLA's all-to-all is NCCL's, which refuses two ranks on one GPU.
    """
    try:
        plan = group.find(ex.axis_name).plan
    except NotImplementedError:
        return None
    return plan if plan.ranks_per_device > 1 else None


def _num_sms(ex: HeadExchange) -> int:
    """SMs that a GEMM may take: all, or the rank's share of a GPU."""
    plan = _heap_plan(ex)
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
