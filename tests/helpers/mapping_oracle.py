# SPDX-License-Identifier: Apache-2.0
"""Where every head and token must be: explicit lists in plain numpy.

Nothing here comes from the library. Global arrays that leave a ``shard_map`` with the
context-parallel axis on the head dimension show rank 0's heads, then rank 1's, ...
"""

import numpy as np


def heads_of_rank(num_heads: int, num_ranks: int, rank: int) -> list[int]:
    """Global heads that one rank holds: its share, or the one of floor(r*M/P)."""
    if num_heads % num_ranks == 0:
        share = num_heads // num_ranks
        return [h for h in range(num_heads) if h // share == rank]
    assert num_ranks % num_heads == 0
    return [int(rank * num_heads / num_ranks)]


def all_heads(num_heads: int, num_ranks: int) -> list[int]:
    """Heads of rank 0, then rank 1, ...: the head axis of a scattered global array."""
    return [h for r in range(num_ranks) for h in heads_of_rank(num_heads, num_ranks, r)]


def tokens_of_rank(length: int, num_ranks: int, rank: int, zigzag: bool) -> list[int]:
    """Global tokens that one rank's sequence shard holds, in its order."""
    if not zigzag:
        return [t for t in range(length) if t // (length // num_ranks) == rank]
    size = length // (2 * num_ranks)
    low = list(range(rank * size, (rank + 1) * size))
    mirrored = 2 * num_ranks - 1 - rank
    return low + list(range(mirrored * size, (mirrored + 1) * size))


def all_tokens(length: int, num_ranks: int, zigzag: bool) -> list[int]:
    """Tokens of rank 0, then rank 1, ...: the order of an array before sharding."""
    return [
        t
        for r in range(num_ranks)
        for t in tokens_of_rank(length, num_ranks, r, zigzag)
    ]


def true_order(x: np.ndarray, num_ranks: int, zigzag: bool) -> np.ndarray:
    """[B, S, ...] in shard order to true order."""
    result = np.empty_like(x)
    for here, token in enumerate(all_tokens(x.shape[1], num_ranks, zigzag)):
        result[:, token] = x[:, here]
    return result


def shards_order(x: np.ndarray, num_ranks: int, zigzag: bool) -> np.ndarray:
    """[B, S, ...] in true order to shard order."""
    return x[:, all_tokens(x.shape[1], num_ranks, zigzag)]


def scatter(x: np.ndarray, num_ranks: int, zigzag: bool = False) -> np.ndarray:
    """[B, S, M, H] in shard order to [B, S, P*local, H] in true order."""
    heads = all_heads(x.shape[2], num_ranks)
    return true_order(x, num_ranks, zigzag)[:, :, heads]


def gather(
    x: np.ndarray, num_heads: int, num_ranks: int, zigzag: bool = False
) -> np.ndarray:
    """[B, S, P*local, H] to [B, S, M, H] in shard order; copies of a head add up."""
    result = np.zeros((*x.shape[:2], num_heads, x.shape[3]), x.dtype)
    for here, head in enumerate(all_heads(num_heads, num_ranks)):
        result[:, :, head] = result[:, :, head] + x[:, :, here]
    return shards_order(result, num_ranks, zigzag)
