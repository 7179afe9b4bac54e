# SPDX-License-Identifier: Apache-2.0
"""The same GEMM, whose epilogue stores into the results of the other ranks.

**Not run on hardware yet.** It lowers for GPUs; nothing more is known of it.

There is no all-to-all: block p of a segment is stored into block ``rank`` of rank p's
result, by TMA over NVLink (``remote_ref``). Two signals make that safe:

- *entry*: XLA runs a barrier across the devices before a kernel that has peers'
  addresses (``CompilerParams.skip_device_barrier`` would leave it out). So nobody
  stores into an array that a peer still uses for something else, and all semaphores
  are zero.
- *exit*: each consumer waits until its stores are complete, then releases ``done`` on
  every rank, at system scope. One warpgroup of each rank acquires all arrivals of all
  ranks; the kernel, and what XLA runs after it, cannot be earlier.

There is no deadline: if a rank does not come, the others wait for ever.
"""

import functools
from collections.abc import Callable
from typing import Any

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_ulysses.pallas.config import CONSUMERS
from jax_ulysses.pallas.gemm_mgpu import cta


def into_peers(axis_name: str, num_ranks: int) -> Callable[..., None]:
    """The body of a kernel that leaves each result where it belongs.

    Args:
      axis_name: the only axis of the mesh.
      num_ranks: P.

    Returns:
      What ``project_to_blocks`` takes as ``body``. The blocks that it returns are then
      those of the sources, as after an all-to-all.
    """
    return functools.partial(_cta, axis_name=axis_name, num_ranks=num_ranks)


def _cta(*refs, axis_name: str, num_ranks: int, **kwargs):
    rank = lax.axis_index(axis_name)
    # TMA needs the address of each peer before the launch, so who is who is written
    # as an offset from the own rank, which the host knows.
    peers = [lax.rem(rank + i, num_ranks) for i in range(num_ranks)]
    done: Any = pl.get_global(plgpu.SemaphoreType.REGULAR)

    def store(piece_smem, ref, block, rows, columns):
        for offset, peer in enumerate(peers):

            @pl.when(block == peer)
            def _(offset=offset, peer=peer):
                target = plgpu.remote_ref(ref, peer) if offset else ref
                plgpu.copy_smem_to_gmem(
                    piece_smem, target.at[rank, rows, columns], commit_group=False
                )

    cta(*refs, store=store, **kwargs)
    wg = lax.axis_index("wg")

    @pl.when(wg < CONSUMERS)
    def _():
        plgpu.wait_smem_to_gmem(0, wait_read_only=False)
        plgpu.semaphore_signal_parallel(
            *(plgpu.SemaphoreSignal(done, device_id=peer) for peer in peers)
        )

    @pl.when((wg == 0) & (lax.axis_index("ctas") == 0))
    def _():
        arrivals = num_ranks * lax.axis_size("ctas") * CONSUMERS
        pl.semaphore_wait(done, value=arrivals, decrement=False)
