# SPDX-License-Identifier: Apache-2.0
"""Projections into and out of the exchange layout, on one device.

What a caller does with the blocks (an all-to-all) is its business.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from jax_ulysses.pallas import config as configs
from jax_ulysses.pallas.config import ROW_MULTIPLE, GemmConfig
from jax_ulysses.pallas.gemm import gemm
from jax_ulysses.pallas.gemm_mgpu import cta
from jax_ulysses.pallas.layout import Segment, matrix
from jax_ulysses.pallas.plan import Plan


def project_to_blocks(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None,
    out: tuple[Segment, ...],
    *,
    w_transposed: bool,
    num_sms: int,
    config: GemmConfig | None = None,
    body: Callable[..., None] = cta,
    interpret=None,
) -> tuple[jax.Array, ...]:
    """x @ w (+ bias), stored as blocks for an all-to-all.

    Args:
      x: [M, K], bf16 or f16.
      w: [K, N], or [N, K] if ``w_transposed``; N is the columns of ``out`` together.
      bias: [N] or None; added in fp32, before the only rounding.
      out: where the columns go.
      w_transposed: multiply by the transpose of ``w``.
      num_sms: SMs to use.
      config: the tiling; None for the best that is known for the shape.
      body: of the kernel, as ``gemm_mgpu.cta``.
      interpret: Pallas's interpret parameters, to run on a CPU.

    Returns:
      Per segment [blocks * copies, M, width].

    Raises:
      NotImplementedError: the kernel cannot, with the numbers.
    """
    return _project(
        [x[None]],
        w,
        bias,
        matrix(x.shape[1]),
        out,
        config,
        w_transposed=w_transposed,
        num_sms=num_sms,
        body=body,
        interpret=interpret,
    )


def project_from_blocks(
    parts: Sequence[jax.Array],
    w: jax.Array,
    bias: jax.Array | None,
    a: tuple[Segment, ...],
    *,
    w_transposed: bool,
    num_sms: int,
    config: GemmConfig | None = None,
    interpret=None,
) -> jax.Array:
    """The columns of all blocks, side by side, times w (+ bias).

    Args:
      parts: per segment [blocks, M, width], as an all-to-all delivers them.
      w: [K, N], or [N, K] if ``w_transposed``; K is the columns of ``a`` together.
      bias: [N] or None; added in fp32, before the only rounding.
      a: what the parts hold; no copies.
      w_transposed: multiply by the transpose of ``w``.
      num_sms: SMs to use.
      config: the tiling; None for the best that is known for the shape.
      interpret: Pallas's interpret parameters, to run on a CPU.

    Returns:
      [M, N].

    Raises:
      NotImplementedError: the kernel cannot, with the numbers.
    """
    columns = w.shape[0 if w_transposed else 1]
    (result,) = _project(
        parts,
        w,
        bias,
        a,
        matrix(columns),
        config,
        w_transposed=w_transposed,
        num_sms=num_sms,
        interpret=interpret,
    )
    return result[0]


def refusal(
    rows: int,
    a: tuple[Segment, ...],
    out: tuple[Segment, ...],
    dtype: str,
    *,
    w_transposed: bool,
    num_sms: int,
    config: GemmConfig | None = None,
) -> str | None:
    """Why a projection cannot run, or None; the arguments are those of the others."""
    config = config or configs.choose(rows, out[-1].stop, a[-1].stop, num_sms)
    return configs.refusal(config, a, out, dtype, w_transposed=w_transposed)


def _project(parts, w, bias, a, out, config, *, w_transposed, num_sms, **kwargs):
    rows, dtype = parts[0].shape[1], parts[0].dtype
    config = config or configs.choose(rows, out[-1].stop, a[-1].stop, num_sms)
    reason = configs.refusal(config, a, out, dtype.name, w_transposed=w_transposed)
    if reason is not None:
        raise NotImplementedError(reason)
    padding = -rows % ROW_MULTIPLE
    if padding:
        # TMA moves eight rows of a swizzled tile at a time.
        parts = [jnp.pad(p, ((0, 0), (0, padding), (0, 0))) for p in parts]
    plan = Plan(
        a=a,
        out=out,
        rows=rows + padding,
        w_transposed=w_transposed,
        has_bias=bias is not None,
        config=config,
        dtype=dtype,
    )
    results = gemm(parts, w, bias, plan, num_sms=num_sms, **kwargs)
    return tuple(r[:, :rows] for r in results) if padding else results
