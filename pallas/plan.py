# SPDX-License-Identifier: Apache-2.0
"""Everything static about one GEMM."""

import dataclasses

import jax.numpy as jnp
from jax.experimental import pallas as pl

from jax_ulysses.pallas.config import GemmConfig
from jax_ulysses.pallas.layout import Segment


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything static about one GEMM.

    Attributes:
      a: segments of the left operand; together they are its K columns.
      out: segments of the result; together they are its N columns.
      rows: M, a multiple of 8.
      w_transposed: W is [N, K].
      has_bias: a bias of one element per column is added in fp32.
      config: tile sizes.
      dtype: of all arrays.
    """

    a: tuple[Segment, ...]
    out: tuple[Segment, ...]
    rows: int
    w_transposed: bool
    has_bias: bool
    config: GemmConfig
    dtype: jnp.dtype

    @property
    def columns(self) -> int:
        """N."""
        return self.out[-1].stop

    @property
    def tiles(self) -> tuple[int, int]:
        """Tiles in M and in N."""
        return self.config.tiles(self.rows, self.columns)

    @property
    def k_steps(self) -> int:
        """Pipeline stages that one tile goes through."""
        return sum(s.blocks * self.k_tiles(s) for s in self.a)

    def k_tiles(self, segment: Segment) -> int:
        """Stages of one block of A; TMA fills what reaches over its edge with zeros."""
        return pl.cdiv(segment.width, self.config.tile_k)
