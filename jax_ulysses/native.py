# SPDX-License-Identifier: Apache-2.0
"""The implementations behind XLA FFI targets: ``host`` now, ``cuda`` with it later.

Both run the same targets with the same attributes; only the platform differs.
"""

from jax_ulysses.spec import Request


class _Host:
    """The fused protocol on CPU threads. For tests and teaching, never a default."""

    def check(self, request: Request) -> None:
        raise NotImplementedError("not wired yet")


host = _Host()
