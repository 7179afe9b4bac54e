# SPDX-License-Identifier: Apache-2.0
"""Does context parallelism change the training? The same run with cp = 1 tells."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from .processes import Processes
from .report import StepRecord
from .trainer import Trainer


def reference(trainer: Trainer, processes: Processes) -> Trainer:
    """The same run with cp = 1, by the implementation that defines correctness."""
    plain = dataclasses.replace(
        trainer.config,
        cp=1,
        # Of several processes one goes on alone, with its own devices.
        dp=trainer.config.dp if processes.count == 1 else 1,
        implementation="xla",
        reductions="xla",
    )
    devices = None if processes.count == 1 else jax.local_devices()
    return Trainer(plain, trainer.corpus, devices)


def compare(
    trainer: Trainer,
    host_state: Any,
    records: Sequence[StepRecord],
    params: Any,
    on_step: Callable[[StepRecord], bool],
) -> dict[str, Any] | None:
    """Repeats a run on `trainer` and measures how far it drifts from the first.

    Both runs add the same numbers in another order, and nothing else may differ. The
    losses show that best. The parameters drift further: where a gradient is nearly
    zero, AdamW divides rounding noise by its own size, so that a step of up to the
    learning rate follows from the last bit of a sum.

    Args:
      trainer: The trainer of the other mesh.
      host_state: The state, as NumPy arrays, before the first of `records`.
      records: What the first run reported.
      params: The first run's final parameters.
      on_step: Called after each step; returns True to give up.

    Returns:
      The largest differences, NaN if either run has any, or None if given up.
    """
    losses: list[float] = []

    def collect(record: StepRecord, _state) -> bool:
        losses.append(record.loss)
        return on_step(record)

    state = trainer.run(trainer.put_state(host_state), records[0].step, collect)
    if len(losses) < len(records):
        return None
    mine = [np.asarray(p, np.float64) for p in jax.tree.leaves(jax.device_get(params))]
    theirs = [
        np.asarray(p, np.float64)
        for p in jax.tree.leaves(jax.device_get(state["params"]))
    ]
    loss_diffs = [abs(r.loss - x) for r, x in zip(records, losses, strict=True)]
    square_error = sum(
        np.square(a - b).sum() for a, b in zip(mine, theirs, strict=True)
    )
    square_norm = sum(np.square(b).sum() for b in theirs)
    return {
        "against": dict(trainer.mesh.shape),
        "steps": len(losses),
        # NumPy's: to Python's max a NaN is larger than nothing, unless it comes first.
        "loss_max_abs_diff": _short(np.max(loss_diffs)),
        "first_loss_abs_diff": _short(loss_diffs[0]),
        "params_max_abs_diff": _short(
            np.max([np.abs(a - b).max() for a, b in zip(mine, theirs, strict=True)])
        ),
        "params_relative_l2_diff": _short(np.sqrt(square_error / square_norm)),
    }


def _short(value: float) -> float:
    """Keeps three digits: more would suggest that they mean something."""
    return float(f"{value:.3g}")
