# SPDX-License-Identifier: Apache-2.0
"""The epilogue of a consumer: bias, one rounding, and stores by TMA."""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_ulysses.pallas.config import EPILOGUE_ROWS, EPILOGUE_SLOTS
from jax_ulysses.pallas.plan import Plan


def store_locally(piece_smem, ref, block, rows, columns) -> None:
    """Starts the store of a piece into block ``block`` of a result."""
    plgpu.copy_smem_to_gmem(
        piece_smem, ref.at[block, rows, columns], commit_group=False
    )


def store_tile(bias_ref, out_smem, store, plan: Plan, acc, m, n):
    """Adds the bias, rounds once, and stores [rows, columns] piece by piece."""
    piece = out_smem.shape[-1]
    slot = 0
    # The tile before may have ended in the slot in which this one begins.
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    for column in range(0, acc.shape[1], piece):
        for row in range(0, acc.shape[0], EPILOGUE_ROWS):
            value = acc[row : row + EPILOGUE_ROWS, column : column + piece]
            if bias_ref is not None:
                bias = plgpu.load(
                    bias_ref.at[pl.ds(n + column, piece)],
                    layout=plgpu.Layout.WGMMA.reduce(0),
                    optimized=False,
                )
                value += lax.broadcast_in_dim(
                    bias.astype(jnp.float32), value.shape, (1,)
                )
            # The store before last has left this slot.
            plgpu.wait_smem_to_gmem(EPILOGUE_SLOTS - 1, wait_read_only=True)
            out_smem[slot] = value.astype(plan.dtype)
            plgpu.commit_smem()
            store(out_smem.at[slot], m + row, n + column)
            plgpu.commit_smem_to_gmem_group()
            slot = (slot + 1) % EPILOGUE_SLOTS


def store_piece(piece_smem, m, n, *, out_refs, plan: Plan, store):
    """Stores a piece wherever its columns belong; nowhere if they are past the end."""
    rows, piece = piece_smem.shape
    for ref, segment in zip(out_refs, plan.out):

        @pl.when((n >= segment.start) & (n < segment.stop))
        def _(ref=ref, segment=segment):
            block = lax.div(n - segment.start, segment.width)
            column = n - segment.start - block * segment.width
            for copy in range(segment.copies):
                stored = block * segment.copies + copy
                store(piece_smem, ref, stored, pl.ds(m, rows), pl.ds(column, piece))
