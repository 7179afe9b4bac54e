# SPDX-License-Identifier: Apache-2.0
"""The calls of one rank beside XLA's dot: ``python benchmarks/bench_one_rank.py``.

One GPU, P = 1, so that nothing crosses a link: what the fused kernels cost as matrix
products, entries, flags and heap included. Every call runs once a round in random
order; times are those of the kernels on the GPU, from CUPTI, without what lies between
two of them. Writes one JSON object a line: medians.
"""

import argparse
import pathlib
import statistics

import jax
import jax.numpy as jnp
from bench_operators import shapes
from bench_pallas import measure
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from operator_cases import HEADS, SEQUENCE
from timing import emit

import jax_ulysses as ju


def calls_of(
    mesh, geometry: dict[str, int], rows: int, native: str = "cuda"
) -> dict[str, tuple]:
    """Name -> (operator, N, K, variant, what calls it); native: "host" on CPUs."""
    heads, kv_heads = geometry["heads"], geometry["kv_heads"]
    head_dim, width = geometry["head_dim"], geometry["d_model"]
    columns = (heads + 2 * kv_heads) * head_dim

    def normal(seed, shape, spec):
        array = jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)
        return jax.device_put(array, NamedSharding(mesh, spec))

    def mapped(function, in_spec, out_specs):
        specs = {"in_specs": (in_spec, P()), "out_specs": out_specs}
        return jax.jit(jax.shard_map(function, mesh=mesh, **specs))

    x = normal(0, (1, rows, width), SEQUENCE)
    a = normal(1, (1, rows, heads, head_dim), HEADS)
    flat = a.reshape(1, rows, heads * head_dim)
    w_qkv = normal(2, (width, columns), P())
    w_out = normal(3, (heads * head_dim, width), P())
    qkv = mapped(
        lambda x, w: ju.qkv_proj_a2a(
            x,
            w,
            axis_name="cp",
            num_heads=heads,
            num_kv_heads=kv_heads,
            implementation=native,
        ),
        SEQUENCE,
        (HEADS,) * 3,
    )
    out = mapped(
        lambda a, w: ju.a2a_out_proj(a, w, axis_name="cp", implementation=native),
        HEADS,
        SEQUENCE,
    )
    dot = jax.jit(lambda x, w: x @ w)
    of_qkv = ("qkv_proj_a2a", columns, width)
    of_out = ("a2a_out_proj", width, heads * head_dim)
    return {
        f"qkv {native}": (*of_qkv, native, lambda: qkv(x, w_qkv)),
        "qkv dot": (*of_qkv, "dot", lambda: dot(x, w_qkv)),
        f"out {native}": (*of_out, native, lambda: out(a, w_out)),
        "out dot": (*of_out, "dot", lambda: dot(flat, w_out)),
    }


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--geometries", default="llama3_8b")
    parser.add_argument("--rows", default="512,2048,8192")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--out", type=pathlib.Path, help="result file to append to")
    parser.add_argument("--commit", default="", help="noted in every row")
    args = parser.parse_args()
    device = jax.devices()[0]
    mesh = jax.make_mesh((1,), ("cp",), devices=[device])
    ju.initialize(mesh, "cp", 1 << 30)
    for geometry in args.geometries.split(","):
        for rows in map(int, args.rows.split(",")):
            calls = calls_of(mesh, shapes()[geometry], rows)
            functions = {name: call for name, (*_, call) in calls.items()}
            for name, us in measure(functions, (), args.rounds).items():
                op, n, k, variant, _ = calls[name]
                row = {
                    **dict(op=op, geometry=geometry, devices=1, rows=rows, n=n, k=k),
                    **dict(variant=variant, us=round(statistics.median(us), 1)),
                    **dict(commit=args.commit, device=device.device_kind),
                }
                emit(row, args.out)
    ju.finalize()


if __name__ == "__main__":
    main()
