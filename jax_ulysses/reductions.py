# SPDX-License-Identifier: Apache-2.0
"""Sums over ranks: by XLA's collectives, or over the peer group's heap.

NCCL refuses two ranks on one GPU. There, and wherever it is asked for, the library's
own kernel sums: every rank sends its vector to all, and each adds the P vectors in
rank order, so that all ranks get the same bits.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from jax_ulysses import group, native, sharding
from jax_ulysses._typing import Array, AxisName
from jax_ulysses.config import REDUCTIONS, config

# What each platform's handler adds, and the implementation that it belongs to.
_DTYPES = {
    "cuda": ("float32", "bfloat16", "float16"),
    "cpu": ("float32", "bfloat16", "float16", "float64"),
}
_IMPLEMENTATIONS = {"cuda": "cuda", "cpu": "host"}


def psum(x, axis_name: AxisName, *, via: str | None = None):
    """Sums arrays over ranks, also over ranks that share a GPU.

    Differentiable, and a replacement for ``lax.psum`` inside a ``shard_map`` whose
    axes are all manual. Groups along different axes are summed over one after the
    other; axes without a group are left to XLA.

    Args:
      x: an array or a tree of them, each different from rank to rank (varying) on
        every axis named.
      axis_name: mesh axis, or a tuple of axes.
      via: "auto", "xla" or "heap"; None for ``config.reductions``. "heap" needs
        ``initialize`` along these axes, and float32, bfloat16 or float16 arrays.

    Returns:
      The sums, equal on all ranks and typed so. Over the heap they are added in
      float32 in rank order and rounded once: bit by bit the same on every rank and
      in every run.

    Raises:
      ValueError: unknown ``via``, an array that does not vary on an axis, or a call
        outside a fully manual ``shard_map`` with ``check_vma=True``.
      NotImplementedError: the heap cannot sum these arrays over these axes, but has
        to.
    """
    axes, _ = sharding.check_manual("psum", axis_name)
    leaves, tree = jax.tree.flatten(x)
    for i, leaf in enumerate(leaves):
        sharding.check_varying("psum", f"array {i} of x", leaf, axes)
    return jax.tree.unflatten(tree, _psum(tuple(leaves), axes, via))


def reduce_like(cotangent: Array, primal: Array) -> Array:
    """Makes a cotangent fit its primal: sums over axes where the primal is replicated.

    This is the one place where weight, bias and activation gradients are summed
    over ranks, so each is summed exactly once. The sum runs in the cotangent's
    own dtype (fp32 for weight gradients); the result has the primal's dtype.
    """
    varying = sharding.varying_axes(primal)
    # A primal typed "reduced" says that its user will sum the cotangent, later.
    deferred = jax.typeof(primal).mat.reduced
    extra = tuple(sorted(sharding.varying_axes(cotangent) - varying - deferred))
    if extra:
        (cotangent,) = _psum((cotangent,), extra, None)
    cotangent = sharding.vary_like(cotangent.astype(primal.dtype), varying | deferred)
    if deferred:
        cotangent = lax.pcast(cotangent, tuple(sorted(deferred)), to="unreduced")
    return cotangent


def heap_axes(axes: tuple[str, ...], via: str | None = None) -> list[tuple[str, ...]]:
    """The groups over whose heaps a sum over ``axes`` goes, one after the other.

    Empty where XLA sums. See ``psum`` for the arguments and errors.
    """
    via = config.reductions if via is None else via
    if via not in REDUCTIONS:
        raise ValueError(f"reductions={via!r}: expected one of {REDUCTIONS}.")
    if via == "xla":
        return []
    platform = sharding.platform()
    name = _IMPLEMENTATIONS.get(platform)
    mesh = jax.sharding.get_abstract_mesh()
    wanted = frozenset(a for a in axes if mesh.shape[a] > 1)
    found = [
        g
        for g in group.within(wanted)
        if g.report.platform == platform and name not in g.report.unavailable
    ]
    if via == "auto":
        found = [g for g in found if g.report.ranks_per_device > 1]
    missing = wanted.difference(*(g.report.axis_name for g in found))
    # In "auto" XLA may have all of a sum or, with no group to ask, a part of it.
    if missing and via == "heap":
        raise NotImplementedError(
            f"psum over the heap: no peer group with a heap along "
            f"{sorted(missing)} (mesh {dict(mesh.shape)}, platform {platform}): call "
            "jax_ulysses.initialize(mesh, axis_name=...) for these axes before, "
            "outside jit"
        )
    return [g.report.axis_name for g in found]


def _psum(leaves, axes, via):
    heaps = heap_axes(axes, via)
    if not heaps:
        return lax.psum(leaves, axes)
    _check_dtypes(leaves, axes)
    # Neither XLA nor a handler need see an array without elements.
    sums = tuple(leaf for leaf in leaves if leaf.size)
    mesh = jax.sharding.get_abstract_mesh()
    # Axes of one rank have nothing to sum: only the type changes.
    single = tuple(a for a in axes if mesh.shape[a] == 1)
    for i, names in enumerate(heaps if sums else ()):
        sums = _over_heap((names, () if i else single), sums)
    rest = tuple(
        a for a in axes if a not in single and not any(a in names for names in heaps)
    )
    if rest:
        sums = lax.psum(sums, rest)
    remaining = iter(sums)
    return tuple(
        next(remaining) if leaf.size else _empty_sum(leaf, axes) for leaf in leaves
    )


def _empty_sum(leaf: Array, axes: tuple[str, ...]) -> Array:
    varying = sharding.varying_axes(leaf).difference(axes)
    return sharding.vary_like(jnp.zeros(leaf.shape, leaf.dtype), varying)


def _check_dtypes(leaves, axes) -> None:
    platform = sharding.platform()
    known = _DTYPES[platform]
    for leaf in leaves:
        if leaf.dtype.name not in known:
            raise NotImplementedError(
                f"psum over {sharding.describe_axes(axes)}: the heap sums "
                f"{', '.join(known)} on {platform}, not {leaf.dtype.name} (shape "
                f"{leaf.shape}); convert it, or pass via='xla' where no two ranks "
                "share a GPU."
            )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _over_heap(
    axes: tuple[tuple[str, ...], ...], vectors: tuple[Array, ...]
) -> tuple[Array, ...]:
    backend = {"cuda": native.cuda, "cpu": native.host}[sharding.platform()]
    with jax.named_scope("ulysses/psum"):
        return tuple(backend.psum(axes[0], vectors, equal_axes=axes[1]))


def _over_heap_fwd(axes, vectors):
    return _over_heap(axes, vectors), None


def _over_heap_bwd(axes, _, cotangents):
    # Equal on all ranks, as the sum is: each rank's own term gets it as it stands.
    group_axes, single = axes
    return (tuple(sharding.vary_like(ct, group_axes + single) for ct in cotangents),)


_over_heap.defvjp(_over_heap_fwd, _over_heap_bwd)
