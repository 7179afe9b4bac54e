# SPDX-License-Identifier: Apache-2.0
"""Trains a byte-level transformer with context parallelism, and checks the result.

``python -m jax_ulysses.models.train --help`` lists the options. The last line on
standard output is a summary in JSON; everything else goes to standard error. Under
``python -m jax_ulysses.launch`` or in a SLURM step all processes train together.
"""

import dataclasses
import pathlib
import sys
import time
from typing import Any

import jax

import jax_ulysses
from jax_ulysses import launch
from jax_ulysses.group import handler_calls
from jax_ulysses.report import describe

from .checkpoints import Checkpoints
from .cli import Options, parse, provide_virtual_devices
from .config import ConfigError, check_resumable
from .data import load_corpus
from .parity import compare, reference
from .processes import Interrupt, Processes
from .report import Metrics, Progress, StepRecord, plot_loss, rewrite, say, tokens_per_s
from .summary import fingerprint, run_summary, to_json
from .trainer import Trainer

# Implementations that exchange through a peer group; others work without one.
_NEED_PEERS = ("cuda", "host")
_EXIT_WRONG_ARGUMENTS = 2
_EXIT_NO_PARITY = 3
_EXIT_INTERRUPTED = 130


def _prepare(
    options: Options, processes: Processes
) -> tuple[Options, Trainer, Checkpoints]:
    """Loads the text, builds and compiles the trainer, opens the checkpoints."""
    config = options.config
    path = None if config.data is None else pathlib.Path(config.data).expanduser()
    corpus = load_corpus(path, config.seq_len, options.out)
    say(
        f"text: {corpus.source}, {corpus.num_files} files, "
        f"{len(corpus.train):,} + {len(corpus.valid):,} bytes; "
        f"{corpus.num_binary} binary files left out"
    )
    processes.agree("fingerprint of the text", corpus.fingerprint)
    config = dataclasses.replace(config, fingerprint=corpus.fingerprint)
    if options.saved is not None:
        corpus.check_unchanged(options.saved, config.seq_len)
        check_resumable(options.saved, config)
    provide_virtual_devices(-(-config.dp * config.cp // processes.count))
    trainer = Trainer(config, corpus)
    groups = _initialize(trainer)
    start = time.perf_counter()
    try:
        _ = trainer.compiled
    except NotImplementedError as error:
        raise ConfigError(
            f"--implementation {config.implementation}: {error}"
        ) from error
    say(
        f"mesh: dp {config.dp} x cp {config.cp} on {jax.devices()[0].platform}; "
        f"compiled in {time.perf_counter() - start:.1f} s"
    )
    for report in groups:
        say(describe(report))
    memory = trainer.step_memory()
    say(
        "a step on one device: "
        + ", ".join(
            f"{size / 2**20:,.0f} MiB of {name}" for name, size in memory.items()
        )
    )
    checkpoints = Checkpoints(options.checkpoints, processes)
    if processes.main:
        # Every process has read the old one: it was here when the folder was made.
        rewrite(options.out / "config.json", config.to_json())
    return dataclasses.replace(options, config=config), trainer, checkpoints


def _initialize(trainer: Trainer) -> list[jax_ulysses.GroupReport]:
    """Makes the peer groups that the run needs."""
    config = trainer.config
    on_cpu = jax.default_backend() == "cpu"
    heap = config.reductions == "heap"
    fused = config.implementation in _NEED_PEERS
    if not (fused or heap or not (config.implementation or on_cpu)):
        return []
    reports = [jax_ulysses.initialize(trainer.mesh, axis_name="cp")]
    # Where ranks share a GPU, nobody else can sum over the data-parallel ranks.
    if config.dp > 1 and (heap or reports[0].ranks_per_device > 1):
        reports.append(jax_ulysses.initialize(trainer.mesh, axis_name="dp"))
    return reports


def _train(options: Options, interrupt: Interrupt, processes: Processes) -> int:
    began = time.perf_counter()
    options, trainer, checkpoints = _prepare(options, processes)
    config = options.config
    first_step = 0
    if options.saved is None:
        state = trainer.init_state()
    else:
        first_step, state = checkpoints.restore_newest(trainer)
        say(f"resumed after step {first_step} from {options.out}")
    start_state = jax.device_get(state) if options.parity else None
    file = options.out / "metrics.jsonl" if processes.main else None
    metrics = Metrics(file, first_step)
    tokens_per_step = config.batch * config.seq_len

    def on_step(record: StepRecord, state) -> bool:
        metrics.add(record)
        progress.update(record)
        done = record.step + 1
        if done % config.checkpoint_every == 0:
            checkpoints.save(done, state)
        return processes.stop_now(record.step, interrupt.requested)

    with Progress("training", config.steps, tokens_per_step) as progress:
        state = trainer.run(state, first_step, on_step)
    metrics.close()
    calls = handler_calls()
    mine = [r for r in metrics.records if r.step >= first_step]
    # There may be none: a finished run that is resumed has nothing left to do.
    done = first_step + len(mine)
    checkpoints.save(done, state)
    checkpoints.close()
    if done < config.steps:
        if processes.main:
            _say_how_to_resume(options, done)
        return _EXIT_INTERRUPTED
    valid_loss = trainer.validate(state["params"])
    final = jax.device_get(state["params"])
    # What follows one process does alone, with XLA.
    jax_ulysses.finalize()
    if not processes.main:
        return 0
    plot_loss(
        options.out / "loss.png",
        metrics.records,
        f"{config.preset}, dp {config.dp} x cp {config.cp}",
        valid_loss,
    )
    summary = run_summary(options, trainer, metrics.records, state) | {
        "valid_loss": round(valid_loss, 4),
        "tokens_per_s": _rounded(tokens_per_s(mine, tokens_per_step)),
        "handler_calls": calls,
        "params_sha256": fingerprint(final),
        "parity": None,
    }
    if options.parity and mine and not interrupt.requested:
        summary["parity"] = _parity(
            trainer, processes, start_state, mine, final, interrupt
        )
    summary["wall_s"] = round(time.perf_counter() - began, 1)
    print(to_json(summary), flush=True)
    if interrupt.requested:
        return _EXIT_INTERRUPTED
    return _EXIT_NO_PARITY if "error" in (summary["parity"] or {}) else 0


def _parity(
    trainer: Trainer,
    processes: Processes,
    state,
    records: list[StepRecord],
    params,
    interrupt: Interrupt,
) -> dict[str, Any] | None:
    """Repeats the run with cp = 1, see `compare`, or says why that cannot be done."""
    config = trainer.config
    tokens_per_step = config.batch * config.seq_len
    try:
        with Progress("parity, cp 1", config.steps, tokens_per_step) as progress:

            def on_step(record: StepRecord) -> bool:
                progress.update(record)
                return interrupt.requested

            plain = reference(trainer, processes)
            return compare(plain, state, records, params, on_step)
    except Exception as error:
        # Such as no memory for whole sequences. The run itself has ended well, and
        # whatever it is, what is known of that run must not be lost.
        reason = f"{type(error).__name__}: {str(error).partition('\n')[0]}"
        say(f"error: parity could not be checked: {reason}")
        return {"error": reason}


def _rounded(value: float | None) -> int | None:
    return None if value is None else round(value)


def _say_how_to_resume(options: Options, done: int) -> None:
    arguments = ["--resume", "--out", str(options.out)]
    # The folder has all other settings.
    if not options.parity:
        arguments += ["--no-parity"]
    command = launch.same_launch("jax_ulysses.models.train", *arguments)
    say(
        f"interrupted: {done} of {options.config.steps} steps are saved in "
        f"{options.out}; continue with\n  {command}"
    )


def main(argv: list[str] | None = None) -> int:
    """Runs the program and returns its exit code."""
    try:
        processes = Processes(*launch.join())
        options = parse(argv, processes.count)
        with Interrupt() as interrupt:
            try:
                return _train(options, interrupt, processes)
            finally:
                jax_ulysses.finalize()
    except ConfigError as error:
        say(f"error: {' '.join(str(error).split())}")
        return _EXIT_WRONG_ARGUMENTS
    except KeyboardInterrupt:
        say("interrupted: the last checkpoint, if any, is intact")
        return _EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
