# SPDX-License-Identifier: Apache-2.0
"""Tests with several ranks: of this library, and of programs that use it.

``run_ranks`` runs a function in P processes, one a rank, that share one GPU or have
one each. ``dry_group`` lets a program be traced and lowered for CUDA without any.
"""

from jax_ulysses.testing.dry import abstract_gpu_mesh as abstract_gpu_mesh
from jax_ulysses.testing.dry import dry_group as dry_group
from jax_ulysses.testing.ranks import Rank as Rank
from jax_ulysses.testing.ranks import RankResult as RankResult
from jax_ulysses.testing.ranks import RanksFailed as RanksFailed
from jax_ulysses.testing.ranks import run_ranks as run_ranks
