# SPDX-License-Identifier: Apache-2.0
"""What is installed, what is here, what would run and why: ``jax_ulysses doctor``."""

import argparse
import contextlib
import importlib.metadata
import importlib.resources
import json
import platform
from typing import Any

import jax
import jax.numpy as jnp

from jax_ulysses import dispatch, spec
from jax_ulysses.report import describe
from jax_ulysses.selftest import local_group, self_test
from jax_ulysses.spec import HeadExchange, Request

PACKAGES = ("jax-ulysses", "jax", "jaxlib", "jax-cuda13-plugin", "flax", "numpy")
# With no accelerator, virtual devices let the self-test exchange something.
VIRTUAL_CPU_DEVICES = 8


def geometries() -> dict[str, dict[str, int]]:
    """The named geometries that benchmarks and tests use.

    Returns:
      Name -> {"heads": N, "kv_heads": K, "head_dim": H, "d_model": D}.
    """
    path = importlib.resources.files("jax_ulysses") / "data" / "shapes.json"
    return json.loads(path.read_text())["geometries"]


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
        return {"extension": None, "reason": str(error)}
    return {"extension": True, **targets.build_info()}


def plan(args: argparse.Namespace) -> dict[str, Any] | None:
    """For one geometry and P: per operator, what would run and why nothing better.

    Args:
      args: command line; ``geometry`` or ``heads`` asks for a plan.

    Returns:
      None if no geometry was asked for.

    Raises:
      ValueError: unknown name, or numbers that do not fit together.
    """
    if args.geometry is not None:
        table = geometries()
        if args.geometry not in table:
            raise ValueError(
                f"--geometry {args.geometry!r} is not in the table: {', '.join(table)}."
            )
        shape = table[args.geometry]
        heads, kv_heads = shape["heads"], shape["kv_heads"]
        head_dim, d_model = shape["head_dim"], shape["d_model"]
    elif args.heads is not None:
        heads, kv_heads, head_dim = (
            args.heads,
            args.kv_heads or args.heads,
            args.head_dim,
        )
        d_model = args.d_model or heads * head_dim
    else:
        return None
    num_ranks = args.cp or min(len(jax.devices()), heads)
    spec.check_query_heads(heads, kv_heads, num_ranks)
    spec.check_tokens(
        "--seq-len", args.seq_len, num_ranks, spec.TokenOrder.CONTIGUOUS, local=False
    )
    spec.check_gemm_dtype("--dtype", args.dtype)
    requests = _requests(
        heads,
        kv_heads,
        head_dim,
        d_model,
        num_ranks,
        args.batch,
        args.seq_len,
        args.dtype,
    )
    # As after initialize() on P devices, if there are as many here.
    enough = num_ranks <= len(jax.local_devices())
    operators = {}
    with local_group(num_ranks) if enough else contextlib.nullcontext():
        for request in requests:
            name, _ = dispatch.select(request, None)
            reasons = dispatch.explain(request)
            operators[request.operator] = {
                "implementation": name,
                "not": {n: why for n, why in reasons.items() if why is not None},
            }
    return {
        "geometry": args.geometry,
        "N": heads, "K": kv_heads, "H": head_dim, "D": d_model,
        "B": args.batch, "S": args.seq_len, "P": num_ranks, "dtype": args.dtype,
        "operators": operators,
    }  # fmt: skip


def _requests(n, k, h, d, p, b, s, dtype) -> list[Request]:
    """The calls that one attention layer makes, forward and backward."""
    t = s // p
    axes = ("cp",)
    qkv, out = HeadExchange((n, k, k), h, p, axes), HeadExchange((n,), h, p, axes)
    x, w_qkv, w_out = (b, t, d), (d, qkv.num_columns), (out.num_columns, d)
    head_shards = {
        ex: tuple((b, s, local, h) for local in ex.local_heads) for ex in (qkv, out)
    }
    rows = [
        ("scatter_heads", "scatter", out, False, ((b, t, n, h),)),
        ("gather_heads", "gather", out, False, head_shards[out]),
        ("qkv_proj_a2a", "gemm_a2a", qkv, False, (x, w_qkv)),
        ("qkv_proj_a2a.backward", "a2a_gemm", qkv, True, (*head_shards[qkv], w_qkv)),
        ("a2a_out_proj", "a2a_gemm", out, False, (*head_shards[out], w_out)),
        ("a2a_out_proj.backward", "gemm_a2a", out, True, (x, w_out)),
    ]
    backend = jax.default_backend()
    return [
        Request(
            operator=operator,
            dataflow=dataflow,
            exchange=exchange,
            w_transposed=transposed,
            platform={"gpu": "cuda"}.get(backend, backend),
            dtype=jnp.dtype(dtype).name,
            shapes=shapes,
        )
        for operator, dataflow, exchange, transposed, shapes in rows
    ]


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
