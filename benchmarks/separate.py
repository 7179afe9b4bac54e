# SPDX-License-Identifier: Apache-2.0
"""Implementations to compare with, which no user would choose."""

import dataclasses

from jax_ulysses import dispatch, reference


class Separate:
    """XLA's dot, and the exchange kernel of a native implementation beside it.

    Args:
      native: ``cuda``, or ``host`` on CPUs.
    """

    def __init__(self, native):
        self._native = native
        self.scatter, self.gather = native.scatter, native.gather

    def check(self, request) -> None:
        """Raises NotImplementedError where the exchange alone cannot run."""
        exchange = {"gemm_a2a": "scatter", "a2a_gemm": "gather"}
        dataflow = exchange.get(request.dataflow, request.dataflow)
        self._native.check(dataclasses.replace(request, dataflow=dataflow))

    def gemm_a2a(self, ex, x, w, bias, *, w_transposed):
        """See ``reference.gemm_a2a``."""
        y = reference.project(x, w, bias, w_transposed=w_transposed)
        return self.scatter(ex, reference._columns_to_segments(ex, y))

    def a2a_gemm(self, ex, parts, w, bias, *, w_transposed, want_gathered=True):
        """See ``reference.a2a_gemm``."""
        del want_gathered
        gathered = reference.join_segments(self.gather(ex, parts))
        y = reference.project(gathered, w, bias, w_transposed=w_transposed)
        return y, gathered


def register(native: str) -> None:
    """Makes ``implementation="separate"`` known, on top of ``native``."""
    dispatch._BACKENDS["separate"] = Separate(dispatch._BACKENDS[native])
