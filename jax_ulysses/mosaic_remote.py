# SPDX-License-Identifier: Apache-2.0
"""The ``pallas_remote`` implementation: ``gemm_a2a`` in one Pallas kernel.

It stores into the peers' results (``jax_ulysses.pallas.remote_mgpu``), without an
all-to-all. Never chosen by itself, and **not run on hardware yet**. Everything else is
``pallas``.
"""

import jax

from jax_ulysses import mosaic
from jax_ulysses._typing import Array
from jax_ulysses.mosaic import a2a_gemm as a2a_gemm
from jax_ulysses.mosaic import gather as gather
from jax_ulysses.mosaic import scatter as scatter
from jax_ulysses.spec import HeadExchange, Request


def check(request: Request) -> None:
    """Raises NotImplementedError unless the kernel may run ``request``."""
    mosaic.check(request)
    if request.dataflow != "gemm_a2a":
        return
    ex = request.exchange
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.size != ex.num_ranks or len(mesh.shape) != 1:
        raise NotImplementedError(
            f"stores into peers by their place in the mesh, which must be the axis "
            f"{ex.axis_name[0]!r} alone; it is {dict(mesh.shape)}"
        )
    if jax.process_count() > 1:
        raise NotImplementedError(
            f"reaches the devices of one process; there are {jax.process_count()}"
        )


def gemm_a2a(
    ex: HeadExchange, x: Array, w: Array, bias: Array | None, *, w_transposed: bool
) -> tuple[Array, ...]:
    """See ``reference.gemm_a2a``. One kernel does all of it."""
    if ex.num_ranks == 1:
        return mosaic.gemm_a2a(ex, x, w, bias, w_transposed=w_transposed)
    # Imported late, as in mosaic.
    from jax_ulysses.pallas.remote_mgpu import into_peers

    return mosaic.project_and_exchange(
        ex,
        x,
        w,
        bias,
        w_transposed,
        lambda ex, blocks: blocks,
        body=into_peers(ex.axis_name[0], ex.num_ranks),
    )
