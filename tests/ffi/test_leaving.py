# SPDX-License-Identifier: Apache-2.0
"""Making and leaving a group of several processes when not everything is in order.

With stand-ins for the other processes and for the kernels.
"""

import dataclasses
import itertools
import logging
import subprocess
import time
import types
from typing import ClassVar

import jax
import numpy as np
import pytest

import jax_ulysses as ju
from jax_ulysses import group, heaps, liveness


@pytest.fixture
def targets(monkeypatch):
    """Notes what was done with sessions."""
    done = []
    uuids = map(str, itertools.count())

    def note(what):
        return lambda session, *_: done.append((what, session))

    stand_in = types.SimpleNamespace(
        done=done,
        build_info=lambda: {"platforms": ["cuda"]},
        device_uuid=lambda ordinal: next(uuids),
        group_prepare=lambda **_: b"records",
        group_connect=note("connect"),
        group_info=lambda _: {"platform": "cuda", "closed": [], "heap_bytes": 4096},
        group_close=note("close"),
        group_destroy=note("destroy"),
        group_fail=note("fail"),
    )
    monkeypatch.setattr(heaps, "_targets", lambda: stand_in)
    monkeypatch.setattr(heaps, "FINALIZE_TIMEOUT_S", 0.2)
    monkeypatch.setattr(jax, "clear_caches", lambda: done.append("clear_caches"))
    return stand_in


@pytest.fixture
def other():
    """A process that lives, as process 1 of the mesh."""
    child = subprocess.Popen(["sleep", "60"])
    child_process = liveness.find(child.pid, 1, [1])
    assert child_process is not None
    yield types.SimpleNamespace(kill=child.kill, process=child_process)
    child.kill()
    child.wait()


def _plan(axis="cp"):
    devices = [types.SimpleNamespace(id=i, process_index=i) for i in range(2)]
    mesh = types.SimpleNamespace(
        devices=np.array(devices), axis_names=(axis,), size=2, local_devices=devices[:1]
    )
    return heaps.Plan(
        mesh=mesh,
        axes=(axis,),
        num_ranks=2,
        members=[(0, 0, 0)],
        slot_bytes=1024,
        num_slots=2,
        deadline_ms=1000,
        sm_budget=0,
    )


class _Alone:
    """Of a rendezvous, what the process sees whose partner does not come."""

    processes = (0, 1)

    def __init__(self, *_):
        pass

    def wait(self, timeout_s, without):
        return [1] if 1 not in without else []


def _watch(session, targets, others):
    heaps._watchdog.watch(session, targets.group_info, targets.group_fail, others)


def test_a_heap_stays_while_another_process_may_write_to_it(
    targets, other, monkeypatch, caplog
):
    monkeypatch.setattr(heaps, "Rendezvous", _Alone)
    _watch(5, targets, [other.process])
    with caplog.at_level(logging.WARNING, logger="jax_ulysses"):
        heaps.destroy(5, _plan())
    assert targets.done == [("close", 5)]
    (text,) = caplog.messages
    assert "[1] did not come within 0.2 s and may still write" in text
    assert "stay allocated until it ends, 4096 bytes" in text


def test_a_heap_goes_if_the_other_process_dies_meanwhile(targets, other, monkeypatch):
    class Dying(_Alone):
        def wait(self, timeout_s, without):
            assert not without
            other.kill()
            end = time.monotonic() + 10
            while not other.process.ended and time.monotonic() < end:
                time.sleep(0.01)
            return [1]

    monkeypatch.setattr(heaps, "Rendezvous", Dying)
    _watch(5, targets, [other.process])
    heaps.destroy(5, _plan())
    assert targets.done == [("close", 5), ("destroy", 5)]


def test_finalize_after_the_store_has_gone(targets, caplog):
    """jax.distributed.shutdown() came first: all is closed, nothing is freed."""
    report = types.SimpleNamespace(platform="cuda")
    for session, axis in ((5, "cp"), (6, "sp")):
        group._groups[axis,] = types.SimpleNamespace(
            session=session, plan=_plan(axis), report=report
        )
    with caplog.at_level(logging.WARNING, logger="jax_ulysses"):
        ju.finalize()
    assert targets.done == [("close", 5), ("close", 6), "clear_caches"]
    assert len(caplog.messages) == 2
    for text in caplog.messages:
        assert "[1] cannot be asked (the mesh spans several processes" in text
    assert not group._groups


def test_finalize_goes_on_after_an_error(targets, monkeypatch):
    def close(session):
        targets.done.append(("close", session))
        if session == 5:
            raise RuntimeError("of the driver")

    targets.group_close = close
    report = types.SimpleNamespace(platform="cuda")
    for session, axis in ((5, "cp"), (6, "sp")):
        group._groups[axis,] = types.SimpleNamespace(
            session=session, plan=_plan(axis), report=report
        )
    monkeypatch.setattr(heaps, "Rendezvous", _Alone)
    with pytest.raises(RuntimeError, match="of the driver"):
        ju.finalize()
    assert targets.done == [("close", 5), ("close", 6), "clear_caches"]
    assert not group._groups


@pytest.mark.parametrize("connecting", [False, True])
def test_an_interrupted_initialize_leaves_nothing_behind(
    targets, monkeypatch, connecting
):
    """Once others have mapped the heap it stays; before, it is freed."""

    class Interrupted(_Alone):
        step = 0

        def exchange(self, produce):
            self.step += 1
            value = produce()
            if self.step == 2 + connecting:
                raise KeyboardInterrupt
            if self.step > 1:
                return [value, value]
            return [value, value | {"devices": ["of the other"]}]

    monkeypatch.setattr(heaps, "Rendezvous", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        heaps.create(_plan(), "cuda")
    what = [name for name, _ in targets.done]
    assert what == (["connect", "close"] if connecting else ["close", "destroy"])


class _Together(_Alone):
    """The partner comes, and asks for the same but for ``differs``."""

    differs: ClassVar = {}
    step = 0

    def exchange(self, produce):
        self.step += 1
        value = produce()
        return [value, value | self.differs if self.step == 1 else value]


@pytest.fixture
def differs(targets, monkeypatch):
    monkeypatch.setattr(heaps, "Rendezvous", _Together)
    monkeypatch.setattr(_Together, "differs", {"devices": ["of the other"]})
    return _Together.differs


def test_processes_take_one_session_that_is_new_to_all(differs):
    """It is part of the compiled program, which must be the same everywhere."""
    differs["session"] = theirs = next(heaps._sessions) + 7
    session, _, plan = heaps.create(_plan(), "cuda")
    assert heaps._watchdog.forget(session) == []
    assert (session, plan.ranks_per_device, plan.sm_budget) == (theirs, 1, 0)
    assert next(heaps._sessions) > theirs


def test_processes_that_ask_for_different_heaps(differs, targets):
    differs["plan"] = [["cp"], 2, 2048, 2, 1000, 0, 0]
    with pytest.raises(RuntimeError, match="what initialize was asked for differs"):
        heaps.create(_plan(), "cuda")
    assert targets.done == []


@pytest.mark.parametrize(("asked", "given"), [(0, 62), (30, 30)])
def test_ranks_that_share_a_device_share_its_processors(differs, asked, given):
    differs["devices"] = ["0"]  # The stand-in's first.
    plan = dataclasses.replace(_plan(), sm_budget=asked)
    plan.mesh.local_devices[0].core_count = 132
    session, _, plan = heaps.create(plan, "cuda")
    heaps._watchdog.forget(session)
    assert (plan.ranks_per_device, plan.sm_budget) == (2, given)
