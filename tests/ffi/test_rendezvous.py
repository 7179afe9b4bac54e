# SPDX-License-Identifier: Apache-2.0
"""Joint success and failure of processes, with threads in their place."""

import concurrent.futures
import threading
import time
import types

import jax
import numpy as np
import pytest

from jax_ulysses import rendezvous
from jax_ulysses.ffi import targets
from jax_ulysses.rendezvous import PeerFailure, Rendezvous


class Store:
    """The part of the coordination client that is used."""

    def __init__(self):
        self._values = {}
        self._changed = threading.Condition()

    def key_value_set(self, key, value):
        with self._changed:
            assert key not in self._values, key
            self._values[key] = value
            self._changed.notify_all()

    def blocking_key_value_get(self, key, timeout_ms):
        with self._changed:
            there = self._changed.wait_for(
                lambda: key in self._values, timeout_ms / 1000
            )
            if not there:
                raise TimeoutError(key)
            return self._values[key]


@pytest.fixture
def world(monkeypatch):
    """Runs a function of a process index on three "processes" at once."""
    store, me = Store(), threading.local()
    mesh = types.SimpleNamespace(
        axis_names=("cp",),
        devices=np.array(
            [types.SimpleNamespace(process_index=i // 2, id=i) for i in range(6)]
        ),
    )
    monkeypatch.setattr(rendezvous, "_client", lambda: store)
    monkeypatch.setattr(jax, "process_index", lambda: me.index)

    class Counts(threading.local):
        """Each process counts for itself."""

        def __init__(self):
            self.counts = {}

        def __getitem__(self, name):
            return self.counts.get(name, 0)

        def __setitem__(self, name, value):
            self.counts[name] = value

    monkeypatch.setattr(rendezvous, "_count", Counts())

    def run(function, processes=(0, 1, 2)):
        def process(index):
            me.index = index
            try:
                return function(index, mesh)
            except Exception as error:
                return error

        with concurrent.futures.ThreadPoolExecutor(len(processes)) as pool:
            return list(pool.map(process, processes))

    return run


def test_all_succeed(world):
    def process(index, mesh):
        # Twice, in one order: the second must not read what the first wrote.
        first = Rendezvous(mesh, "a").exchange(lambda: {"value": index})
        meeting = Rendezvous(mesh, "a")
        return first, meeting.exchange(lambda: 10 * index), meeting.wait(5)

    expected = ([{"value": 0}, {"value": 1}, {"value": 2}], [0, 10, 20], True)
    assert world(process) == [expected] * 3


def test_one_fails_and_all_raise_its_reason(world):
    def process(index, mesh):
        def produce():
            if index == 1:
                raise MemoryError("no memory left on device 2")

        Rendezvous(mesh, "a").exchange(produce)

    for error in world(process):
        assert isinstance(error, PeerFailure)
        assert str(error) == "process 1: no memory left on device 2"
        assert not error.unavailable


def test_a_failure_outweighs_what_cannot_be(world):
    """Else a user would never hear of the memory that was missing elsewhere."""

    def process(index, mesh):
        def produce():
            raise NotImplementedError("cannot") if index else ValueError("wrong")

        Rendezvous(mesh, "a").exchange(produce)

    for error in world(process):
        assert (str(error), error.unavailable) == ("process 0: wrong", False)

    def unavailable(index, mesh):
        def produce():
            if index == 2:
                raise NotImplementedError("other host")

        Rendezvous(mesh, "b").exchange(produce)

    for error in world(unavailable):
        assert (str(error), error.unavailable) == ("process 2: other host", True)


def test_a_process_that_never_comes(world):
    def process(index, mesh):
        Rendezvous(mesh, "a", timeout_s=0.3).exchange(lambda: None)

    for error in world(process, processes=(0, 2)):
        assert "process 1: did not answer within 0.3 s" in str(error)

    assert world(lambda _, mesh: Rendezvous(mesh, "b").wait(0.2), (0, 2)) == [False] * 2

    def without(index, mesh):
        if index == 2:
            time.sleep(0.5)  # The living are waited for.
        start = time.monotonic()
        return Rendezvous(mesh, "c").wait(20, without=[1]), time.monotonic() - start

    (first, waited), (second, later) = world(without, (0, 2))
    assert [first, second] == [True, True]
    assert 0.3 < waited < 5
    assert later < 5


def test_disagreement_is_named():
    assert rendezvous.agree([4, 4], [0, 3], "x") == 4
    with pytest.raises(RuntimeError, match="x differs .*: 4 in process 0, 5 in .* 3"):
        rendezvous.agree([4, 5], [0, 3], "x")


def test_without_a_store(monkeypatch):
    monkeypatch.setattr(jax._src.distributed.global_state, "client", None)
    with pytest.raises(RuntimeError, match="call jax.distributed.initialize"):
        rendezvous._client()


def test_a_failed_group_returns_the_text():
    options = dict(num_ranks=2, members=[(0, 0, 0), (1, 0, 1)], slot_bytes=1024)
    targets.group_create(session=92, **options)
    targets.group_fail(92, "jax_ulysses: rank 1 ended.")
    targets.group_fail(92, "the first text stays")
    (text,) = targets.group_info(92)["closed"]
    assert text.startswith("jax_ulysses: rank 1 ended. This group is closed: call ")
    targets.group_destroy(92)
    with pytest.raises(ValueError, match="92"):
        targets.group_fail(92, "gone")


def test_a_group_in_two_steps():
    options = dict(num_ranks=2, members=[(0, 0, 0), (1, 0, 1)], slot_bytes=1024)
    blob = targets.group_prepare(session=91, **options)
    assert targets.group_info(91)["calls"] == 0
    with pytest.raises(ValueError, match="not records of this version"):
        targets.group_connect(91, [b"something else, of some length"])
    targets.group_connect(91, [blob])
    with pytest.raises(ValueError, match="connected already"):
        targets.group_connect(91, [blob])
    targets.group_close(91)
    targets.group_close(91)
    assert "destroyed" in targets.group_info(91)["closed"][0]
    targets.group_destroy(91)
    with pytest.raises(ValueError, match="no group for session 91"):
        targets.group_info(91)
