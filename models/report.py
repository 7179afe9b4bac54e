# SPDX-License-Identifier: Apache-2.0
"""What a run leaves behind and shows: metrics.jsonl, loss.png and a progress line."""

import dataclasses
import json
import math
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from .config import ConfigError

# Plain progress lines of a whole run, where there is no terminal to redraw.
_PLAIN_LINES = 15


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepRecord:
    """What one step reports.

    Attributes:
      step: Index of the step, from 0.
      loss: Mean cross-entropy over the global batch, in nats per token.
      grad_norm: Global norm of the gradients before clipping.
      seconds: Wall time of the step.
    """

    step: int
    loss: float
    grad_norm: float
    seconds: float


def say(text: str) -> None:
    """Prints one line for people; standard output is kept for the summary."""
    print(text, file=sys.stderr, flush=True)


def rewrite(path: pathlib.Path, text: str) -> None:
    """Writes a file at once: a full disk or a crash leaves what was there before."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


class Metrics:
    """The records of a run, kept in memory and in a file of JSON lines.

    Args:
      path: The file, or None to keep them in memory only. Records before `first_step`
        stay; later ones are dropped, for a resumed run does those steps again.
      first_step: Index of the first step of this run.
    """

    def __init__(self, path: pathlib.Path | None, first_step: int):
        self.records: list[StepRecord] = []
        self._file = None
        if path is None:
            return
        if first_step and path.exists():
            self.records = [r for r in _read(path) if r.step < first_step]
        rewrite(path, "".join(map(_line, self.records)))
        self._file = path.open("a", encoding="utf-8")

    def add(self, record: StepRecord) -> None:
        """Appends a record."""
        self.records.append(record)
        if self._file is not None:
            self._file.write(_line(record))
            self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()


def _line(record: StepRecord) -> str:
    # JSON has no NaN, which the loss of a run that diverges is.
    values = dataclasses.asdict(record).items()
    return json.dumps({k: v if math.isfinite(v) else None for k, v in values}) + "\n"


def _record(line: str) -> StepRecord:
    values: dict[str, Any] = json.loads(line)
    for name in values:
        if values[name] is None:
            values[name] = math.nan
    return StepRecord(**values)


def _read(path: pathlib.Path) -> list[StepRecord]:
    """Returns the records in a file, without a last one that is cut.

    Raises:
      ConfigError: If another line is no record.
    """
    records = []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    for number, line in enumerate(lines, 1):
        try:
            records.append(_record(line))
        except (ValueError, TypeError) as error:
            if number < len(lines):
                raise ConfigError(f"{path}:{number} is no record: {error}") from error
            # A kill or a full disk may end a run in the middle of a line.
            say(f"warning: {path}:{number} is cut and left out")
    return records


def tokens_per_s(records: Sequence[StepRecord], tokens_per_step: int) -> float | None:
    """Returns the throughput over `records`, or None if there are none."""
    seconds = sum(record.seconds for record in records)
    return len(records) * tokens_per_step / seconds if seconds else None


def plot_loss(
    path: pathlib.Path, records: Sequence[StepRecord], title: str, valid_loss: float
) -> None:
    """Draws the training loss over steps, and the final validation loss."""
    # Figure without pyplot: no display, no global state. Slow to import.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot([r.step for r in records], [r.loss for r in records], label="training")
    axes.axhline(valid_loss, linestyle="--", color="tab:gray", label="validation, end")
    axes.set(xlabel="step", ylabel="loss [nats per byte]", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


class Progress:
    """A live line on a terminal, plain lines elsewhere.

    Args:
      label: What is running.
      steps: Steps of the whole run.
      tokens_per_step: B * S.
    """

    def __init__(self, label: str, steps: int, tokens_per_step: int):
        self._label = label
        self._steps = steps
        self._tokens = tokens_per_step
        self._every = max(1, steps // _PLAIN_LINES)
        self._bar = None

    def __enter__(self):
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                MofNCompleteColumn,
                TextColumn,
                TimeRemainingColumn,
            )
            from rich.progress import Progress as Bar

            self._bar = Bar(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[numbers]}"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
            )
            self._task = self._bar.add_task(
                self._label, total=self._steps, numbers="compiling"
            )
            self._bar.start()
        return self

    def __exit__(self, *_):
        if self._bar is not None:
            self._bar.stop()

    def update(self, record: StepRecord) -> None:
        """Shows a step."""
        done = record.step + 1
        numbers = f"loss {record.loss:.3f}  {self._tokens / record.seconds:,.0f} tok/s"
        if self._bar is not None:
            self._bar.update(self._task, completed=done, numbers=numbers)
        elif done % self._every == 0 or done in (1, self._steps):
            say(f"{self._label} {done}/{self._steps}  {numbers}")
