# SPDX-License-Identifier: Apache-2.0
"""The summary of a finished run."""

import hashlib
import json
import math
from typing import Any

import jax
import numpy as np

import jax_ulysses

from .cli import Options
from .report import StepRecord
from .trainer import Trainer


def run_summary(
    options: Options, trainer: Trainer, records: list[StepRecord], state
) -> dict[str, Any]:
    """Returns what the last line says of a run, but for the comparison."""
    config = options.config
    # Without any (a finished run whose file is lost, resumed) nothing is known.
    losses = [record.loss for record in records] or [math.nan]
    first, last = losses[0], losses[-1]
    return {
        "preset": config.preset,
        "parameters": sum(p.size for p in jax.tree.leaves(state["params"])),
        "devices": trainer.mesh.size,
        "platform": jax.devices()[0].platform,
        "mesh": dict(trainer.mesh.shape),
        "token_order": config.token_order.value,
        "dtype": config.dtype,
        "processes": jax.process_count(),
        "implementation": jax_ulysses.taken_implementations(),
        "steps": config.steps,
        "first_loss": round(first, 4),
        "last_loss": round(last, 4),
        "loss_fell_by": round(1 - last / first, 4),
        "peak_device_mib": _peak_mib(),
        "out": str(options.out),
    }


def to_json(summary: dict[str, Any]) -> str:
    """Returns a summary as one line of JSON, which has null in place of NaN."""
    return json.dumps(_finite(summary))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _peak_mib() -> int | None:
    """The most that XLA's pool of this process has held so far; None on CPUs."""
    stats = jax.local_devices()[0].memory_stats() or {}
    peak = stats.get("peak_bytes_in_use")
    return None if peak is None else round(peak / 2**20)


def fingerprint(params) -> str:
    """Returns a short hash of all bits of the parameters."""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(params):
        digest.update(np.ascontiguousarray(leaf).tobytes())
    return digest.hexdigest()[:16]
