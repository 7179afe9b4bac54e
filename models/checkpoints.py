# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a run, written by Orbax.

A checkpoint holds global arrays, so it can be read on another mesh than the one that
wrote it.
"""

import logging
import pathlib
import shutil
from typing import Any

import jax
import numpy as np
from jax._src import distributed

from .config import ConfigError
from .processes import Processes
from .report import say
from .trainer import Trainer

# Two, so that the newest good one survives if writing the next is cut short.
_KEPT = 2
_CHOSEN_KEY = "jax_ulysses/models/restored_checkpoint"
# The first process may try them all, on a slow disk.
_WAIT_S = 1800
# Characters of a message by Orbax, which may quote a whole description of an array.
_SHOWN = 200


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
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                # Such as a full disk, or a file system that cannot be asked before.
                raise ConfigError(f"{folder} cannot be made: {error}") from error
        processes.wait("folder of checkpoints")
        meeting = ocp.options.MultiprocessingOptions()
        if processes.count > 1:
            # To Orbax each process is the only one: by default it would meet the others
            # in a collective of XLA.
            meeting = ocp.options.MultiprocessingOptions(
                primary_host=processes.index,
                active_processes={processes.index},
                barrier_sync_key_prefix=f"process_{processes.index}",
            )
        self._manager = ocp.CheckpointManager(
            folder.resolve(),
            # Else Orbax guesses from the first checkpoint that it reads, which may be
            # damaged.
            item_handlers=ocp.StandardCheckpointHandler(
                multiprocessing_options=meeting
            ),
            options=ocp.CheckpointManagerOptions(
                max_to_keep=_KEPT,
                create=False,
                read_only=not processes.main,
                # The training step donates its state: a writer in the background
                # could read memory that the next step already overwrites.
                enable_async_checkpointing=False,
                multiprocessing_options=meeting,
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

    def restore_newest(self, trainer: Trainer) -> tuple[int, Any]:
        """Reads the newest checkpoint that the first process can read.

        Newer ones are set aside with a warning. In their place they would count as
        written when the run comes to their step again.

        Args:
          trainer: Says which shapes to expect, and on which mesh.

        Returns:
          How many steps it has seen, and a state of `trainer`.

        Raises:
          ConfigError: If none can be read as such a state; it says why the newest
            cannot.
        """
        if not self._processes.main:
            steps_done = self._agree(None)
            return steps_done, self._place(self._read(steps_done, trainer), trainer)
        damaged: dict[int, ConfigError] = {}
        steps = sorted(self._manager.all_steps(), reverse=True) or [0]
        for steps_done in steps:
            try:
                state = self._read(steps_done, trainer)
                break
            except ConfigError as error:
                damaged[steps_done] = error
        else:
            # The others fail at it, too, and need not wait.
            self._agree(steps[0])
            raise damaged[steps[0]]
        self._agree(steps_done)
        for step, error in damaged.items():
            aside = self._set_aside(step)
            say(f"warning: step {steps_done} is used, {error} (now {aside.name})")
        return steps_done, self._place(state, trainer)

    def _agree(self, steps_done: int | None) -> int:
        """Returns what the first process passes; from the others it takes None."""
        client: Any = distributed.global_state.client
        if self._processes.count > 1:
            if self._processes.main:
                client.key_value_set(_CHOSEN_KEY, str(steps_done))
            else:
                steps_done = int(
                    client.blocking_key_value_get(_CHOSEN_KEY, _WAIT_S * 1000)
                )
        assert steps_done is not None
        return steps_done

    def _set_aside(self, steps_done: int) -> pathlib.Path:
        """Renames a checkpoint, so that Orbax no longer sees it."""
        aside = self._folder / f"{steps_done}.damaged"
        shutil.rmtree(aside, ignore_errors=True)
        (self._folder / str(steps_done)).rename(aside)
        self._manager.reload()
        return aside

    def _read(self, steps_done: int, trainer: Trainer):
        wanted = trainer.abstract_state()
        if self._processes.count > 1:
            wanted = jax.tree.map(lambda s: np.empty(s.shape, s.dtype), wanted)
        try:
            return self._manager.restore(
                steps_done, args=self._ocp.args.StandardRestore(wanted)
            )
        # Orbax raises a bare Exception for some kinds of damage.
        except Exception as error:
            first_line = str(error).partition("\n")[0][:_SHOWN]
            raise ConfigError(
                f"cannot read the checkpoint of step {steps_done} in {self._folder}: "
                f"{first_line}"
            ) from error

    def _place(self, state, trainer: Trainer):
        if self._processes.count > 1:
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
