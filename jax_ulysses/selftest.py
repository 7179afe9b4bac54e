# SPDX-License-Identifier: Apache-2.0
"""A few operators run on the devices at hand and compared with numpy."""

import contextlib
from collections.abc import Generator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_ulysses import api, group

HEADS, KV_HEADS, HEAD_DIM, D_MODEL, TOKENS = 8, 4, 16, 32, 64
# Relative L2 against fp64. Two projections in bfloat16 round twice.
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}


@contextlib.contextmanager
def local_group(num_ranks: int) -> Generator[tuple[Mesh, group.GroupReport | None]]:
    """A mesh over the first local devices, and for a while a peer group on it.

    Args:
      num_ranks: P, at most the number of local devices.

    Yields:
      The mesh with one axis "cp", and what ``initialize`` reported; None if the
      program has groups of its own already, which then stay untouched.
    """
    devices = jax.local_devices()[:num_ranks]
    mesh = jax.make_mesh((num_ranks,), ("cp",), devices=devices)
    if group._groups:
        yield mesh, None
        return
    try:
        yield mesh, group.initialize(mesh, "cp")
    finally:
        group.finalize()


def self_test() -> list[dict[str, Any]]:
    """Exchanges and projects small arrays over up to eight local devices.

    Returns:
      One row per implementation and check: {"implementation", "check", "detail",
      "error"}; "error" is None where it passed.
    """
    num_ranks = max(p for p in (1, 2, 4, 8) if p <= len(jax.local_devices()))
    with local_group(num_ranks) as (mesh, report):
        names = ["xla"]
        if report is not None:
            names += [n for n in ("cuda", "host") if n not in report.unavailable]
        return [
            _run(name, check, mesh, num_ranks)
            for name in names
            for check in (_round_trip, _projections)
        ]


def _run(name, check, mesh, num_ranks) -> dict[str, Any]:
    row: dict[str, Any] = {
        "implementation": name,
        "check": f"{check.__doc__.rstrip('.')} on {num_ranks} devices",
        "detail": None,
        "error": None,
    }
    try:
        row["detail"] = check(mesh, name)
    except Exception as error:  # A broken implementation must not hide the others.
        row["error"] = f"{type(error).__name__}: {error}"
    return row


def _round_trip(mesh, name) -> str:
    """scatter, gather."""
    x = np.arange(TOKENS * HEADS * HEAD_DIM, dtype=np.float32)
    x = x.reshape(1, TOKENS, HEADS, HEAD_DIM)

    def exchange(x):
        heads = api.scatter_heads(x, "cp", implementation=name)
        return heads, api.gather_heads(heads, "cp", implementation=name)

    sequence, by_head = P(None, "cp"), P(None, None, "cp")
    run = jax.shard_map(
        exchange, mesh=mesh, in_specs=sequence, out_specs=(by_head, sequence)
    )
    heads, back = jax.jit(run)(jax.device_put(x, NamedSharding(mesh, sequence)))
    # Sharded by heads, the global array is the same.
    if not np.array_equal(heads, x) or not np.array_equal(back, x):
        raise AssertionError("the exchange changed the data")
    return "bit-exact"


def _projections(mesh, name) -> str:
    """qkv_proj_a2a, a2a_out_proj."""
    rng = np.random.default_rng(0)
    columns = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    x = rng.standard_normal((1, TOKENS, D_MODEL))
    w_qkv = rng.standard_normal((D_MODEL, columns))
    w_out = rng.standard_normal((HEADS * HEAD_DIM, D_MODEL))

    def layer(x, w_qkv, w_out):
        q, _, _ = api.qkv_proj_a2a(
            x,
            w_qkv,
            axis_name="cp",
            num_heads=HEADS,
            num_kv_heads=KV_HEADS,
            implementation=name,
        )
        return api.a2a_out_proj(q, w_out, axis_name="cp", implementation=name)

    sequence = P(None, "cp")
    run = jax.shard_map(
        layer, mesh=mesh, in_specs=(sequence, P(), P()), out_specs=sequence
    )
    # The tensor-core kernels take no fp32.
    dtype = "bfloat16" if name == "cuda" else "float32"
    x, w_qkv, w_out = (
        np.asarray(a.astype(jnp.dtype(dtype)), np.float64) for a in (x, w_qkv, w_out)
    )
    args = [
        jax.device_put(a.astype(jnp.dtype(dtype)), NamedSharding(mesh, s))
        for a, s in ((x, sequence), (w_qkv, P()), (w_out, P()))
    ]
    result = np.asarray(jax.jit(run)(*args), np.float64)
    expected = x @ w_qkv[:, : HEADS * HEAD_DIM] @ w_out
    error = np.linalg.norm(result - expected) / np.linalg.norm(expected)
    if not error < TOLERANCE[dtype]:
        raise AssertionError(
            f"relative L2 error {error:.1e} in {dtype}, allowed {TOLERANCE[dtype]:.0e}"
        )
    return f"relative L2 error {error:.1e} in {dtype}"
