# SPDX-License-Identifier: Apache-2.0
"""The ``pallas`` operators on the ranks of a rig.

Where ranks share a GPU the exchange kernel of ``cuda`` moves the blocks, elsewhere
XLA's all-to-all does.
"""

import pytest

from tests.gpu import pallas_cases
from tests.gpu.conftest import RANKS, RIG

CASES = [(p, name) for p in RANKS for name in pallas_cases.cases(p)]
# One start of the processes serves all cases of a P.
_results: dict[int, list] = {}


@pytest.mark.skipif(RIG == "cpu", reason="Mosaic GPU kernels run on GPUs")
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("num_ranks", "name"), CASES)
def test_values(num_ranks, name, make_rig, request):
    if num_ranks not in _results:
        chosen = [
            item.callspec.params["name"]
            for item in request.session.items
            if item.path == request.path
            and item.callspec.params["num_ranks"] == num_ranks
        ]
        _results[num_ranks] = make_rig(num_ranks).run(
            "tests.gpu.pallas_cases:run_all", chosen, timeout_s=380
        )
    for result in _results[num_ranks]:
        outcome = result.value[name]
        assert outcome["failure"] is None, f"process {result.index}: {outcome}"
