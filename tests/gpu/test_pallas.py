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


@pytest.mark.skipif(RIG == "cpu", reason="Mosaic GPU kernels run on GPUs")
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("num_ranks", "name"), CASES)
def test_values(num_ranks, name, run_chosen):
    for result in run_chosen("tests.gpu.pallas_cases:run_all", num_ranks):
        outcome = result.value[name]
        assert outcome["failure"] is None, f"process {result.index}: {outcome}"
