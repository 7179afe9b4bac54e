# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a run, written by Orbax.

A checkpoint holds global arrays, so it can be read on another mesh than the one that
wrote it.
"""

import logging
import pathlib

import jax

from .config import ConfigError

# Two, so that the newest good one survives if writing the next is cut short.
_KEPT = 2


class Checkpoints:
    """The checkpoints below one folder.

    Args:
      folder: Where they live; made on first use.
    """

    def __init__(self, folder: pathlib.Path):
        # Orbax takes seconds to import; wrong settings should not wait for it.
        import orbax.checkpoint as ocp

        logging.getLogger("absl").setLevel(logging.WARNING)
        self._ocp = ocp
        self._folder = folder
        self._manager = ocp.CheckpointManager(
            folder.resolve(),
            options=ocp.CheckpointManagerOptions(
                max_to_keep=_KEPT,
                create=True,
                # The training step donates its state: a writer in the background
                # could read memory that the next step already overwrites.
                enable_async_checkpointing=False,
            ),
        )

    def latest(self) -> int | None:
        """Returns how many steps the newest checkpoint has seen, or None."""
        return self._manager.latest_step()

    def save(self, steps_done: int, state) -> None:
        """Writes `state` unless that step is already there; returns when it is safe."""
        if self.latest() != steps_done:
            self._manager.save(steps_done, args=self._ocp.args.StandardSave(state))
            self._manager.wait_until_finished()

    def restore(self, steps_done: int, abstract_state):
        """Reads a checkpoint into the layout of `abstract_state`.

        Args:
          steps_done: Which checkpoint.
          abstract_state: A tree of `jax.ShapeDtypeStruct` with shardings.

        Raises:
          ConfigError: If it cannot be read as such a state.
        """
        try:
            state = self._manager.restore(
                steps_done, args=self._ocp.args.StandardRestore(abstract_state)
            )
        except (ValueError, KeyError, OSError) as error:
            first_line = str(error).partition("\n")[0]
            raise ConfigError(
                f"cannot read the checkpoint of step {steps_done} in {self._folder}: "
                f"{first_line}"
            ) from error
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
