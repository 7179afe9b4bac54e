# SPDX-License-Identifier: Apache-2.0
"""The order of the backward pass, where memory depends on it."""

import jax
from flax import nnx
from jax import lax
from jaxtyping import Array, Float


def weights_first[Module: nnx.Module](
    module: Module, x: Float[Array, "..."]
) -> tuple[Module, Float[Array, "..."]]:
    """Returns both as they are, with the order of their gradients fixed.

    In the backward pass the gradients of the module's weights are finished before the
    one of ``x`` goes on to what came before. XLA's scheduler would rather put the GEMMs
    of weight gradients beside later communication, and keeps all their operands until
    then: those of a feed-forward layer are several times as large as [B, T, D], and
    would be there throughout the attention's backward, which needs memory itself.

    Args:
      module: What is applied to ``x`` next.
      x: Activations, in the dtype of the computation.

    Returns:
      The module with its weights cast to the dtype of ``x``, as its layers would do
      themselves, so that no float32 copies of their gradients wait; and ``x``.
    """
    graph, weights = nnx.split(module)
    weights = jax.tree.map(lambda w: w.astype(x.dtype), weights)
    weights, x = _together(weights, x)
    return nnx.merge(graph, weights), x


@jax.custom_vjp
def _together(weights, x):
    return weights, x


_together.defvjp(
    lambda weights, x: ((weights, x), None),
    lambda _, cotangents: lax.optimization_barrier(cotangents),
)
