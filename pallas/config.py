# SPDX-License-Identifier: Apache-2.0
"""How a GEMM is cut into tiles, and whether it fits on an SM."""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Literal

from jax_ulysses.pallas.layout import Segment, common_divisor

# Of an H100 or H200: what one CTA may have, less what Mosaic keeps for itself.
SMEM_BYTES = 227 * 1024
RESERVED_BYTES = 1024
# Two warpgroups multiply, each a tile of this many accumulators a thread at most.
CONSUMERS = 2
MAX_ACCUMULATORS = 64 * 256
# The epilogue stages its result in pieces of 64 rows, two a warpgroup.
EPILOGUE_ROWS = 64
EPILOGUE_SLOTS = 2
# TMA counts rows in eights, the height of a swizzled tile.
ROW_MULTIPLE = 8
# TMA boxes are a multiple of 16 bytes, and WGMMA reads no narrower swizzle than 32.
MIN_COLUMNS = 16
DTYPES = ("bfloat16", "float16")
ELEMENT_BYTES = 2


@dataclasses.dataclass(frozen=True)
class GemmConfig:
    """A tiling of ``[M, K] x [K, N]``.

    Attributes:
      tile_m: rows of a CTA's tile.
      tile_n: columns of a CTA's tile.
      tile_k: columns of A in one pipeline stage.
      stages: of the pipeline from global to shared memory.
      split: what the two consumer warpgroups divide among themselves: the rows of
        each tile, its columns, or the tiles, of which each takes every second one and
        stores it while the other multiplies.
      band: width, in tiles, of the bands in which tiles are visited.
      band_dim: the dimension that runs fastest inside a band.
    """

    tile_m: int = 128
    tile_n: int = 256
    tile_k: int = 64
    stages: int = 4
    split: Literal["m", "n", "tiles"] = "m"
    band: int = 8
    band_dim: Literal["m", "n"] = "m"

    @property
    def group_m(self) -> int:
        """Rows of one warpgroup's tile."""
        return self.tile_m // (CONSUMERS if self.split == "m" else 1)

    @property
    def group_columns(self) -> tuple[tuple[int, int], ...]:
        """First column of each warpgroup's tile, and the one after its last.

        The cut is at a multiple of 64, the widest swizzle, so that 320 columns are
        192 and 128.
        """
        if self.split != "n":
            return ((0, self.tile_n),) * CONSUMERS
        cut = math.ceil(self.tile_n / CONSUMERS / 64) * 64
        return (0, cut), (cut, self.tile_n)

    def columns_of(self, group) -> tuple[int, int]:
        """Of ``group_columns``; ``group`` may be traced if all have the same."""
        return self.group_columns[group if self.split == "n" else 0]

    @property
    def teams(self) -> int:
        """Sets of consumers with tiles, and so with barriers, of their own."""
        return CONSUMERS if self.split == "tiles" else 1

    @property
    def stores_late(self) -> bool:
        """A tile is stored while its own warpgroups multiply the next one.

        In turns, the other one multiplies meanwhile anyway; and tiles of 64 rows, whose
        warpgroups do not have as much to multiply, became 2 to 6 % slower.
        """
        return self.split == "m"

    def tiles(self, m: int, n: int) -> tuple[int, int]:
        """Tiles in both dimensions; the last ones may reach over the edge."""
        return math.ceil(m / self.tile_m), math.ceil(n / self.tile_n)

    def smem_bytes(self, piece: int) -> int:
        """Shared memory of a CTA whose epilogue stores ``piece`` columns at a time."""
        stage = (self.tile_m + self.tile_n) * self.tile_k
        staged = CONSUMERS * EPILOGUE_SLOTS * EPILOGUE_ROWS * piece
        barriers = 2 * self.stages * self.teams * 8
        return (
            (stage * self.stages + staged) * ELEMENT_BYTES + barriers + RESERVED_BYTES
        )


def swizzle_columns(
    config: GemmConfig, a: Sequence[Segment], n: int, *, w_transposed: bool
) -> int:
    """Columns of a swizzled row in shared memory: 64, 32 or 16.

    One number serves both operands, since a WGMMA takes one. It divides every block
    of A and the rows of W as they lie in memory, so that no box straddles two rows.
    """
    columns = common_divisor(a, 64)
    return columns if w_transposed else math.gcd(columns, n, config.tile_n)


