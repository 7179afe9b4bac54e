# SPDX-License-Identifier: Apache-2.0
"""What scenarios on ranks have in common."""

import jax
import ml_dtypes
import numpy as np

import jax_ulysses as ju
from jax_ulysses import group
from jax_ulysses.ffi import targets
from tests.gpu.shards import HEADS, SEQUENCE, all_nan, assert_same_bits, run
from tests.helpers import mapping_oracle

WORKSPACE_BYTES = 32 << 20


def initialize(rank, axis="cp", mesh=None, **kwargs):
    kwargs = {"sm_budget": rank.sm_budget, **kwargs}
    return ju.initialize(mesh or rank.mesh, axis, WORKSPACE_BYTES, **kwargs)


def array(rank, tokens=32, heads=2, head_dim=64, seed=0, dtype=ml_dtypes.bfloat16):
    shape = (1, tokens * rank.num_ranks, heads * rank.num_ranks, head_dim)
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def handler_calls() -> int:
    """Handler calls of all groups of this process; replays of graphs not counted."""
    sessions = [g.session for g in group._groups.values()]
    return sum(targets.group_info(s)["calls"] for s in sessions)


def scatter(rank):
    return lambda x: ju.scatter_heads(x, "cp", implementation=rank.implementation)


def outcome(rank, x) -> str:
    """ "right", "nan", or the text of the error."""
    try:
        y = run(rank.mesh, scatter(rank), (SEQUENCE,), HEADS, x)
        if all_nan(y):
            return "nan"
        assert_same_bits(y, mapping_oracle.scatter(x, rank.num_ranks))
    except jax.errors.JaxRuntimeError as error:
        return str(error)
    return "right"
