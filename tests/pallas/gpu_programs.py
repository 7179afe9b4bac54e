# SPDX-License-Identifier: Apache-2.0
"""Programs of four GPUs that are not there, lowered or compiled, and what they move."""

import collections
import re

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_ulysses.testing import abstract_gpu_mesh
from tests.helpers.projection_cases import Case

SEQUENCE, HEADS = P(None, "cp"), P(None, None, "cp")
OPERATORS = ("qkv_proj_a2a", "q_proj_a2a", "a2a_out_proj", "a2a_proj/features")


def case(operator, batch=1, zigzag=False, kv_heads=4, **kwargs) -> Case:
    """Eight heads of 64, 64 tokens a rank."""
    sizes = dict(tokens=64, d_model=256, heads=8, kv_heads=kv_heads, head_dim=64)
    sizes |= dict(dtype="bfloat16", zigzag=zigzag)
    return Case(operator, batch, **(sizes | kwargs))


def lower(case: Case, gradients=False, mesh=None, implementation="pallas"):
    """Lowers one operator of the case for four ranks; with its backward, if asked."""
    target = dict(lowering_platforms=("cuda",)) if mesh is None else {}
    mesh = abstract_gpu_mesh((4,), ("cp",)) if mesh is None else mesh
    call = case.call("cp", implementation)
    results = 3 if case.operator == "qkv_proj_a2a" else 1
    wide, narrow = (SEQUENCE, HEADS) if case.is_scatter else (HEADS, SEQUENCE)

    def forward(*operands):
        out = call(*operands)
        return out if isinstance(out, tuple) else (out,)

    def both(*operands):
        out, back = jax.vjp(forward, *operands)
        return back(jax.tree.map(jnp.sin, out))

    operands = case.operands(4)
    in_specs = (wide, *[P()] * (len(operands) - 1))
    function, out_specs = (
        (both, in_specs) if gradients else (forward, (narrow,) * results)
    )
    mapped = jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
    arguments = [
        jax.ShapeDtypeStruct(o.shape, o.dtype, sharding=NamedSharding(mesh, s))
        for o, s in zip(operands, in_specs)
    ]
    return jax.jit(mapped).trace(*arguments).lower(**target)


def kernels_of(stablehlo: str) -> int:
    """Mosaic kernels in a lowered program."""
    return len(re.findall(r"custom_call @mosaic_gpu", stablehlo))


def exchanges_of(stablehlo: str) -> int:
    """All-to-alls in a lowered program."""
    return stablehlo.count('"stablehlo.all_to_all"')


def moves_of(stablehlo: str) -> collections.Counter:
    """Operations of a lowered program that put data elsewhere in memory.

    A transpose that only moves dimensions of size 1 does not.
    """
    kinds = "concatenate|slice|dynamic_slice|gather|scatter|reverse|pad"
    found = collections.Counter(re.findall(rf"stablehlo\.({kinds})\b", stablehlo))
    pattern = r"stablehlo\.transpose [^:]*dims = \[([\d, ]*)\] : \(tensor<([\dx]+)x\w+>"
    for dims, shape in re.findall(pattern, stablehlo):
        sizes = list(map(int, shape.split("x")))
        order = [d for d in map(int, dims.split(",")) if sizes[d] > 1]
        found["transpose"] += order != sorted(order)
    return +found
