# SPDX-License-Identifier: Apache-2.0
"""How a GEMM is cut into tiles, and whether it fits on an SM."""

import dataclasses
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
      split: the dimension in which the two consumer warpgroups divide the tile.
      cluster: 2 CTAs load the operand that their tiles share once, by multicast; 1
        for none.
      cluster_dim: the dimension in which a cluster's tiles are neighbours.
      band: width, in tiles or clusters, of the bands in which tiles are visited.
      band_dim: the dimension that runs fastest inside a band.
    """

    tile_m: int = 128
    tile_n: int = 256
    tile_k: int = 64
    stages: int = 4
    split: Literal["m", "n"] = "m"
    cluster: int = 1
    cluster_dim: Literal["m", "n"] = "m"
    band: int = 8
    band_dim: Literal["m", "n"] = "m"

    @property
    def group_m(self) -> int:
        """Rows of one warpgroup's tile."""
        return self.tile_m // (CONSUMERS if self.split == "m" else 1)

    @property
    def group_n(self) -> int:
        """Columns of one warpgroup's tile."""
        return self.tile_n // (CONSUMERS if self.split == "n" else 1)

    @property
    def step_m(self) -> int:
        """Rows of one cluster's tiles."""
        return self.tile_m * (self.cluster if self.cluster_dim == "m" else 1)

    @property
    def step_n(self) -> int:
        """Columns of one cluster's tiles."""
        return self.tile_n * (self.cluster if self.cluster_dim == "n" else 1)

    def tiles(self, m: int, n: int) -> tuple[int, int]:
        """Clusters' tiles in both dimensions; the last ones may reach over the edge."""
        return math.ceil(m / self.step_m), math.ceil(n / self.step_n)

    def smem_bytes(self, piece: int) -> int:
        """Shared memory of a CTA whose epilogue stores ``piece`` columns at a time."""
        stage = (self.tile_m + self.tile_n) * self.tile_k
        staged = CONSUMERS * EPILOGUE_SLOTS * EPILOGUE_ROWS * piece
        barriers = 2 * self.stages * 8
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
    return math.gcd(common_divisor(out, 64), config.group_n)


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
    group = config.group_m * config.group_n
    if config.group_m % 64 or config.group_n % 32 or group > MAX_ACCUMULATORS:
        return (
            f"a warpgroup's tile of {config.group_m}x{config.group_n} is no multiple "
            f"of 64x32 of at most {MAX_ACCUMULATORS} accumulators"
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


# Tilings worth having, and what a pipeline step of one costs for each accumulator,
# beside 128x256. The first and the last are fitted to an H200's times of 2048x6144x4096
# and 4096x2048x2048; those between are interpolated, not measured. Smaller tiles read
# more shared memory for each WGMMA; at 128 columns two CTAs have to share W to keep up.
_CANDIDATES = (
    (GemmConfig(), 1.0),
    (GemmConfig(tile_n=192), 1.03),
    (GemmConfig(tile_n=160, stages=5), 1.05),
    (GemmConfig(tile_n=128, stages=6, cluster=2), 1.07),
)
# A pipeline step of 128x256x64, and what such a tile costs besides: filling the
# pipeline, and storing.
_STEP_US, _TILE_US = 0.66, 1.7
# By how much another tiling than the first must be predicted to be faster.
_MARGIN = 1.05


def choose(m: int, n: int, k: int, num_sms: int) -> GemmConfig:
    """The tiling with the shortest predicted time.

    All SMs work on a tile at a time, so the time is that of a tile times the number
    of rounds, of which the last one may be nearly empty.
    """

    def predicted_us(candidate) -> float:
        config, cost = candidate
        margin = 1.0 if config == _CANDIDATES[0][0] else _MARGIN
        tiles_m, tiles_n = config.tiles(m, n)
        rounds = math.ceil(tiles_m * tiles_n / max(num_sms // config.cluster, 1))
        area = config.tile_m * config.tile_n / (128 * 256)
        steps = math.ceil(k / config.tile_k)
        return margin * rounds * area * (steps * cost * _STEP_US + _TILE_US)

    return min(_CANDIDATES, key=predicted_us)[0]
