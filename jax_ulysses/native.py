# SPDX-License-Identifier: Apache-2.0
"""The implementations behind XLA FFI targets: ``host``, and later ``cuda``.

Both run the same targets with the same attributes; only the platform differs.
"""

from typing import Any

from jax_ulysses import group
from jax_ulysses._typing import Array
from jax_ulysses.spec import GEMM_DTYPES, HeadExchange, Request, TokenOrder


class _Native:
    """Calls the FFI targets for one platform.

    Attributes:
      name: of the implementation.
      platform: lower-case platform of the devices it runs on.
    """

    def __init__(self, name: str, platform: str):
        self.name = name
        self.platform = platform

    def check(self, request: Request) -> None:
        """Raises NotImplementedError unless a group here can run ``request``."""
        if request.platform != self.platform:
            raise NotImplementedError(
                f"runs on {self.platform} devices, not on {request.platform}"
            )
        found = group.find(request.exchange.axis_name)
        reason = found.report.unavailable.get(self.name)
        if reason is not None:
            raise NotImplementedError(reason)
        if request.dataflow in ("gemm_a2a", "a2a_gemm") and (
            request.dtype not in GEMM_DTYPES
        ):
            raise NotImplementedError(f"multiplies {GEMM_DTYPES}, not {request.dtype}")

    def scatter(self, ex: HeadExchange, parts: tuple[Array, ...]):
        """See ``reference.scatter``."""
        targets = _targets()
        return targets.exchange(parts, direction=targets.SCATTER, **_routing(ex))

    def gather(self, ex: HeadExchange, parts: tuple[Array, ...], *, sum_replicas=True):
        """See ``reference.gather``."""
        targets = _targets()
        return targets.exchange(
            parts, direction=targets.GATHER, sum_replicas=sum_replicas, **_routing(ex)
        )

    def gemm_a2a(self, ex: HeadExchange, x, w, bias, *, w_transposed: bool):
        """See ``reference.gemm_a2a``."""
        return _targets().gemm_a2a(
            x, w, bias, head_dim=ex.head_dim, w_transposed=w_transposed, **_routing(ex)
        )

    def a2a_gemm(self, ex: HeadExchange, parts, w, bias, *, w_transposed: bool):
        """See ``reference.a2a_gemm``."""
        return _targets().a2a_gemm(
            parts, w, bias, w_transposed=w_transposed, **_routing(ex)
        )


def _routing(ex: HeadExchange) -> dict[str, Any]:
    return {
        "group": group.find(ex.axis_name).session,
        "heads": ex.heads,
        "num_ranks": ex.num_ranks,
        "token_order": int(ex.token_order is TokenOrder.ZIGZAG),
    }


def _targets():
    # Imported late, so that the package works without its extension module.
    from jax_ulysses.ffi import targets

    return targets


# The fused protocol on CPU threads. For tests and teaching, never a default.
host = _Native("host", "cpu")
