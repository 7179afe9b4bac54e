# SPDX-License-Identifier: Apache-2.0
"""What is installed, what is here, what would run and why: ``jax_ulysses doctor``."""

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import pathlib
import platform
import sys
from typing import Any

import jax

from jax_ulysses.doctor_plan import geometries, plan
from jax_ulysses.report import describe
from jax_ulysses.selftest import local_group, self_test

PACKAGES = ("jax-ulysses", "jax", "jaxlib", "jax-cuda13-plugin", "flax", "numpy")
# With no accelerator, virtual devices let the self-test exchange something.
VIRTUAL_CPU_DEVICES = 8


def run(args: argparse.Namespace) -> tuple[str, int]:
    """Makes the report.

    Args:
      args: parsed command line, see ``jax_ulysses.__main__``.

    Returns:
      The text to print, and the exit status: 0, or 1 if a self-test failed.

    Raises:
      ValueError: a geometry that does not exist or does not fit.
    """
    if args.geometry == "list":
        return json.dumps(geometries(), indent=2), 0
    with contextlib.suppress(RuntimeError):  # The backends run already: keep them.
        jax.config.update("jax_num_cpu_devices", VIRTUAL_CPU_DEVICES)
    report: dict[str, Any] = {
        "versions": versions(),
        "devices": devices(),
        "built": built(),
        "plan": plan(args),
        "self_test": [] if args.no_self_test else self_test(),
    }
    text = json.dumps(report, indent=2) if args.json else as_text(report)
    return text, int(any(row["error"] for row in report["self_test"]))


def versions() -> dict[str, str | None]:
    """Installed versions of the packages that matter, None if absent."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def devices() -> dict[str, Any]:
    """The devices JAX sees, and whether they are peers of one process."""
    found = jax.devices()
    peers, heap = _peers(found)
    return {
        "platform": found[0].platform,
        "kind": found[0].device_kind,
        "count": len(found),
        "processes": jax.process_count(),
        "in_this_process": len(jax.local_devices()),
        "peers": peers,
        "heap": heap,
    }


def _peers(found) -> tuple[str, str | None]:
    """Whether the devices of this process can form a peer group; its heap, or None."""
    with local_group(len(jax.local_devices())) as (_, report):
        if report is None:
            return "not examined: this process has peer groups already", None
        name = "host" if found[0].platform == "cpu" else "cuda"
        reason = report.unavailable.get(name)
    if reason:
        return f"no group for {name}: {reason}", None
    return f"ready for {name}", describe(report)


def built() -> dict[str, Any]:
    """What the extension module contains, or why there is none."""
    try:
        from jax_ulysses.ffi import targets
    except ImportError as error:
        return {"extension": None, "reason": _shadowed() or str(error)}
    return {"extension": True, **targets.build_info()}


def _shadowed() -> str | None:
    """Why nothing is built, if this package is the source folder of a clone."""
    folder = pathlib.Path(__file__).parent
    if importlib.util.find_spec("jax_ulysses.ffi") is not None:
        return None
    if not (folder.parent / "pyproject.toml").is_file():
        return None
    return (
        "the source folder jax_ulysses/ shadows the installed package: run from "
        f"another folder than {folder.parent}, or install with pip install -e ."
    )


def as_text(report: dict[str, Any]) -> str:
    """The report for people."""
    lines = ["versions"]
    lines += [f"  {n:<20}{v or 'not installed'}" for n, v in report["versions"].items()]
    for section in ("devices", "built"):
        lines += [section]
        lines += [f"  {name:<20}{value}" for name, value in report[section].items()]
    if report["plan"] is None:
        lines += ["plan", "  name a geometry (--geometry, or --heads ...) to see one"]
    else:
        lines += _plan_text(report["plan"])
    lines += ["self-test"]
    for row in report["self_test"]:
        verdict = f"FAILED: {row['error']}" if row["error"] else f"ok, {row['detail']}"
        lines += [f"  {row['implementation']:<8}{row['check']:<42}{verdict}"]
    if not report["self_test"]:
        lines += ["  not run"]
    return "\n".join(lines)


def _plan_text(plan: dict[str, Any]) -> list[str]:
    numbers = " ".join(f"{letter}={plan[letter]}" for letter in "BSNKHDP")
    lines = [
        f"plan for {plan['geometry'] or 'this geometry'}: {numbers} {plan['dtype']}"
    ]
    for operator, entry in plan["operators"].items():
        lines += [f"  {operator:<24}{entry['implementation']}"]
        lines += [f"    not {name}: {why}" for name, why in entry["not"].items()]
    return lines


if __name__ == "__main__":
    from jax_ulysses.__main__ import main

    sys.exit(main(["doctor", *sys.argv[1:]]))
