# SPDX-License-Identifier: Apache-2.0
"""Eight virtual CPU devices for every test, set before JAX reads its environment."""

import importlib.util
import os
import pathlib
import sys

assert "jax" not in sys.modules, "a pytest plugin imported jax before tests/conftest.py"

NUM_DEVICES = 8
_COUNT_FLAG = "--xla_force_host_platform_device_count"
if _COUNT_FLAG not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = (
        f"{os.environ.get('XLA_FLAGS', '')} {_COUNT_FLAG}={NUM_DEVICES}".strip()
    )
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # noqa: E402
import pytest  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parent.parent


def _check_installation() -> None:
    """Stops the run with one message if the tests would not see the built package."""
    if importlib.util.find_spec("jax_ulysses") is None:
        pytest.exit("jax_ulysses is not installed: run `make test`", returncode=3)
    if importlib.util.find_spec("jax_ulysses.ffi") is None:
        pytest.exit(
            "the source folder jax_ulysses/ shadows the installed package: call the "
            "`pytest` script from an environment where the project is installed "
            "(`make test` does both), not `python -m pytest`",
            returncode=3,
        )
    try:
        from jax_ulysses.ffi import _targets  # noqa: F401
    except ImportError as error:
        pytest.exit(
            f"the extension module jax_ulysses.ffi._targets cannot be imported "
            f"({error}): run `make test`, or `pip install -e .` again",
            returncode=3,
        )


_check_installation()

# Compilation dominates the first example of every property, so a deadline only flakes.
_quiet = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile(
    "default",
    deadline=None,
    max_examples=20,
    derandomize=True,
    suppress_health_check=_quiet,
)
settings.register_profile(
    "long", deadline=None, max_examples=2000, suppress_health_check=_quiet
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_report_header() -> str:
    return (
        f"jax {jax.__version__}, {jax.device_count()} {jax.default_backend()} devices"
    )


@pytest.fixture(scope="session")
def mesh8() -> jax.sharding.Mesh:
    """Eight devices on one axis, "cp"."""
    return jax.make_mesh((NUM_DEVICES,), ("cp",))


@pytest.fixture(scope="session")
def mesh2x4() -> jax.sharding.Mesh:
    """Eight devices as 2 x 4 on ("dp", "cp")."""
    return jax.make_mesh((2, 4), ("dp", "cp"))


@pytest.fixture(scope="session")
def root() -> pathlib.Path:
    """The repository's root folder."""
    return ROOT
