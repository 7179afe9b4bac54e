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

    def key_value_try_get(self, key):
        with self._changed:
            if key not in self._values:
                raise RuntimeError(f"NOT_FOUND: {key}")
            return self._values[key]

    def blocking_key_value_get(self, key, timeout_ms):
        with self._changed:
            there = self._changed.wait_for(
                lambda: key in self._values, timeout_ms / 1000
            )
            if not there:
                raise RuntimeError(f"DEADLINE_EXCEEDED: {key}")
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

    expected = ([{"value": 0}, {"value": 1}, {"value": 2}], [0, 10, 20], [])
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

    assert world(lambda _, mesh: Rendezvous(mesh, "b").wait(0.2), (0, 2)) == [[1], [1]]

    def without(index, mesh):
        if index == 2:
            time.sleep(0.5)  # The living are waited for.
        start = time.monotonic()
        return Rendezvous(mesh, "c").wait(20, without=[1]), time.monotonic() - start

    (first, waited), (second, later) = world(without, (0, 2))
    assert [first, second] == [[], []]
    assert 0.3 < waited < 5
    assert later < 5


def test_all_time_goes_to_one_and_the_others_are_still_heard(world):
    """Of three processes one does not come; its neighbours name it alone."""

    def process(index, mesh):
        if index == 1:
            return None
        # Process 2 has said what it has to say when process 0 has waited for 1.
        return Rendezvous(mesh, "a").wait(0.3)

    assert world(process) == [[1], None, [1]]


def test_one_that_gives_up_takes_the_others_along(world):
    def process(index, mesh):
        start = time.monotonic()
        meeting = Rendezvous(mesh, "a", timeout_s=30 if index else 0.3)
        with pytest.raises(PeerFailure) as failure:
            meeting.exchange(lambda: None)
        return str(failure.value), time.monotonic() - start

    (first, _), (second, seconds) = world(process, (0, 2))
    assert first.startswith("process 1: did not answer within 0.3 s")
    assert second == f"process 0 gave up: {first}"
    assert seconds < 5


def test_after_a_late_process_all_meet_at_the_next_attempt(world):
    """It must not take what the others said in the attempt that they gave up."""

    def process(index, mesh):
        time.sleep(0.6 if index == 1 else 0)
        failures = 0
        for timeout_s in (0.3, 5, 5):
            try:
                meeting = Rendezvous(mesh, "a", timeout_s)
                return failures, [meeting.exchange(lambda: index) for _ in range(2)]
            except PeerFailure:
                failures += 1

    everyone = [[0, 1, 2]] * 2
    assert world(process) == [(1, everyone), (0, everyone), (1, everyone)]


def test_one_that_is_interrupted_says_so(world):
    class Interrupt(BaseException):
        pass

    both = threading.Barrier(2)

    def process(index, mesh):
        meeting = Rendezvous(mesh, "a", 30)
        # Else one would begin the next attempt.
        both.wait(20)
        if index:
            with pytest.raises(PeerFailure, match="0 gave up: .* by Interrupt"):
                meeting.exchange(lambda: None)
            return

        def interrupted(*_):
            raise Interrupt

        meeting._hear = interrupted
        with pytest.raises(Interrupt):
            meeting.exchange(lambda: None)

    start = time.monotonic()
    assert world(process, (0, 2)) == [None, None]
    assert time.monotonic() - start < 5


def test_disagreement_is_named():
    assert rendezvous.agree([4, 4], [0, 3], "x") == 4
    with pytest.raises(RuntimeError, match="x differs .*: 4 in process 0, 5 in .* 3"):
        rendezvous.agree([4, 5], [0, 3], "x")


def test_without_a_store(monkeypatch):
    monkeypatch.setattr(jax._src.distributed.global_state, "client", None)
    with pytest.raises(RuntimeError, match="call jax.distributed.initialize"):
        rendezvous._client()
