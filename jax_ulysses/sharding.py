# SPDX-License-Identifier: Apache-2.0
"""What the library needs of ``shard_map``, checked at trace time.

Operators work on per-device shapes, so every mesh axis must be manual. They also
read *varying manual axes* (vma) from operand types: that is how gradients of
replicated weights are reduced exactly once, and how replicated activations,
which an exchange would mix up silently, are refused.
"""

import math
from collections.abc import Iterable, Sequence

import jax
from jax import lax
from jax.sharding import Mesh

from jax_ulysses._typing import Array, AxisName


def axis_tuple(axis_name: AxisName) -> tuple[str, ...]:
    """Normalises one axis name or a sequence of them (major first) to a tuple."""
    if isinstance(axis_name, str):
        return (axis_name,)
    if not isinstance(axis_name, Sequence) or not axis_name:
        raise ValueError(
            f"axis_name must be a mesh axis or a tuple of them, got {axis_name!r}."
        )
    axes = tuple(axis_name)
    if len(set(axes)) != len(axes) or not all(isinstance(a, str) for a in axes):
        raise ValueError(f"axis_name must be distinct mesh axis names, got {axes!r}.")
    return axes


def describe_axes(axes: tuple[str, ...]) -> str:
    """Axis names for messages: 'cp', or ('a', 'b')."""
    return repr(axes[0]) if len(axes) == 1 else repr(axes)


def check_manual(operator: str, axis_name: AxisName) -> tuple[tuple[str, ...], int]:
    """Checks the context of an operator call.

    Args:
      operator: public name, for messages.
      axis_name: context-parallel mesh axis, or axes, major first.

    Returns:
      The axes as a tuple, and P, the product of their sizes.

    Raises:
      ValueError: outside ``shard_map``, if the axis is not in the mesh, if any
        mesh axis of more than one device is not manual, or under
        ``check_vma=False``.
    """
    axes = axis_tuple(axis_name)
    mesh = jax.sharding.get_abstract_mesh()
    known = tuple(mesh.axis_names)
    if not mesh.manual_axes:
        raise ValueError(
            f"{operator} works on per-device shapes and must be called inside "
            f"jax.shard_map with axis {describe_axes(axes)} in its mesh. Write\n"
            f"  jax.shard_map(lambda x: {operator}(x, ...), mesh=mesh, "
            f"in_specs=P(None, {describe_axes(axes)}), out_specs=...)\n"
            "or use jax_ulysses.models.UlyssesAttention, which does it for you."
        )
    missing = [a for a in axes if a not in known]
    if missing:
        raise ValueError(
            f"{operator}: axis_name {describe_axes(axes)} is not in the mesh, whose "
            f"axes are {dict(mesh.shape)}."
        )
    not_manual = [
        a
        for a in known
        if a not in mesh.manual_axes and (mesh.shape[a] > 1 or a in axes)
    ]
    if not_manual:
        batch = next((a for a in not_manual if a not in axes), None)
        raise ValueError(
            f"{operator}: mesh axes {not_manual} are not manual here "
            f"(shard_map was given axis_names={sorted(mesh.manual_axes)}). XLA would "
            "all-gather the operands over them silently. Leave axis_names out, so that "
            "every axis is manual, and name those axes in in_specs/out_specs instead, "
            f"for example P({batch!r}, {describe_axes(axes)})."
        )
    if not jax.typeof(lax.axis_index(axes)).mat.varying:
        raise ValueError(
            f"{operator} needs jax.shard_map(..., check_vma=True), the default. With "
            "check_vma=False JAX does not track which values differ between ranks, and "
            "gradients of replicated weights would be wrong by a factor P. Remove "
            "check_vma=False; where a value is typed too narrowly, write "
            "jax.lax.pcast(value, axis, to='varying'). jax.pmap has no such types: use "
            "jax.shard_map."
        )
    return axes, lax.axis_size(axes)


def platform() -> str:
    """Lower-case platform that the surrounding ``shard_map`` is traced for."""
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    return platform_name(getattr(device, "platform", None) or jax.default_backend())


def platform_name(name: str) -> str:
    """The library's name of one of JAX's platforms, in lower case."""
    return {"gpu": "cuda"}.get(name.lower(), name.lower())


def members(mesh: Mesh, axes: tuple[str, ...]) -> list[tuple[int, int, int]]:
    """Where each device of this process stands.

    Args:
      mesh: concrete mesh.
      axes: group axes, major first.

    Returns:
      (local device ordinal, line, rank) for each device of this process: devices
      of one line exchange with each other, ordered by rank.
    """
    names = list(mesh.axis_names)
    others = [n for n in names if n not in axes]
    order = [names.index(n) for n in (*others, *axes)]
    num_ranks = math.prod(mesh.shape[a] for a in axes)
    lines = mesh.devices.transpose(order).reshape(-1, num_ranks)
    return [
        (device.local_hardware_id, line, rank)
        for line, row in enumerate(lines)
        for rank, device in enumerate(row)
        if device.process_index == jax.process_index()
    ]


def varying_axes(*arrays: Array) -> frozenset[str]:
    """Mesh axes over which any of the arrays differs from rank to rank."""
    return frozenset().union(*(jax.typeof(a).mat.varying for a in arrays))


def check_varying(operator: str, name: str, x: Array, axes: tuple[str, ...]) -> None:
    """Raises ValueError if ``x`` is replicated over a context-parallel axis.

    An exchange of a replicated array would repeat the sequence P times.
    """
    missing = [a for a in axes if a not in varying_axes(x)]
    if missing:
        raise ValueError(
            f"{operator}: {name} (local shape {x.shape}) is replicated over axis "
            f"{describe_axes(tuple(missing))}, but must be sharded on it. Name the "
            f"axis in in_specs, for example P(None, {describe_axes(axes)}). If every "
            "rank really holds its own shard already, say so with "
            "jax.lax.pcast(x, axis, to='varying')."
        )


def vary_like(x: Array, axes: Iterable[str]) -> Array:
    """Widens the type of ``x`` to differ over ``axes`` too."""
    missing = tuple(sorted(frozenset(axes) - varying_axes(x)))
    return lax.pcast(x, missing, to="varying") if missing else x
