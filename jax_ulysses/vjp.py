# SPDX-License-Identifier: Apache-2.0
"""The differentiable dataflows: forward and backward on the same two kernels.

The input gradient of ``gemm_a2a`` is an ``a2a_gemm`` by the transposed weight, and
the reverse, so one exchange forward means one exchange backward. Weight gradients
are local GEMMs in fp32, summed over ranks once by ``reductions.reduce_like``.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from jax_ulysses import dispatch, reductions, remat, sharding
from jax_ulysses._typing import Array
from jax_ulysses.reference import accumulation_dtype
from jax_ulysses.spec import HeadExchange, Request


@dataclasses.dataclass(frozen=True)
class Call:
    """The static side of one operator call.

    Attributes:
      operator: public name.
      exchange: the routing.
      implementation: normalised choice, None for the best.
      w_transposed: the GEMM multiplies by the transpose of the weight.
    """

    operator: str
    exchange: HeadExchange
    implementation: tuple[str, ...] | None
    w_transposed: bool = False

    def backward(self) -> "Call":
        """The call that carries cotangents of this one's activations back."""
        return dataclasses.replace(
            self,
            operator=f"{self.operator}.backward",
            w_transposed=not self.w_transposed,
        )

    def run(self, dataflow: str, operands, *args, **kwargs):
        """Dispatches; ``operands`` are the arrays whose shapes decide who can."""
        request = Request(
            operator=self.operator,
            dataflow=dataflow,
            exchange=self.exchange,
            w_transposed=self.w_transposed,
            platform=sharding.platform(),
            dtype=jnp.dtype(operands[0].dtype).name,
            shapes=tuple(tuple(a.shape) for a in operands),
            want_gathered=kwargs.get("want_gathered", True),
        )
        with jax.named_scope(f"ulysses/{self.operator}"):
            return dispatch.run(request, self.implementation, *args, **kwargs)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def scatter(call: Call, parts: tuple[Array, ...]) -> tuple[Array, ...]:
    """Per segment [B, T, M, H] -> [B, S, local heads, H]."""
    return _scatter_fwd(call, parts)[0]


def _scatter_fwd(call, parts):
    return remat.name_parts(call.run("scatter", parts, parts)), None


def _scatter_bwd(call, _, cotangents):
    back = call.backward()
    copies = max(back.exchange.replicas) > 1
    return (back.run("gather", cotangents, cotangents, sum_replicas=copies),)


