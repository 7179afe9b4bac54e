# SPDX-License-Identifier: Apache-2.0
"""Process-wide settings: environment variables, and a context manager over them."""

import contextlib
import dataclasses
import math
import os
from collections.abc import Generator, Sequence

# Values of ``Config.reductions``.
REDUCTIONS = ("auto", "xla", "heap")


@dataclasses.dataclass
class Config:
    """Settings that a user may change at run time.

    Attributes:
      implementation: what ``implementation=None`` stands for, a name or a sequence
        of names; None takes the best that can run. One name in
        ``JAX_ULYSSES_IMPLEMENTATION``. Read when a program is traced.
      deadline_s: longest wait of one rank for another, in seconds, before the call
        ends with an error that names who was missing; 0 waits for ever. Read by
        ``initialize``. ``JAX_ULYSSES_DEADLINE_S``.
      collective_calls: tell XLA that each CUDA call is a collective, so that it
        runs none of its own beside it. Without, the two can deadlock: one rank's
        GPU full of the call, another's of XLA's collective. ``0`` in
        ``JAX_ULYSSES_COLLECTIVE_CALLS`` turns it off. Read when a program is traced.
      reductions: how gradients of replicated weights, and ``jax_ulysses.psum``, are
        summed over ranks: "xla" by XLA's collectives; "heap" by the library's own
        kernel over the peer group's heap; "auto" takes the heap where several ranks
        share one GPU, which XLA's collectives refuse, and XLA elsewhere.
        ``JAX_ULYSSES_REDUCTIONS``. Read when a program is traced.
      comm_ctas: multiprocessors of which a spare warp communicates in a fused CUDA
        call; 0 takes as many as an NVLink needs. For tuning. Read by ``initialize``.
    """

    implementation: str | Sequence[str] | None = None
    deadline_s: float = 30.0
    collective_calls: bool = True
    reductions: str = "auto"
    comm_ctas: int = 0

    def __post_init__(self):
        deadline = self.deadline_s
        if not (isinstance(deadline, int | float) and 0 <= deadline < math.inf):
            raise ValueError(
                f"deadline_s={deadline!r} must be a number of seconds, 0 or more and "
                "finite."
            )
        if self.reductions not in REDUCTIONS:
            raise ValueError(
                f"reductions={self.reductions!r} must be one of {REDUCTIONS}."
            )
        if not (isinstance(self.comm_ctas, int) and self.comm_ctas >= 0):
            raise ValueError(f"comm_ctas={self.comm_ctas!r} must be 0 or more.")


def _from_environment() -> Config:
    text = os.environ.get("JAX_ULYSSES_DEADLINE_S", "30")
    try:
        deadline_s = float(text)
    except ValueError:
        raise ValueError(
            f"JAX_ULYSSES_DEADLINE_S={text!r} is not a number of seconds."
        ) from None
    collective = os.environ.get("JAX_ULYSSES_COLLECTIVE_CALLS", "1")
    if collective not in ("0", "1"):
        raise ValueError(f"JAX_ULYSSES_COLLECTIVE_CALLS={collective!r} must be 0 or 1.")
    try:
        return Config(
            implementation=os.environ.get("JAX_ULYSSES_IMPLEMENTATION") or None,
            deadline_s=deadline_s,
            collective_calls=collective == "1",
            reductions=os.environ.get("JAX_ULYSSES_REDUCTIONS", "auto"),
        )
    except ValueError as error:
        raise ValueError(f"in the environment, as JAX_ULYSSES_*: {error}") from None


config = _from_environment()


@contextlib.contextmanager
def settings(**overrides) -> Generator[Config]:
    """Changes settings inside a ``with`` block.

    Args:
      **overrides: fields of ``Config``.

    Yields:
      The settings in force.

    Raises:
      TypeError: unknown field.
      ValueError: a value that cannot be. An unknown implementation raises where it is
        asked for.
    """
    before = dataclasses.replace(config)
    dataclasses.replace(config, **overrides)  # Raises.
    for name, value in overrides.items():
        setattr(config, name, value)
    try:
        yield config
    finally:
        for field in dataclasses.fields(Config):
            setattr(config, field.name, getattr(before, field.name))
