# SPDX-License-Identifier: Apache-2.0
"""The epilogue of a consumer: bias, one rounding, and stores by TMA."""

import dataclasses
from collections.abc import Callable
from typing import Any

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


@dataclasses.dataclass(frozen=True)
class Epilogue:
    """What a consumer does with its accumulators.

    ``finish`` takes a tile over, so that they are free for the next one; ``store`` then
    stores it piece by piece, when its caller likes.

    Attributes:
      bias_ref: [columns of all tiles] or None.
      out_refs: a segment each, [blocks, rows, columns].
      out_smem: [slots, rows, columns] of this consumer.
      columns: of its tiles.
      plan: see there.
      store_into: what stores a piece of a block, as ``store_locally``.
    """

    bias_ref: Any
    out_refs: tuple
    out_smem: Any
    columns: int
    plan: Plan
    store_into: Callable[..., None]

    @property
    def offsets(self) -> list[tuple[int, int]]:
        """First row and column of every piece of a tile."""
        rows = range(0, self.plan.config.group_m, EPILOGUE_ROWS)
        columns = range(0, self.columns, self.out_smem.shape[-1])
        return [(row, column) for column in columns for row in rows]

    def nothing(self):
        """A finished tile past the last column, which is stored nowhere."""
        shape = self.out_smem.shape[1:]
        pieces = tuple(jnp.zeros(shape, self.plan.dtype) for _ in self.offsets)
        return pieces, jnp.int32(0), jnp.int32(self.plan.columns)

    def finish(self, acc, m, n):
        """Adds the bias and rounds once. The tile begins in row m and column n."""
        rows, columns = self.out_smem.shape[1:]
        pieces = []
        for row, column in self.offsets:
            value = acc[row : row + rows, column : column + columns]
            if self.bias_ref is not None:
                bias = plgpu.load(
                    self.bias_ref.at[pl.ds(n + column, columns)],
                    layout=plgpu.Layout.WGMMA.reduce(0),
                    optimized=False,
                )
                value += lax.broadcast_in_dim(
                    bias.astype(jnp.float32), value.shape, (1,)
                )
            pieces.append(value.astype(self.plan.dtype))
        return tuple(pieces), m, n

    def store(self, finished, i: int) -> None:
        """Starts the store of piece i. All pieces have to be stored, in order."""
        pieces, m, n = finished
        slot = i % EPILOGUE_SLOTS
        # The store before last has left this slot. The tile before may have ended in
        # the slot in which this one begins.
        plgpu.wait_smem_to_gmem(EPILOGUE_SLOTS - 1 if i else 0, wait_read_only=True)
        self.out_smem[slot] = pieces[i]
        plgpu.commit_smem()
        row, column = self.offsets[i]
        self._store_block(self.out_smem.at[slot], m + row, n + column)
        plgpu.commit_smem_to_gmem_group()

    def store_all(self, finished) -> None:
        """Starts the stores of all pieces."""
        for i in range(len(self.offsets)):
            self.store(finished, i)

    def _store_block(self, piece_smem, m, n):
        """Stores wherever the columns belong; nowhere if they are past the end."""
        rows, columns = piece_smem.shape
        # They are, but a tile that a loop carries along has lost its proof.
        m, n = pl.multiple_of(m, rows), pl.multiple_of(n, columns)
        for ref, segment in zip(self.out_refs, self.plan.out):

            @pl.when((n >= segment.start) & (n < segment.stop))
            def _(ref=ref, segment=segment):
                block = lax.div(n - segment.start, segment.width)
                column = n - segment.start - block * segment.width
                where = pl.ds(m, rows), pl.ds(column, columns)
                for copy in range(segment.copies):
                    stored = block * segment.copies + copy
                    self.store_into(piece_smem, ref, stored, *where)