scatter.defvjp(_scatter_fwd, _scatter_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def gather(call: Call, parts: tuple[Array, ...]) -> tuple[Array, ...]:
    """Per segment [B, S, local heads, H] -> [B, T, M, H]; no replicated segments."""
    return _gather_fwd(call, parts)[0]


def _gather_fwd(call, parts):
    if any(r > 1 for r in call.exchange.replicas):
        raise AssertionError("the transpose of a selection of copies is no scatter")
    return remat.name_parts(call.run("gather", parts, parts, sum_replicas=False)), None


def _gather_bwd(call, _, cotangents):
    return (call.backward().run("scatter", cotangents, cotangents),)


gather.defvjp(_gather_fwd, _gather_bwd)


def gemm_a2a(call: Call, x: Array, w: Array, bias: Array | None) -> tuple[Array, ...]:
    """x [B, T, D] times w, scattered: per segment [B, S, local heads, H]."""
    _check_reduced(call, x, w, bias)
    return _gemm_a2a(call, _widen(x, w, bias), w, bias)


def a2a_gemm(
    call: Call, parts: tuple[Array, ...], w: Array, bias: Array | None
) -> Array:
    """Gathers parts to [B, T, C], times w: [B, T, D]."""
    _check_reduced(call, *parts, w, bias)
    return _a2a_gemm(call, tuple(_widen(p, *parts, w, bias) for p in parts), w, bias)


def _check_reduced(call: Call, *operands: Array | None) -> None:
    """As JAX's own dot; a kernel would multiply, and add the bias, term by term."""
    for x in operands:
        axes = jax.typeof(x).mat.unreduced if x is not None else ()
        if axes:
            raise ValueError(
                f"{call.operator}: {jax.typeof(x)} is unreduced, its sum over "
                f"{sorted(axes)} has yet to be taken: do that before, by jax.lax.psum."
            )


def _widen(x: Array, *others: Array | None) -> Array:
    """Types ``x`` as varying wherever an operand beside it is.

    Its cotangent then needs no reduction in the rules below (JAX's own transpose
    of this cast does it), and the rules need not keep ``x`` only for its type.
    """
    return sharding.vary_like(
        x, sharding.varying_axes(*(o for o in others if o is not None))
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gemm_a2a(call, x, w, bias):
    return _gemm_a2a_fwd(call, x, w, bias)[0]


def _gemm_a2a_fwd(call, x, w, bias):
    parts = call.run("gemm_a2a", (x, w), x, w, bias, w_transposed=call.w_transposed)
    return remat.name_parts(parts), (x, w, bias)


def _gemm_a2a_bwd(call, residuals, cotangents):
    x, w, bias = residuals
    dx, dy = gemm_a2a_bwd_input(call, cotangents, w)
    dw = weight_gradient(x, dy, w_transposed=call.w_transposed)
    return dx, reductions.reduce_like(dw, w), _bias_gradient(dy, bias)


_gemm_a2a.defvjp(_gemm_a2a_fwd, _gemm_a2a_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _a2a_gemm(call, parts, w, bias):
    # Only the weight gradient needs the gathered operand.
    return _a2a_gemm_fwd(call, parts, w, bias, want_gathered=False)[0]


def _a2a_gemm_fwd(call, parts, w, bias, want_gathered=True):
    y, gathered = call.run(
        "a2a_gemm",
        (*parts, w),
        parts,
        w,
        bias,
        w_transposed=call.w_transposed,
        want_gathered=want_gathered,
    )
    y, gathered = remat.name_gathered(y, gathered)
    # The gathered operand, not ``parts``: its weight gradient needs no exchange.
    return y, (gathered, w, bias)


def _a2a_gemm_bwd(call, residuals, dy):
    gathered, w, bias = residuals
    dparts = a2a_gemm_bwd_input(call, dy, w)
    dw = weight_gradient(gathered, dy, w_transposed=call.w_transposed)
    return dparts, reductions.reduce_like(dw, w), _bias_gradient(dy, bias)


_a2a_gemm.defvjp(_a2a_gemm_fwd, _a2a_gemm_bwd)


def gemm_a2a_bwd_input(
    call: Call, cotangents: tuple[Array, ...], w: Array
) -> tuple[Array, Array]:
    """Gradient of ``x`` of a ``gemm_a2a``, and the gathered cotangent [B, T, C]."""
    back = call.backward()
    return back.run(
        "a2a_gemm",
        (*cotangents, w),
        cotangents,
        w,
        None,
        w_transposed=back.w_transposed,
    )


def a2a_gemm_bwd_input(call: Call, dy: Array, w: Array) -> tuple[Array, ...]:
    """Gradients of the parts of an ``a2a_gemm``."""
    back = call.backward()
    return back.run("gemm_a2a", (dy, w), dy, w, None, w_transposed=back.w_transposed)


def a2a_gemm_fwd(
    call: Call, parts: tuple[Array, ...], w: Array, bias: Array | None
) -> tuple[Array, Array]:
    """``a2a_gemm`` with the gathered operand [B, T, C]; not differentiable."""
    y, (gathered, _, _) = _a2a_gemm_fwd(call, parts, w, bias)
    return y, gathered


def weight_gradient(x: Array, dy: Array, *, w_transposed: bool) -> Array:
    """Local part of the gradient of ``w`` in y = x @ w (or x @ w.T).

    Args:
      x: [B, T, rows].
      dy: [B, T, cols].
      w_transposed: as in the forward call.

    Returns:
      [rows, cols], or [cols, rows] if ``w_transposed``, in the accumulation dtype.
    """
    lhs, rhs = (dy, x) if w_transposed else (x, dy)
    dims = (((0, 1), (0, 1)), ((), ()))
    return lax.dot_general(
        lhs, rhs, dims, preferred_element_type=accumulation_dtype(x.dtype)
    )


def _bias_gradient(dy: Array, bias: Array | None) -> Array | None:
    if bias is None:
        return None
    db = jnp.sum(dy, axis=(0, 1), dtype=accumulation_dtype(dy.dtype))
    return reductions.reduce_like(db, bias)
