# SPDX-License-Identifier: Apache-2.0
"""Launches the GEMM of ``gemm_mgpu``: operands, results, shared memory, barriers."""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_ulysses.pallas.config import (
    CONSUMERS,
    EPILOGUE_ROWS,
    EPILOGUE_SLOTS,
    ROW_MULTIPLE,
    piece_columns,
    swizzle_columns,
)
from jax_ulysses.pallas.gemm_mgpu import cta
from jax_ulysses.pallas.plan import Plan


def gemm(
    a: Sequence[jax.Array],
    w: jax.Array,
    bias: jax.Array | None,
    plan: Plan,
    *,
    num_sms: int,
    body: Callable[..., None] = cta,
    interpret=None,
) -> tuple[jax.Array, ...]:
    """Multiplies segments by a matrix into segments.

    Args:
      a: per segment of ``plan.a`` [blocks, M, width].
      w: [K, N], or [N, K] if ``plan.w_transposed``.
      bias: [N] or None.
      plan: see there.
      num_sms: CTAs to launch, one an SM.
      body: of a warpgroup, as ``gemm_mgpu.cta``.
      interpret: Pallas's interpret parameters, to run on a CPU.

    Returns:
      Per segment of ``plan.out`` [blocks * copies, M, width].
    """
    config = plan.config
    swizzle = swizzle_columns(
        config, plan.a, plan.columns, w_transposed=plan.w_transposed
    )
    piece = piece_columns(config, plan.out)
    a_tile, w_tile = (config.tile_m, config.tile_k), (config.tile_k, config.tile_n)
    if plan.w_transposed:
        w_tile = w_tile[::-1]
    scratch = dict(
        a_smem=_swizzled((config.stages, *a_tile), swizzle, plan.dtype),
        w_smem=_swizzled((config.stages, *w_tile), swizzle, plan.dtype),
        out_smem=_swizzled(
            (CONSUMERS, EPILOGUE_SLOTS, EPILOGUE_ROWS, piece), piece, plan.dtype
        ),
        # One arrival by the load of A, one by the load of W.
        full=plgpu.Barrier(num_arrivals=2, num_barriers=config.stages * config.teams),
        empty=plgpu.Barrier(
            num_arrivals=CONSUMERS // config.teams,
            num_barriers=config.stages * config.teams,
        ),
    )
    operands = [*a, w] if bias is None else [*a, w, _pad_bias(bias, plan)]
    like = jax.typeof(a[0])
    out_type = [
        jax.ShapeDtypeStruct(
            (s.blocks * s.copies, plan.rows, s.width),
            plan.dtype,
            manual_axis_type=like.mat,
        )
        for s in plan.out
    ]
    kernel = plgpu.kernel(
        functools.partial(body, plan=plan),
        out_type=out_type,
        scratch_types=scratch,
        grid=(num_sms,),
        grid_names=("ctas",),
        num_threads=CONSUMERS + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
        interpret=interpret,
        kernel_name="ulysses_gemm",
    )
    return tuple(kernel(*operands))


def _swizzled(shape, columns: int, dtype):
    """Shared memory in the layout of TMA and WGMMA, ``columns`` to a swizzled row."""
    swizzle = columns * jnp.dtype(dtype).itemsize
    transforms = (
        plgpu.TilingTransform((ROW_MULTIPLE, columns)),
        plgpu.SwizzleTransform(swizzle),
    )
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def _pad_bias(bias: jax.Array, plan: Plan) -> jax.Array:
    """Tiles that reach over the last column read a bias there, too."""
    missing = plan.tiles[1] * plan.config.tile_n - bias.shape[0]
    return jnp.pad(bias, (0, missing)) if missing else bias
