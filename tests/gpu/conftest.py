# SPDX-License-Identifier: Apache-2.0
"""The rig that these tests run on, from the environment.

``JAX_ULYSSES_RIG`` is "ranks" (P processes on one GPU), "processes" (P processes with a
GPU each), "devices" (one process with P GPUs) or, without it, "cpu": the same code on
virtual CPU devices and the host implementation, which shows that the tests themselves
work. ``JAX_ULYSSES_RANKS`` is P,
or several of them: "2,4,8". ``make gpu-test RIG=ranks P=4`` sets both.
``JAX_ULYSSES_RANK_LOGS`` is a folder that keeps what the processes wrote.
"""

import os
import pathlib

import pytest

from jax_ulysses.testing import run_ranks

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
_RIGS = {
    "ranks": "shared",
    "processes": "processes",
    "devices": "devices",
    "cpu": "cpu",
}

RIG = _RIGS[os.environ.get("JAX_ULYSSES_RIG", "cpu")]
# XLA's own all-reduce kernels may use NVLink multicast, which not every host allows.
# NCCL does the same sums.
NO_MULTICAST = "--xla_gpu_experimental_use_collective_kernels=-ALL_REDUCE"
RANKS = [int(p) for p in os.environ.get("JAX_ULYSSES_RANKS", "4").split(",")]


class Rig:
    """Runs functions of this folder on the ranks of the rig."""

    def __init__(self, num_ranks: int):
        self.name = RIG
        self.num_ranks = num_ranks

    def run(self, target: str, *args, timeout_s: float = 150.0, **kwargs):
        """Results of all processes; see ``run_ranks``."""
        logs = os.environ.get("JAX_ULYSSES_RANK_LOGS")
        if logs is not None:
            logs = pathlib.Path(logs) / f"{target.rpartition('.')[2]}-P{self.num_ranks}"
        environment = dict(kwargs.pop("environment", {}))
        if self.name in ("devices", "processes"):
            flags = environment.get("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))
            environment["XLA_FLAGS"] = f"{flags} {NO_MULTICAST}".strip()
        return run_ranks(
            target,
            self.num_ranks,
            *args,
            rig=self.name,
            timeout_s=timeout_s,
            paths=[ROOT],
            log_dir=logs,
            environment=environment,
            **kwargs,
        )


@pytest.fixture(scope="session", params=RANKS, ids=lambda p: f"P{p}")
def rig(request) -> Rig:
    """Each number of ranks asked for."""
    return Rig(request.param)


@pytest.fixture(scope="session")
def make_rig():
    """Rigs of a given number of ranks."""
    return Rig


_chosen: dict[tuple, list] = {}


@pytest.fixture
def run_chosen(request, make_rig):
    """Runs those cases of a test file that were chosen, all in one start of the ranks.

    (target, P) -> results of all processes. The file's tests have the parameters
    ``num_ranks`` and ``name``; the target takes the names.
    """

    def run(target: str, num_ranks: int) -> list:
        if (target, num_ranks) not in _chosen:
            names = [
                item.callspec.params["name"]
                for item in request.session.items
                if item.path == request.path
                and item.callspec.params["num_ranks"] == num_ranks
            ]
            _chosen[target, num_ranks] = make_rig(num_ranks).run(
                target, names, timeout_s=380
            )
        return _chosen[target, num_ranks]

    return run
