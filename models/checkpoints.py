# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a run, written by Orbax.

A checkpoint holds global arrays, so it can be read on another mesh than the one that
wrote it.
"""

import logging
import pathlib
from typing import Any

import jax
import numpy as np

from .config import ConfigError
from .processes import Processes
from .trainer import Trainer

# Two, so that the newest good one survives if writing the next is cut short.
_KEPT = 2


class Checkpoints:
    """The checkpoints below one folder.

    All state is replicated, so with several processes the first one writes what it
    holds, and every one reads all of it.

    Args:
      folder: Where they live; made on first use.
      processes: Those that train together.
    """

    def __init__(self, folder: pathlib.Path, processes: Processes):
        # Orbax takes seconds to import; wrong settings should not wait for it.
        import orbax.checkpoint as ocp

        logging.getLogger("absl").setLevel(logging.WARNING)
        self._ocp = ocp
        self._folder = folder
        self._processes = processes
        self._saves = 0
        if processes.main:
            folder.mkdir(parents=True, exist_ok=True)
        processes.wait("folder of checkpoints")
        options: dict[str, Any] = {}
        if processes.count > 1:
            # To Orbax each process is the only one: by default it would meet the others
            # in a collective of XLA.
            options["multiprocessing_options"] = ocp.options.MultiprocessingOptions(
                primary_host=processes.index,
                active_processes={processes.index},
                barrier_sync_key_prefix=f"process_{processes.index}",
            )
        self._manager = ocp.CheckpointManager(
            folder.resolve(),
            options=ocp.CheckpointManagerOptions(
                max_to_keep=_KEPT,
                create=False,
                read_only=not processes.main,
                # The training step donates its state: a writer in the background
                # could read memory that the next step already overwrites.
                enable_async_checkpointing=False,
                **options,
            ),
        )

    def latest(self) -> int | None:
        """Returns how many steps the newest checkpoint has seen, or None."""
        return self._manager.latest_step()

    def save(self, steps_done: int, state) -> None:
        """Writes `state` unless that step is already there; returns when it is safe."""
        several = self._processes.count > 1
        if self._processes.main and self.latest() != steps_done:
            if several:
                state = jax.device_get(state)
            self._manager.save(steps_done, args=self._ocp.args.StandardSave(state))
            self._manager.wait_until_finished()
        # Who went on would wait in the next exchange, which has a deadline.
        self._saves += 1
        self._processes.wait(f"checkpoint {self._saves}")

    def restore(self, steps_done: int, trainer: Trainer):
        """Reads a checkpoint into a state of `trainer`.

        Args:
          steps_done: Which checkpoint.
          trainer: Says which shapes to expect, and on which mesh.

        Raises:
          ConfigError: If it cannot be read as such a state.
        """
        wanted = trainer.abstract_state()
        several = self._processes.count > 1
        if several:
            wanted = jax.tree.map(lambda s: np.empty(s.shape, s.dtype), wanted)
        try:
            state = self._manager.restore(
                steps_done, args=self._ocp.args.StandardRestore(wanted)
            )
        except (ValueError, KeyError, OSError) as error:
            first_line = str(error).partition("\n")[0]
            raise ConfigError(
                f"cannot read the checkpoint of step {steps_done} in {self._folder}: "
                f"{first_line}"
            ) from error
        if several:
            return trainer.put_state(state)
        # The next step donates the state. Orbax may hand out memory that NumPy owns,
        # which must not be given away; a copy belongs to JAX.
        return jax.tree.map(lambda array: array.copy(), state)

    def close(self) -> None:
        """Releases Orbax's threads."""
        self._manager.close()


def has_checkpoint(folder: pathlib.Path) -> bool:
    """Returns whether `folder` holds a finished checkpoint, without importing Orbax."""
    return folder.is_dir() and any(
        child.name.isdigit() and child.is_dir() for child in folder.iterdir()
    )
