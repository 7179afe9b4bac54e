# SPDX-License-Identifier: Apache-2.0
"""The order of the backward pass, where memory depends on it."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def weights_first[Weights](
    weights: Weights, x: Float[Array, "..."]
) -> tuple[Weights, Float[Array, "..."]]:
    """Returns both, with the order of their gradients fixed.

    In the backward pass the gradients of the weights are finished before the one of
    ``x`` goes on to what came before. XLA's scheduler would rather put the GEMMs of
    weight gradients beside later communication, and keeps all their operands until
    then: those of a feed-forward layer are several times as large as [B, T, D], and
    would be there throughout the attention's backward, which needs memory itself.

    Args:
      weights: Pytree of what ``x`` goes through next, such as an `nnx.Module`.
      x: Activations, in the dtype of the computation.

    Returns:
      The weights, those of floating-point types cast to the dtype of ``x``, so that no
      float32 copies of their gradients wait; and ``x``. A module is a new one: what a
      layer writes to its state, such as the count of an RNG, stays in there.
    """
    leaves, tree = jax.tree.flatten(weights)
    # Others, such as keys of an RNG, have no gradient.
    places = [
        i for i, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.floating)
    ]
    *ordered, x = _together(*(leaves[i].astype(x.dtype) for i in places), x)
    for i, leaf in zip(places, ordered, strict=True):
        leaves[i] = leaf
    return jax.tree.unflatten(tree, leaves), x


@jax.custom_vjp
def _together(*arrays):
    return arrays


_together.defvjp(
    lambda *arrays: (arrays, None),
    lambda _, cotangents: tuple(lax.optimization_barrier(cotangents)),
)
