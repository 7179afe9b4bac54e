# SPDX-License-Identifier: Apache-2.0
"""The ``implementation`` fixture: every test of an operator runs on each that can.

A new implementation enters the whole suite by being able to run ``_PROBE``.
"""

import jax
import pytest

import jax_ulysses
from jax_ulysses import dispatch
from jax_ulysses.spec import HeadExchange, Request

_PROBE = Request(
    operator="scatter_heads",
    dataflow="scatter",
    exchange=HeadExchange((8,), 8, 4, ("cp",)),
    w_transposed=False,
    platform=jax.default_backend(),
    dtype="float32",
    shapes=((1, 8, 8, 8),),
)

# Heaps are small: the suite's payloads are, and eight devices share one machine.
_WORKSPACE_BYTES = 8 << 20


class Implementation:
    """One implementation under test.

    Attributes:
      name: what tests pass as ``implementation=``.
      needs_peers: whether it works only on a mesh given to ``initialize``.
    """

    def __init__(self, name: str):
        self.name = name
        self.needs_peers = name in ("host", "cuda")
        self._mesh = None

    def on(self, world) -> str:
        """Makes the implementation ready on a world's mesh; returns its name."""
        key = (world.mesh, world.axes)
        if self.needs_peers and key != self._mesh:
            self.close()
            jax_ulysses.initialize(world.mesh, world.axes, _WORKSPACE_BYTES)
            self._mesh = key
        return self.name

    def close(self) -> None:
        """Ends what ``on`` began."""
        if self._mesh is not None:
            self._mesh = None
            jax_ulysses.finalize()

    def assert_took(self, *operators: str) -> None:
        """Asserts that the latest trace of each operator took this implementation."""
        taken = jax_ulysses.taken_implementations()
        for operator in operators:
            assert taken[operator]["implementation"] == self.name, taken[operator]


def _names() -> list[str]:
    names = ["xla"]
    # Present means wired, not working: a host that cannot run must fail the suite.
    if hasattr(jax_ulysses, "initialize") and _host_is_wired():
        names.append("host")
    for name in ("pallas", "cuda"):
        try:
            dispatch._BACKENDS[name].check(_PROBE)
        except NotImplementedError:
            continue
        names.append(name)
    return names


def _host_is_wired() -> bool:
    return hasattr(dispatch._BACKENDS["host"], "scatter")


NAMES = _names()


@pytest.fixture(params=NAMES)
def implementation(request):
    """Each implementation that can run here, one after the other."""
    impl = Implementation(request.param)
    yield impl
    impl.close()
