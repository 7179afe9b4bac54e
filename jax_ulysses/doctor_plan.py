# SPDX-License-Identifier: Apache-2.0
"""What would run for a geometry, operator by operator, and why nothing better."""

import argparse
import contextlib
import importlib.resources
import json
from typing import Any

import jax
import jax.numpy as jnp

from jax_ulysses import dispatch, spec
from jax_ulysses.selftest import local_group
from jax_ulysses.spec import HeadExchange, Request

# What a named geometry says.
_FIXED = ("--heads", "--kv-heads", "--head-dim", "--d-model")


def geometries() -> dict[str, dict[str, int]]:
    """The named geometries that benchmarks and tests use.

    Returns:
      Name -> {"heads": N, "kv_heads": K, "head_dim": H, "d_model": D}.
    """
    path = importlib.resources.files("jax_ulysses") / "data" / "shapes.json"
    return json.loads(path.read_text())["geometries"]


def plan(args: argparse.Namespace) -> dict[str, Any] | None:
    """For one geometry and P: per operator, what would run and why nothing better.

    Args:
      args: command line; ``geometry`` or ``heads`` asks for a plan.

    Returns:
      None if no geometry was asked for.

    Raises:
      ValueError: unknown name, or numbers that do not fit together.
    """
    given = [f for f in _FIXED if getattr(args, f[2:].replace("-", "_")) is not None]
    if args.geometry is not None:
        if given:
            raise ValueError(
                f"--geometry {args.geometry} fixes {', '.join(given)}: leave out "
                "--geometry, or the others."
            )
        table = geometries()
        if args.geometry not in table:
            raise ValueError(
                f"--geometry {args.geometry!r} is not in the table: {', '.join(table)}."
            )
        shape = table[args.geometry]
        heads, kv_heads = shape["heads"], shape["kv_heads"]
        head_dim, d_model = shape["head_dim"], shape["d_model"]
    elif args.heads is not None:
        heads, kv_heads = args.heads, args.kv_heads or args.heads
        head_dim = args.head_dim or 128
        d_model = args.d_model or heads * head_dim
    elif given:
        raise ValueError(f"{', '.join(given)} without --heads.")
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
