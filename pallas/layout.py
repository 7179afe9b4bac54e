# SPDX-License-Identifier: Apache-2.0
"""The exchange layout, as a GEMM sees it.

An all-to-all sends the p-th block of its operand to rank p and puts what comes from
rank p into the p-th block of its result. So the layout that needs no packing is
``[P, rows, columns]`` per segment of heads: rows are the tokens of all batches,
columns the heads that one rank holds. A *segment* here is such an array.
"""

import dataclasses
import math
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Segment:
    """One array ``[blocks * copies, rows, width]`` beside a matrix of columns.

    Column ``start + b * width + c`` of the matrix is column c of block b. A GEMM
    that writes the segment stores block b ``copies`` times, at b * copies + i: a
    key/value head that several ranks share is computed once.

    Attributes:
      start: first column of the segment in the matrix.
      blocks: different blocks.
      width: columns of one block.
      copies: how often each block is stored.
    """

    start: int
    blocks: int
    width: int
    copies: int = 1

    @property
    def stop(self) -> int:
        """Column after the segment's last."""
        return self.start + self.blocks * self.width


def segments_of(
    heads: Sequence[int], head_dim: int, num_ranks: int, *, copies: bool
) -> tuple[Segment, ...]:
    """The segments of projected heads, side by side.

    Args:
      heads: heads of each segment before the exchange.
      head_dim: H.
      num_ranks: P. Divides the heads of a segment, or is a multiple of them.
      copies: whether a replicated head has a block for each rank (what is sent
        forward), or one block alone (a gradient whose copies are added up).

    Returns:
      One segment for each entry of ``heads``.
    """
    found, start = [], 0
    for count in heads:
        blocks = min(count, num_ranks)
        width = count // blocks * head_dim
        found.append(
            Segment(start, blocks, width, num_ranks // blocks if copies else 1)
        )
        start += blocks * width
    return tuple(found)


def matrix(columns: int) -> tuple[Segment, ...]:
    """A plain matrix: one segment of one block."""
    return (Segment(0, 1, columns),)


def common_divisor(segments: Sequence[Segment], largest: int) -> int:
    """Largest power of two up to ``largest`` that divides every block's width."""
    return math.gcd(largest, *(s.width for s in segments))
