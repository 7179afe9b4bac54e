# SPDX-License-Identifier: Apache-2.0
"""Arguments of ``initialize``: which are refused, and that each of them counts."""

import dataclasses
import types

import jax
import numpy as np
import pytest

import jax_ulysses as ju
from jax_ulysses import group, sharding
from tests.helpers.worlds import world


@pytest.fixture
def mesh():
    ju.finalize()
    yield world("cp4").mesh
    ju.finalize()


def test_not_a_mesh(mesh):
    with pytest.raises(TypeError, match=r"must be a jax\.sharding\.Mesh, not"):
        ju.initialize(mesh.abstract_mesh)


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"workspace_bytes": 0}, "workspace_bytes=0 must be 2 at least"),
        ({"workspace_bytes": 1}, "workspace_bytes=1 must be 2 at least"),
        ({"sm_budget": 0}, "sm_budget=0 must be None or at least 1"),
        ({"sm_budget": -2}, "sm_budget=-2 must be None or at least 1"),
    ],
)
def test_sizes_that_cannot_be(mesh, wrong, match):
    with pytest.raises(ValueError, match=match):
        ju.initialize(mesh, **wrong)
    with pytest.raises(NotImplementedError, match="no peer group"):
        group.find(("cp",))


def test_defaults(mesh):
    report = ju.initialize(mesh)
    assert report.axis_name == ("cp",)
    assert report.workspace_bytes == 64 << 20
    plan = group.find(("cp",)).plan
    assert (plan.num_slots, plan.slot_bytes) == (2, 32 << 20)
    assert (plan.deadline_ms, plan.sm_budget, plan.comm_ctas) == (30_000, 0, 0)


ARGUMENTS = {"workspace_bytes": 1 << 20, "sm_budget": 4}
SETTINGS = {"deadline_s": 20.0, "comm_ctas": 3}


@pytest.mark.parametrize("name", [*ARGUMENTS, *SETTINGS])
def test_every_argument_counts(mesh, name):
    """A second call that asks for something else must not get the first one's group."""
    with ju.settings(**SETTINGS):
        first = ju.initialize(mesh, **ARGUMENTS)
        assert ju.initialize(mesh, **ARGUMENTS) is first
    change = {name: 2 * (ARGUMENTS | SETTINGS)[name]}
    arguments = ARGUMENTS | {k: v for k, v in change.items() if k in ARGUMENTS}
    settings = SETTINGS | {k: v for k, v in change.items() if k in SETTINGS}
    with (
        ju.settings(**settings),
        pytest.raises(RuntimeError, match=r"with other arguments.*finalize\(\) first"),
    ):
        ju.initialize(mesh, **arguments)


@pytest.mark.parametrize(
    "change",
    [
        {"axes": ("dp",)},
        {"num_ranks": 8},
        {"slot_bytes": 1},
        {"num_slots": 3},
        {"deadline_ms": 1},
        {"sm_budget": 1},
        {"comm_ctas": 1},
    ],
)
def test_processes_compare_all_that_they_ask_for(mesh, change):
    ju.initialize(mesh)
    plan = group.find(("cp",)).plan
    assert dataclasses.replace(plan, **change).summary() != plan.summary()


def test_a_group_made_elsewhere_does_not_replace_one(mesh):
    ju.initialize(mesh)
    made = group.find(("cp",))
    with (
        pytest.raises(RuntimeError, match="a group along 'cp' exists"),
        group.registered(("cp",), made),
    ):
        pass
    assert group.find(("cp",)) is made


def test_a_mesh_of_another_shape_has_no_group(mesh):
    ju.initialize(mesh)
    with (
        jax.set_mesh(world("dp2cp4-explicit").mesh),
        pytest.raises(NotImplementedError, match=r"made for mesh \{'cp': 4\}, this"),
    ):
        group.find(("cp",))


def test_members_are_the_devices_of_this_process():
    """A process of two devices, of four processes; the group's axes are not adjacent.

    Device 10 * p + i is the i-th one of process p.
    """
    shape = {"a": 2, "dp": 2, "b": 2}
    devices = np.empty(8, object)
    for n in range(8):
        devices[n] = types.SimpleNamespace(
            process_index=n // 2 - 1, local_hardware_id=10 * (n // 2) + n % 2
        )
    mesh = types.SimpleNamespace(
        axis_names=tuple(shape), shape=shape, devices=devices.reshape(2, 2, 2)
    )
    # Process 0 has (a, dp, b) = (0, 1, 0) and (0, 1, 1): line 1, as dp is 1.
    assert sharding.members(mesh, ("a", "b")) == [(10, 1, 0), (11, 1, 1)]
    assert sharding.members(mesh, ("b", "a")) == [(10, 1, 0), (11, 1, 2)]
    assert sharding.members(mesh, ("dp",)) == [(10, 0, 1), (11, 1, 1)]
