# SPDX-License-Identifier: Apache-2.0
"""Multiprocessors of ranks that share a GPU: each kernel must find room."""

import pytest

from jax_ulysses import sm_budget

GPCS = 8


def _fits(free: list[int], cluster: int, ctas: int) -> bool:
    return sum(f // cluster for f in free) * cluster >= ctas


@pytest.mark.parametrize("num_sms", [78, 114, 132, 144])
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_clusters_fit_wherever_the_others_lie(num_sms, ranks):
    budget = sm_budget.shared(num_sms, ranks)
    free = num_sms - (ranks - 1) * budget
    # Worst for pairs: an odd number left over in each GPC. Worst for clusters of
    # eight: spread evenly.
    odd = [1] * (GPCS - 1)
    assert _fits([*odd, (free - len(odd)) // 2 * 2], 2, budget)
    even = [free // GPCS + (i < free % GPCS) for i in range(GPCS)]
    assert _fits(even, 8, 8)


def test_numbers_of_an_h200():
    assert [sm_budget.shared(132, p) for p in (1, 2, 4, 8)] == [132, 62, 24, 10]


def test_equal_parts_would_not_do():
    free = 132 - 7 * 16
    assert not _fits([free // GPCS + (i < free % GPCS) for i in range(GPCS)], 4, 4)


def test_many_ranks_keep_one():
    assert sm_budget.shared(132, 100) == 1
