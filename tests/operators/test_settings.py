# SPDX-License-Identifier: Apache-2.0
"""Settings: from the environment, inside a ``with`` block, and wrong ones."""

import os

import pytest

import jax_ulysses as ju
from jax_ulysses.config import config


def test_settings_restore_after_an_error_and_nest():
    class Stop(Exception):
        pass

    def leave_by_error():
        with ju.settings(implementation="host"):
            raise Stop

    with ju.settings(deadline_s=7.0) as now:
        with ju.settings(deadline_s=3.0):
            assert now.deadline_s == 3.0
        assert now.deadline_s == 7.0
        with pytest.raises(Stop):
            leave_by_error()
        assert (now.implementation, now.deadline_s) == (None, 7.0)
    with pytest.raises(TypeError, match="unknown_field"), ju.settings(unknown_field=1):
        pass


@pytest.mark.parametrize(
    "wrong",
    [
        {"deadline_s": -1.0},
        {"deadline_s": float("inf")},
        {"deadline_s": "soon"},
        {"reductions": "nccl"},
        {"comm_ctas": -1},
        {"comm_ctas": 1.5},
    ],
)
def test_wrong_settings(wrong):
    ((name, value),) = wrong.items()
    before = getattr(config, name)
    with (
        pytest.raises(ValueError, match=f"{name}={value!r} must"),
        ju.settings(**wrong),
    ):
        pass
    assert getattr(config, name) == before


@pytest.mark.parametrize(
    ("text", "match"),
    [("soon", "not a number"), *((text, "0 or more") for text in ("-1", "nan", "inf"))],
)
def test_environment(text, match, monkeypatch):
    from jax_ulysses import config

    monkeypatch.setenv("JAX_ULYSSES_IMPLEMENTATION", "xla")
    monkeypatch.setenv("JAX_ULYSSES_DEADLINE_S", "2.5")
    assert config._from_environment() == config.Config("xla", 2.5)
    monkeypatch.setenv("JAX_ULYSSES_IMPLEMENTATION", "")
    assert config._from_environment() == config.Config(None, 2.5)
    monkeypatch.setenv("JAX_ULYSSES_DEADLINE_S", text)
    with pytest.raises(ValueError, match=match):
        config._from_environment()


def test_environment_of_switches(monkeypatch):
    from jax_ulysses import config

    for name in list(os.environ):
        if name.startswith("JAX_ULYSSES_"):
            monkeypatch.delenv(name)
    assert config._from_environment() == config.Config(None, 30.0, True, "auto", 0)
    monkeypatch.setenv("JAX_ULYSSES_COLLECTIVE_CALLS", "0")
    monkeypatch.setenv("JAX_ULYSSES_REDUCTIONS", "heap")
    assert config._from_environment() == config.Config(None, 30.0, False, "heap", 0)
    monkeypatch.setenv("JAX_ULYSSES_REDUCTIONS", "nccl")
    with pytest.raises(ValueError, match="environment.*reductions='nccl'"):
        config._from_environment()
    monkeypatch.setenv("JAX_ULYSSES_COLLECTIVE_CALLS", "no")
    with pytest.raises(ValueError, match="CALLS='no' must be 0 or 1"):
        config._from_environment()
