# SPDX-License-Identifier: Apache-2.0
"""The implementations behind XLA FFI targets: ``host`` and ``cuda``.

Both run the same targets with the same attributes; only the platform differs.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.compute_on import compute_on

from jax_ulysses import group
from jax_ulysses._typing import Array
from jax_ulysses.config import config
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
        if reason is None:
            reason = self._refusal(request, found)
        if reason is not None:
            raise NotImplementedError(reason)

    def _refusal(self, request: Request, found: group.Group) -> str | None:
        if request.dataflow in ("gemm_a2a", "a2a_gemm") and (
            request.dtype not in GEMM_DTYPES
        ):
            return f"multiplies {GEMM_DTYPES}, not {request.dtype}"
        # No gather of replicated heads but the gradient of their scatter.
        sums = request.dataflow == "gather" and max(request.exchange.replicas) > 1
        if sums and request.dtype not in GEMM_DTYPES:
            return f"sums replicated heads of {GEMM_DTYPES}, not {request.dtype}"
        return None

    def _around(self) -> Callable | None:
        """What goes around the FFI call itself."""
        return None

    def _routing(self, ex: HeadExchange) -> dict[str, Any]:
        return {
            "group": group.find(ex.axis_name).session,
            "axis_name": ex.axis_name,
            "heads": ex.heads,
            "num_ranks": ex.num_ranks,
            "token_order": int(ex.token_order is TokenOrder.ZIGZAG),
            "around": self._around(),
        }

    def psum(self, axes: tuple[str, ...], vectors: tuple[Array, ...], **types):
        """Sums over the ranks of the group along ``axes``; see ``reductions.psum``."""
        session = group.find(axes).session
        assert session is not None, "reductions.heap_axes takes groups with a heap"
        return _targets().psum(
            vectors,
            group=session,
            axis_name=axes,
            around=self._around(),
            **types,
        )

    def scatter(self, ex: HeadExchange, parts: tuple[Array, ...]):
        """See ``reference.scatter``."""
        targets = _targets()
        return targets.exchange(parts, direction=targets.SCATTER, **self._routing(ex))

    def gather(self, ex: HeadExchange, parts: tuple[Array, ...], *, sum_replicas=True):
        """See ``reference.gather``."""
        targets = _targets()
        return targets.exchange(
            parts,
            direction=targets.GATHER,
            sum_replicas=sum_replicas,
            **self._routing(ex),
        )

    def gemm_a2a(self, ex: HeadExchange, x, w, bias, *, w_transposed: bool):
        """See ``reference.gemm_a2a``."""
        return _targets().gemm_a2a(
            x,
            w,
            bias,
            head_dim=ex.head_dim,
            w_transposed=w_transposed,
            **self._routing(ex),
        )

    def a2a_gemm(
        self,
        ex: HeadExchange,
        parts,
        w,
        bias,
        *,
        w_transposed: bool,
        want_gathered: bool = True,
    ):
        """See ``reference.a2a_gemm``; g is empty unless ``want_gathered``."""
        return _targets().a2a_gemm(
            parts,
            w,
            bias,
            w_transposed=w_transposed,
            want_gathered=want_gathered,
            **self._routing(ex),
        )


class _Cuda(_Native):
    """The fused kernels. They take all of a GPU and wait for other GPUs."""

    def _refusal(self, request: Request, found: group.Group) -> str | None:
        # Asked of the code that will launch the call, so that the two cannot differ.
        reason = _targets().can_implement(
            slot_bytes=found.plan.slot_bytes,
            num_slots=found.plan.num_slots,
            sm_budget=found.plan.sm_budget,
            **description(request),
        )
        return None if reason is None else str(reason)

    def _around(self) -> Callable | None:
        if not config.collective_calls:
            return None
        # XLA's async collectives must not run beside a kernel that waits for its peers.
        # It recognises a call alone: what prepares the operands stays outside.
        return compute_on(
            compute_type="gpu_stream:collective",
            out_memory_spaces=jax.memory.Space.Device,
        )


def description(request: Request) -> dict[str, Any]:
    """What the native side needs to know about a call to say whether it can be done."""
    ex = request.exchange
    first = request.shapes[0]
    batch, tokens = first[:2]
    if request.dataflow in ("gather", "a2a_gemm"):
        tokens //= ex.num_ranks
    if request.dataflow == "gemm_a2a":
        width = first[2]
    elif request.dataflow == "a2a_gemm":
        width = request.shapes[-1][0 if request.w_transposed else 1]
    else:
        width = 0
    return {
        "dataflow": request.dataflow,
        "heads": list(ex.heads),
        "head_dim": ex.head_dim,
        "num_ranks": ex.num_ranks,
        "token_order": int(ex.token_order is TokenOrder.ZIGZAG),
        "batch": batch,
        "local_tokens": tokens,
        "width": width,
        "dtype": request.dtype,
        "element_bytes": jnp.dtype(request.dtype).itemsize,
        "w_transposed": request.w_transposed,
        "want_gathered": request.want_gathered,
    }


def _targets():
    # Imported late, so that the package works without its extension module.
    from jax_ulysses.ffi import targets

    return targets


# The fused protocol on CPU threads. For tests and teaching, never a default.
host = _Native("host", "cpu")
cuda = _Cuda("cuda", "cuda")
