# SPDX-License-Identifier: Apache-2.0
"""Values and gradients of every operator on the ranks of a rig."""

import pytest

from tests.gpu import value_cases
from tests.gpu.conftest import RANKS

CASES = [(p, name) for p in RANKS for name in value_cases.names(p)]
# One start of the processes serves all cases of a P.


@pytest.mark.user_case(53, 56)
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("num_ranks", "name"), CASES)
def test_values(num_ranks, name, run_chosen):
    for result in run_chosen("tests.gpu.value_cases:run_all", num_ranks):
        outcome = result.value[name]
        assert outcome["failure"] is None, f"process {result.index}: {outcome}"
