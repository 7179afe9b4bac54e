# SPDX-License-Identifier: Apache-2.0
"""Segments against the mapping's oracle; tilings: what fits, what is chosen."""

import dataclasses
import itertools
import math

import pytest

from jax_ulysses.pallas import config as configs
from jax_ulysses.pallas.config import GemmConfig
from jax_ulysses.pallas.layout import Segment, matrix, segments_of
from tests.helpers import mapping_oracle


def _heads_of(segment: Segment, head_dim: int, first: int) -> list[list[int]]:
    """For each stored block, the heads of the matrix it holds, by counting columns."""
    found = []
    for block in range(segment.blocks):
        start = segment.start + block * segment.width
        assert start % head_dim == segment.width % head_dim == 0
        heads = range(start // head_dim, (start + segment.width) // head_dim)
        found += [[h - first for h in heads]] * segment.copies
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_segments_follow_the_mapping(ranks):
    """Block r of a segment holds the heads that rank r owns."""
    counts = [m for m in range(1, 17) if m % ranks == 0 or ranks % m == 0]
    for heads in itertools.product(counts, repeat=2):
        segments = segments_of(heads, 16, ranks, copies=True)
        first = 0
        for count, segment in zip(heads, segments):
            assert segment.blocks * segment.copies == ranks
            owned = _heads_of(segment, 16, first)
            assert [*itertools.chain(*owned)] == mapping_oracle.all_heads(count, ranks)
            first += count
        assert segments[-1].stop == sum(heads) * 16


def test_segments_without_copies():
    q, k = segments_of((8, 2), 64, 8, copies=False)
    assert (q.blocks, q.width, q.copies) == (8, 64, 1)
    assert (k.start, k.blocks, k.width, k.copies) == (512, 2, 64, 1)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"stages": 5}, r"5 stages of 128x256x64 need \d+ bytes .* has 232448"),
        ({"tile_m": 256}, "tile of 128x256 is no multiple .* at most 16384"),
        ({"tile_m": 64}, "tile of 32x256 is no multiple"),
        ({"tile_n": 64, "split": "n"}, "tile of 128x0 is no multiple"),
        ({"tile_k": 16}, "tile_k=16 is no multiple of the swizzle's 64"),
    ],
)
def test_tilings_that_do_not_fit(change, match):
    config = dataclasses.replace(GemmConfig(), **change)
    heads = segments_of((8, 4, 4), 128, 4, copies=True)
    reason = configs.refusal(
        config, matrix(4096), heads, "bfloat16", w_transposed=False
    )
    with pytest.raises(AssertionError, match=match):
        raise AssertionError(reason)


def test_shared_memory_is_counted():
    """The ring, the epilogue's staging, the barriers."""
    config = GemmConfig(tile_m=128, tile_n=256, tile_k=64, stages=4)
    ring, staging = 4 * (128 + 256) * 64 * 2, 2 * 2 * 64 * 64 * 2
    assert config.smem_bytes(64) == ring + staging + 8 * 8 + configs.RESERVED_BYTES


@pytest.mark.parametrize("w_transposed", [False, True])
@pytest.mark.parametrize("m", [8, 520, 2048, 65536])
def test_every_choice_fits(m, w_transposed):
    for heads, head_dim in itertools.product(
        [(16, 8, 8), (5, 5, 5), (40, 40, 40)], [64, 80, 96, 128, 192, 256]
    ):
        ranks = math.gcd(heads[0], 8) if heads[0] != 5 else 5
        blocks = segments_of(heads, head_dim, ranks, copies=True)
        for a, out in ((matrix(2880), blocks), (blocks, matrix(2880))):
            config = configs.choose(m, out[-1].stop, a[-1].stop, 132)
            reason = configs.refusal(
                config, a, out, "bfloat16", w_transposed=w_transposed
            )
            assert reason is None


@pytest.mark.parametrize(
    ("tile_n", "columns"),
    [(128, (64, 64)), (192, (128, 64)), (256, (128, 128)), (320, (192, 128))],
)
def test_warpgroups_share_the_columns(tile_n, columns):
    """In multiples of 64, so that each has whole rows of the swizzle."""
    config = GemmConfig(tile_m=64, tile_n=tile_n, split="n")
    (first, middle), (second, stop) = config.group_columns
    assert (first, middle, stop) == (0, second, tile_n)
    assert (middle, stop - middle) == columns
    whole = GemmConfig(tile_n=tile_n)
    assert whole.group_columns == ((0, tile_n), (0, tile_n))


@pytest.mark.parametrize("w_transposed", [False, True])
def test_candidates_keep_the_widest_swizzle(w_transposed):
    """Narrower boxes took a third more time."""
    for config, *_ in configs.CANDIDATES:
        a, out = matrix(5120), segments_of((40, 8, 8), 128, 4, copies=True)
        swizzle = configs.swizzle_columns(
            config, a, out[-1].stop, w_transposed=w_transposed
        )
        assert swizzle == configs.piece_columns(config, out) == 64
        reason = configs.refusal(config, a, out, "bfloat16", w_transposed=w_transposed)
        assert reason is None


@pytest.mark.parametrize(
    ("shape", "tile"),
    [
        ((512, 2048, 2048), (64, 128)),
        ((512, 3072, 6144), (64, 192)),
        ((512, 5120, 5120), (64, 320)),
        ((512, 4096, 4096), (128, 128)),
        ((1024, 5120, 2880), (64, 320)),
        ((2048, 5120, 2880), (128, 128)),
        ((1024, 7168, 5120), (64, 448)),
        ((1024, 9216, 4096), (128, 192)),
        ((1024, 4096, 4096), (128, 256)),
        ((4096, 4096, 8192), (128, 256)),
        ((16384, 2048, 2048), (128, 256)),
        ((4096, 7168, 5120), (128, 256)),
        ((16384, 2880, 4096), (128, 192)),
        ((16384, 4096, 2048), (128, 256)),
        ((16384, 7168, 5120), (128, 128)),
        ((16384, 8192, 3072), (128, 128)),
    ],
)
def test_choice_is_the_fastest_that_was_measured(shape, tile):
    config = configs.choose(*shape, 132)
    assert (config.tile_m, config.tile_n) == tile


def test_choice_fills_the_sms():
    """512x5120 has 80 tiles of 128x256: smaller ones keep all 132 SMs at work."""
    small = configs.choose(512, 5120, 5120, 132)
    tiles_m, tiles_n = small.tiles(512, 5120)
    assert 100 < tiles_m * tiles_n <= 132


@pytest.mark.parametrize("n", [2880, 5120])
def test_turns_hide_the_epilogue_of_several_rounds(n):
    """2048x5120 has 640 tiles of 128x128: what each costs besides counts five times."""
    config = configs.choose(2048, 5120, n, 132)
    assert (config.tile_n, config.split, config.teams) == (128, "tiles", 2)


def test_teams_have_barriers_of_their_own():
    halves = GemmConfig(tile_n=128, stages=6)
    turns = dataclasses.replace(halves, split="tiles")
    assert turns.smem_bytes(64) - halves.smem_bytes(64) == 2 * 6 * 8
    assert turns.group_m == 128
    assert turns.group_columns == ((0, 128), (0, 128))
