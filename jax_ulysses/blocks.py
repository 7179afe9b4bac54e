# SPDX-License-Identifier: Apache-2.0
"""How blocks of the exchange layout travel: by XLA's all-to-all, or through the heap.

XLA's all-to-all on GPUs is NCCL's, which refuses two ranks on one GPU. There the
exchange kernel of ``cuda`` moves the same blocks.
"""

import dataclasses

import jax.numpy as jnp
from jax import lax

from jax_ulysses import group, heaps, native
from jax_ulysses._typing import Array
from jax_ulysses.spec import HeadExchange, Request, TokenOrder


def heap_plan(ex: HeadExchange) -> heaps.Plan | None:
    """The plan of a peer group whose ranks share a GPU, or None."""
    try:
        plan = group.find(ex.axis_name).plan
    except NotImplementedError:
        return None
    return plan if plan.ranks_per_device > 1 else None


def check(request: Request) -> None:
    """Raises NotImplementedError unless what ``request`` exchanges can travel."""
    if heap_plan(request.exchange) is None:
        return
    for moved in _moved(request):
        native.cuda.check(moved)


def exchange(ex: HeadExchange, blocks: Array) -> Array:
    """Block p goes to rank p.

    Args:
      ex: the routing; its ranks and axis count.
      blocks: [P, rows, width].

    Returns:
      [P, rows, width], by source.
    """
    if ex.num_ranks == 1:
        return blocks
    if heap_plan(ex) is None:
        return lax.all_to_all(
            blocks, ex.axis_name, split_axis=0, concat_axis=0, tiled=True
        )
    # To the exchange kernel a block is a head of its width.
    heads = jnp.moveaxis(blocks, 0, 1)[None]  # [1, rows, P, width]
    (arrived,) = native.cuda.scatter(_as_heads(ex, blocks.shape[2]), (heads,))
    return arrived.reshape(blocks.shape)


def _as_heads(ex: HeadExchange, width: int) -> HeadExchange:
    return dataclasses.replace(
        ex,
        heads=(ex.num_ranks,),
        head_dim=width,
        token_order=TokenOrder.CONTIGUOUS,
    )


def _moved(request: Request) -> list[Request]:
    """What the exchange kernel is asked for on behalf of a call."""
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
