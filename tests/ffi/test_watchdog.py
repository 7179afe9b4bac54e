# SPDX-License-Identifier: Apache-2.0
"""What is logged of a group, and that the death of a process is noticed."""

import dataclasses
import json
import logging
import os
import pathlib
import subprocess
import threading
import time

import pytest

from jax_ulysses import heaps, liveness
from jax_ulysses.testing import run_ranks
from jax_ulysses.watchdog import Watchdog

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


def no_death(session, text):
    """A watchdog that has no processes to look after never calls it."""
    raise AssertionError(text)


def test_watchdog_logs_each_text_once(caplog):
    closed = {1: [""], 2: ["", ""]}
    watchdog = Watchdog()
    with caplog.at_level(logging.ERROR, logger="jax_ulysses"):
        for session in closed:
            watchdog.watch(session, lambda s: {"closed": closed[s]}, no_death)
        closed[2][1] = "rank 3 waited"
        end = time.monotonic() + 5
        while not caplog.messages and time.monotonic() < end:
            time.sleep(0.02)
        time.sleep(0.3)
        assert caplog.messages == ["rank 3 waited"]
        # What nobody has said yet is said at the end.
        closed[1][0] = "rank 0 failed"
        watchdog.forget(1)
        watchdog.forget(2)
    assert sorted(caplog.messages) == ["rank 0 failed", "rank 3 waited"]
    names = [t.name for t in threading.enumerate()]
    assert "jax_ulysses-watchdog" not in names


def test_watchdog_closes_a_group_whose_process_has_died(caplog):
    child = subprocess.Popen(["sleep", "60"])
    process = liveness.find(child.pid, 1, [1, 3])
    closed = {7: ["", ""], 8: [""]}

    def fail(session, text):
        closed[session] = [text] * len(closed[session])

    watchdog = Watchdog()
    with caplog.at_level(logging.WARNING, logger="jax_ulysses"):
        for session, processes in ((7, [process]), (8, [])):
            watchdog.watch(session, lambda s: {"closed": closed[s]}, fail, processes)
        time.sleep(0.3)
        assert not caplog.messages
        child.kill()
        end = time.monotonic() + 5
        while not caplog.messages and time.monotonic() < end:
            time.sleep(0.02)
        time.sleep(0.3)
        assert watchdog.forget(7) == [process]
        assert watchdog.forget(8) == []
    child.wait()
    who = f"ranks 1, 3 (process {child.pid}) ended without jax_ulysses.finalize()."
    assert closed == {7: [f"jax_ulysses: {who}"] * 2, 8: [""]}
    assert caplog.messages == [f"{who} Calls of its group can only fail from now on."]


def test_liveness():
    child = subprocess.Popen(["sleep", "60"])
    process = liveness.find(child.pid, 1, [2])
    assert not process.ended
    assert process.description == f"rank 2 (process {child.pid})"
    me = liveness.find(os.getpid(), 0, [0])
    elsewhere = dataclasses.replace(process, namespace="pid:[1]")
    found = [p and dataclasses.asdict(p) for p in (me, process, elsewhere, None)]
    # Through JSON, as between processes.
    (again,) = liveness.others(me, json.loads(json.dumps(found)))
    assert (again.pid, again.index, again.ranks) == (child.pid, 1, [2])
    assert not again.ended
    assert liveness.others(None, found) == []
    assert dataclasses.replace(process, started=process.started - 1).ended
    child.kill()
    # A zombie until its parent waits for it.
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert again.ended
    child.wait()
    assert again.ended
    assert liveness.find(child.pid, 1, [2]) is None


def test_a_program_may_have_any_name(tmp_path):
    """Such as one that looks like more fields of the process table."""
    program = tmp_path / "a) Z 1"
    program.write_text("#!/bin/sh\nread -r line\n")
    program.chmod(0o700)
    with subprocess.Popen([program], stdin=subprocess.PIPE) as child:
        process = liveness.find(child.pid, 1, [1])
        assert not process.ended
        child.kill()
    assert process.ended


@pytest.mark.parametrize(
    ("error", "ended"), [(ProcessLookupError, True), (PermissionError, False)]
)
def test_a_process_that_cannot_be_read(monkeypatch, error, ended):
    """It may vanish between opening and reading; not being allowed says nothing."""
    process = liveness.find(os.getpid(), 0, [0])

    def fail(pid):
        raise error

    monkeypatch.setattr(liveness, "_stat", fail)
    assert process.ended is ended


def test_watchdog_starts_again(caplog):
    watchdog = Watchdog()
    for text in ("rank 1 waited", "rank 2 waited"):
        watchdog.watch(3, lambda _, text=text: {"closed": [text]}, no_death)
        end = time.monotonic() + 5
        while text not in caplog.messages and time.monotonic() < end:
            time.sleep(0.02)
        # Before it is forgotten, which would log it, too.
        assert text in caplog.messages
        watchdog.forget(3)


def test_a_fault_that_comes_with_a_death_is_logged_too(caplog):
    """The fault closes the group first, and its text stays."""
    child = subprocess.Popen(["true"])
    child.wait()
    gone = liveness.Process(child.pid, 0, "", 1, [1])
    closed = []
    watchdog = Watchdog()
    with caplog.at_level(logging.WARNING, logger="jax_ulysses"):
        watchdog.watch(
            5, lambda _: {"closed": closed}, lambda *_: closed.append("fault"), [gone]
        )
        watchdog.forget(5)
    assert "fault" in caplog.messages
    assert any("ended without" in text for text in caplog.messages)


def test_the_others_hear_of_a_death_and_leave():
    """In processes, through JAX's store; only the kernels are a stand-in."""
    results = run_ranks(
        "tests.ffi.process_groups:one_dies",
        3,
        1,
        rig="processes",
        timeout_s=90,
        may_fail=[1],
        paths=[ROOT],
        environment={"JAX_PLATFORMS": "cpu"},
    )
    assert results[1].returncode == -9
    for result in (results[0], results[2]):
        value = result.value
        assert value["orderly"] == "", value
        assert value["closed"].startswith("jax_ulysses: rank 1 (process "), value
        assert "ended without jax_ulysses.finalize()" in result.log
        # Not the 20 s in which one may still come.
        assert value["seconds"] < heaps.FINALIZE_TIMEOUT_S / 2, value
        assert "stay allocated" not in result.log


def test_one_comes_late_and_all_meet_again():
    """Its heap may go at once; the others keep theirs, as it might have used them."""
    results = run_ranks(
        "tests.ffi.process_groups:one_is_late",
        3,
        1,
        rig="processes",
        timeout_s=90,
        paths=[ROOT],
        environment={"JAX_PLATFORMS": "cpu"},
    )
    for result in results:
        early = result.index != 1
        assert result.value["kept"] == early
        warning = "[1] did not come within 2 s and may still write to the heaps"
        assert (warning in result.log) == early
        failures = result.value["failures"]
        assert (len(failures) >= 2) if early else (len(failures) <= 1), failures
        assert all("process 1: did not answer" in text for text in failures), failures
