# SPDX-License-Identifier: Apache-2.0
"""Values and gradients of every operator on the ranks of a rig."""

import pytest

from tests.gpu import value_cases
from tests.gpu.conftest import RANKS

CASES = [(p, name) for p in RANKS for name in value_cases.names(p)]
# One start of the processes serves all cases of a P.
_results: dict[int, list] = {}


@pytest.mark.user_case(53, 56)
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("num_ranks", "name"), CASES)
def test_values(num_ranks, name, make_rig, request):
    if num_ranks not in _results:
        chosen = [
            item.callspec.params["name"]
            for item in request.session.items
            if item.originalname == "test_values"
            and item.callspec.params["num_ranks"] == num_ranks
        ]
        _results[num_ranks] = make_rig(num_ranks).run(
            "tests.gpu.value_cases:run_all", chosen, timeout_s=380
        )
    for result in _results[num_ranks]:
        outcome = result.value[name]
        assert outcome["failure"] is None, f"process {result.index}: {outcome}"