def piece_columns(config: GemmConfig, out: Sequence[Segment]) -> int:
    """Columns that the epilogue stores at a time: no piece straddles two blocks."""
    edges = itertools.chain(*config.group_columns)
    return math.gcd(common_divisor(out, 64), *edges)


def refusal(
    config: GemmConfig,
    a: Sequence[Segment],
    out: Sequence[Segment],
    dtype: str,
    *,
    w_transposed: bool,
) -> str | None:
    """Why a GEMM cannot run with a configuration, or None.

    Args:
      config: the tiling.
      a: segments of the left operand.
      out: segments of the result.
      dtype: name of the operands' dtype.
      w_transposed: W is [N, K].

    Returns:
      A sentence with the numbers.
    """
    if dtype not in DTYPES:
        return f"multiplies {' and '.join(DTYPES)}, not {dtype}"
    for what, segments in (("the left operand", a), ("the result", out)):
        width = min(s.width & -s.width for s in segments)
        if width < MIN_COLUMNS:
            widths = sorted({s.width for s in segments})
            return (
                f"a block of {what} is {widths} columns wide; TMA and WGMMA need "
                f"multiples of {MIN_COLUMNS}"
            )
    for first, stop in config.group_columns:
        rows, columns = config.group_m, stop - first
        if rows % 64 or columns % 32 or not 0 < rows * columns <= MAX_ACCUMULATORS:
            return (
                f"a warpgroup's tile of {rows}x{columns} is no multiple of 64x32 of at "
                f"most {MAX_ACCUMULATORS} accumulators"
            )
    swizzle = swizzle_columns(config, a, out[-1].stop, w_transposed=w_transposed)
    if config.tile_k % swizzle:
        return f"tile_k={config.tile_k} is no multiple of the swizzle's {swizzle}"
    need = config.smem_bytes(piece_columns(config, out))
    if need > SMEM_BYTES:
        tile = f"{config.tile_m}x{config.tile_n}x{config.tile_k}"
        return (
            f"{config.stages} stages of {tile} need {need} bytes of shared memory, an "
            f"SM has {SMEM_BYTES}"
        )
    return None


# Tilings worth having, and what they cost in microseconds: a call, to start and to
# store the last tiles; a step of K=64 in the first round of tiles; and one in later
# rounds. Fitted to an H200's times of 63 shapes (M = 512 to 16384, N and K from 2048 to
# 18432), those of 64x448 to three: what is chosen is 0.1 % slower than the fastest of
# the others on average, 1.1 % at worst. (Most times of tiles of 64 rows are estimates:
# they were measured stored late, and at five shapes both ways.)
# 128x160 is not here because its boxes are only 32 columns wide: a third slower than
# XLA's dot. docs/pallas.md says what else was measured and left out.
CANDIDATES = (
    (GemmConfig(), 3.5, 0.6, 0.68),
    (GemmConfig(tile_n=192), 2.3, 0.472, 0.517),
    (GemmConfig(tile_n=128, stages=6, split="tiles"), 4.1, 0.271, 0.349),
    (GemmConfig(tile_m=64, tile_n=320, split="n", band=32), 3.3, 0.375, 0.44),
    (GemmConfig(tile_m=64, tile_n=448, split="n", band=32, stages=3), 3.3, 0.604, 0.61),
    (GemmConfig(tile_m=64, tile_n=192, split="n", band=32, stages=6), 2.2, 0.25, 0.267),
    (GemmConfig(tile_m=64, tile_n=128, split="n", stages=8), 2.2, 0.175, 0.19),
)
# In calls of about a millisecond or more all tilings are slower, turns less so.
_LARGE_FLOPS = 7e11
_LARGE_TURNS = 0.98


def choose(m: int, n: int, k: int, num_sms: int) -> GemmConfig:
    """The tiling with the shortest predicted time.

    All SMs work on a tile at a time, so the time is that of a tile times the number
    of rounds, of which the last one may be nearly empty.
    """
    large = 2 * m * n * k > _LARGE_FLOPS

    def predicted_us(candidate) -> float:
        config, call, first, later = candidate
        rounds = math.ceil(math.prod(config.tiles(m, n)) / num_sms)
        if large and config.teams > 1:
            later *= _LARGE_TURNS
        return call + math.ceil(k / config.tile_k) * (first + later * (rounds - 1))

    return min(CANDIDATES, key=predicted_us)[0]
