# SPDX-License-Identifier: Apache-2.0
"""Chooses which implementation runs an operator, and says why.

``ValueError`` means the arguments are wrong; ``NotImplementedError`` means one
implementation cannot do this call. Nothing falls back silently: the first time
an operator runs, one log line on the logger ``jax_ulysses`` says which
implementation was taken and why the better ones were not.
"""

import logging
from collections.abc import Sequence
from typing import Any, Literal, Protocol, cast, get_args

from jax_ulysses import mosaic, mosaic_remote, native, reference
from jax_ulysses.config import config
from jax_ulysses.spec import Request

type ImplementationName = Literal["cuda", "pallas", "xla", "host", "pallas_remote"]
type Implementation = ImplementationName | Sequence[ImplementationName] | None

_logger = logging.getLogger("jax_ulysses")


class Backend(Protocol):
    """One implementation: an acceptance check and the dataflows."""

    def check(self, request: Request) -> None:
        """Raises NotImplementedError with the reason if it cannot run ``request``."""

    def scatter(self, ex, parts):
        """Sequence shards to head shards; see ``reference.scatter``."""

    def gather(self, ex, parts, *, sum_replicas=True):
        """Head shards to sequence shards; see ``reference.gather``."""

    def gemm_a2a(self, ex, x, w, bias, *, w_transposed):
        """Projection, then scatter; see ``reference.gemm_a2a``."""

    def a2a_gemm(self, ex, parts, w, bias, *, w_transposed, want_gathered=True):
        """Gather, then projection; see ``reference.a2a_gemm``."""


# None tries _DEFAULT. "pallas" is not in it until it has been faster than "xla" on
# several GPUs: alone it is, but it does an all-to-all a segment where "xla" does one.
# "host" is for tests, "pallas_remote" has never run.
_BACKENDS: dict[str, Any] = {
    "cuda": native.cuda,
    "pallas": mosaic,
    "xla": reference,
    "host": native.host,
    "pallas_remote": mosaic_remote,
}
_DEFAULT = ("cuda", "xla")
assert tuple(_BACKENDS) == get_args(ImplementationName.__value__)

_taken: dict[str, dict[str, Any]] = {}


def available_implementations() -> tuple[str, ...]:
    """Names that ``implementation`` accepts; None takes "cuda" or "xla"."""
    return tuple(_BACKENDS)


def normalise(
    implementation: str | Sequence[str] | None,
) -> tuple[ImplementationName, ...] | None:
    """Checks an ``implementation`` argument and makes it hashable.

    Raises:
      ValueError: unknown name, or an empty sequence.
    """
    if implementation is None:
        return None
    names = (
        (implementation,) if isinstance(implementation, str) else tuple(implementation)
    )
    unknown = [n for n in names if n not in _BACKENDS]
    if unknown or not names:
        raise ValueError(
            f"implementation={implementation!r}: expected None, one of "
            f"{list(_BACKENDS)}, or a non-empty sequence of them."
        )
    return cast(tuple[ImplementationName, ...], names)


def explain(request: Request) -> dict[str, str | None]:
    """For every implementation, the reason why it cannot run ``request``, or None."""
    reasons: dict[str, str | None] = {}
    for name, backend in _BACKENDS.items():
        try:
            backend.check(request)
            reasons[name] = None
        except NotImplementedError as error:
            reasons[name] = str(error)
    return reasons


def select(
    request: Request, implementation: tuple[str, ...] | None
) -> tuple[str, dict[str, str]]:
    """Picks the first implementation that accepts a request.

    Args:
      request: the call.
      implementation: normalised argument; None stands for the configured default
        or, without one, for "cuda", then "xla".

    Returns:
      The name, and for each one passed over its reason.

    Raises:
      NotImplementedError: the only implementation named refuses.
      ExceptionGroup: all of several refuse; holds every reason.
    """
    names = implementation or normalise(config.implementation) or _DEFAULT
    refusals: dict[str, NotImplementedError] = {}
    for name in names:
        try:
            _BACKENDS[name].check(request)
        except NotImplementedError as error:
            refusals[name] = NotImplementedError(
                f"{request.operator}: implementation {name!r}: {error}"
            )
            refusals[name].__cause__ = error
            continue
        return name, {n: str(e.__cause__) for n, e in refusals.items()}
    if len(names) == 1:
        raise refusals[names[0]]
    raise ExceptionGroup(
        f"{request.operator}: no implementation in {list(names)} can run this call",
        list(refusals.values()),
    )


def run(request: Request, implementation: tuple[str, ...] | None, *args, **kwargs):
    """Runs the dataflow of ``request`` on the implementation that is selected."""
    name, refusals = select(request, implementation)
    _note(request, name, implementation, refusals)
    return getattr(_BACKENDS[name], request.dataflow)(request.exchange, *args, **kwargs)


def taken_implementations() -> dict[str, dict[str, Any]]:
    """What was taken so far in this process, by operator.

    Returns:
      Operator name -> {"implementation": name, "reason": text, "passed_over":
      {name: reason}}, as of the operator's latest trace.
    """
    return {operator: dict(entry) for operator, entry in _taken.items()}


def _note(request, name, implementation, refusals) -> None:
    if implementation is not None and len(implementation) == 1:
        reason = f"asked for by implementation={name!r}"
    elif refusals:
        reason = f"first of {[*refusals, name]} that can run this call"
    else:
        reason = "first choice"
    entry = {"implementation": name, "reason": reason, "passed_over": refusals}
    if _taken.get(request.operator) == entry:
        return
    _taken[request.operator] = entry
    passed = "; ".join(f"not {n}: {why}" for n, why in refusals.items())
    _logger.info(
        "%s runs on %s (%s)%s",
        request.operator,
        name,
        reason,
        f"; {passed}" * bool(passed),
    )
