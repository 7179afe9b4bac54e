# SPDX-License-Identifier: Apache-2.0
"""The command line of the training program: flags, defaults, one-line errors."""

import argparse
import dataclasses
import os
import pathlib
import time
from typing import Any

from jax_ulysses import TokenOrder, available_implementations
from jax_ulysses.config import REDUCTIONS

from .checkpoints import has_checkpoint
from .config import ATTENTION, ConfigError, TrainConfig, check
from .presets import get_preset, preset_names

_DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """A checked command line.

    Attributes:
      config: The run's settings; its fingerprint is not known yet.
      out: Folder for everything the run leaves behind.
      saved: Settings of the run to resume, or None for a new run.
      parity: Whether to repeat the run with cp = 1.
    """

    config: TrainConfig
    out: pathlib.Path
    saved: TrainConfig | None
    parity: bool

    @property
    def checkpoints(self) -> pathlib.Path:
        """Folder of the checkpoints."""
        return self.out / "checkpoints"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        # argparse would print the usage first; one line is easier to find.
        raise ConfigError(f"{message} (--help lists the options)")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m jax_ulysses.models.train",
        description="Trains a byte-level transformer with Ulysses context parallelism. "
        "Without GPUs it runs on dp x cp virtual CPU devices.",
    )
    add = parser.add_argument
    add("--preset", help=f"model size: {', '.join(preset_names())} (tiny)")
    add("--dp", type=int, help="data-parallel ranks (2; of several processes, 1)")
    add("--cp", type=int, help="context-parallel ranks (4, or all processes)")
    add("--seq-len", type=int, help="tokens in a sequence (from the preset)")
    add("--batch", type=int, help="sequences in a global batch (from the preset)")
    add("--steps", type=int, help="optimizer steps of the run (from the preset)")
    add("--lr", type=float, help="peak learning rate (from the preset)")
    add("--seed", type=int, help="seed of parameters and batches (0)")
    add("--dtype", choices=("fp32", "bf16"), help="compute type (fp32)")
    add("--data", metavar="PATH", help="text: a file or folder (Python's library)")
    add(
        "--implementation",
        choices=available_implementations(),
        help="of the operators (the best that can)",
    )
    add(
        "--token-order",
        choices=[order.value for order in TokenOrder],
        help="which tokens a rank holds (contiguous)",
    )
    add("--reductions", choices=REDUCTIONS, help="who sums gradients (auto)")
    add("--attention", choices=ATTENTION, help="local attention (xla)")
    add("--checkpoint-every", type=int, metavar="STEPS", help="(50)")
    add(
        "--out",
        type=pathlib.Path,
        metavar="DIR",
        help="folder for checkpoints, metrics.jsonl and loss.png (a new one in out/)",
    )
    add("--resume", action="store_true", help="continue the run in --out")
    add(
        "--no-parity",
        dest="parity",
        action="store_false",
        help="skip the second run with cp = 1 that checks the first",
    )
    return parser


def parse(argv: list[str] | None, processes: int = 1) -> Options:
    """Reads and checks the command line.

    When resuming, what is not given is as it was. Otherwise the preset decides.

    Args:
      argv: Arguments; None for those of the process.
      processes: How many processes train together.

    Raises:
      ConfigError: If the run cannot start as asked.
    """
    args = _parser().parse_args(argv)
    saved = None
    if args.resume:
        if args.out is None:
            raise ConfigError("--resume needs --out, the folder of the run to continue")
        if not has_checkpoint(args.out / "checkpoints"):
            raise ConfigError(f"--resume: there is no checkpoint in {args.out}")
        saved = TrainConfig.from_file(args.out / "config.json")
    elif args.out is not None and has_checkpoint(args.out / "checkpoints"):
        raise ConfigError(
            f"{args.out} holds a run already: add --resume, or choose another --out"
        )
    try:
        name = args.preset or (saved.preset if saved else "tiny")
        preset = get_preset(name)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    base = saved
    if base is None or base.preset != name:
        base = TrainConfig(
            preset=name,
            model=preset.model,
            dp=2 if processes == 1 else 1,
            cp=4 if processes == 1 else processes,
            seq_len=preset.seq_len,
            batch=preset.batch,
            steps=preset.steps,
            lr=preset.lr,
            seed=0,
            dtype="fp32",
            token_order=TokenOrder.CONTIGUOUS,
            implementation=None,
            checkpoint_every=50,
        )
    given: dict[str, Any] = {
        key: value
        for key, value in vars(args).items()
        if value is not None and key not in ("out", "resume", "parity")
    }
    if "token_order" in given:
        given["token_order"] = TokenOrder(given["token_order"])
    config = dataclasses.replace(base, **given, fingerprint="")
    check(config)
    out = args.out or _new_folder(name)
    # Made only when the run can start, or one that cannot would leave a folder.
    nearest = next(path for path in (out, *out.absolute().parents) if path.exists())
    if not nearest.is_dir():
        raise ConfigError(f"--out {out}: {nearest} is a file; it must be a folder")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError(f"--out {out}: {nearest} cannot be written to")
    return Options(config=config, out=out, saved=saved, parity=args.parity)


def _new_folder(preset: str) -> pathlib.Path:
    stamp = time.strftime("%Y%m%d-%H%M%S")
    return pathlib.Path("out") / f"{preset}-{stamp}-{os.getpid()}"


def provide_virtual_devices(count: int) -> None:
    """Makes the CPU backend of this process show at least `count` devices.

    It must run before JAX starts its backends, and has no effect on GPUs.
    """
    kept = []
    for flag in os.environ.get("XLA_FLAGS", "").split():
        name, _, value = flag.partition("=")
        if name == _DEVICE_COUNT_FLAG:
            count = max(count, int(value))
        else:
            kept.append(flag)
    os.environ["XLA_FLAGS"] = " ".join([*kept, f"{_DEVICE_COUNT_FLAG}={count}"])
