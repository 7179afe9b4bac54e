# SPDX-License-Identifier: Apache-2.0
"""Command line: ``python -m jax_ulysses doctor``."""

import argparse
import sys


def main(argv: list[str] | None = None) -> int:
    """Runs the command line.

    Args:
      argv: arguments; None for those of the process.

    Returns:
      Exit status: 0 fine, 1 a self-test failed, 2 wrong arguments.
    """
    parser = argparse.ArgumentParser(prog="python -m jax_ulysses")
    commands = parser.add_subparsers(dest="command", required=True)
    doctor = commands.add_parser(
        "doctor", help="versions, devices, what would run and why, and a self-test"
    )
    doctor.add_argument("--json", action="store_true", help="one JSON object")
    doctor.add_argument(
        "--geometry", help="a name from the shape table; 'list' shows it"
    )
    doctor.add_argument("--heads", type=int, help="N")
    doctor.add_argument("--kv-heads", type=int, help="K; default N")
    doctor.add_argument("--head-dim", type=int, help="H; default 128")
    doctor.add_argument("--d-model", type=int, help="D; default N*H")
    doctor.add_argument("--cp", type=int, help="P; default all devices, at most N")
    doctor.add_argument("--seq-len", type=int, default=4096, help="S")
    doctor.add_argument("--batch", type=int, default=1, help="B")
    doctor.add_argument("--dtype", default="bfloat16")
    doctor.add_argument("--no-self-test", action="store_true")
    args = parser.parse_args(argv)

    # Late, so that --help needs no JAX.
    from jax_ulysses.doctor import run

    try:
        text, status = run(args)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(text)
    return status


if __name__ == "__main__":
    sys.exit(main())
