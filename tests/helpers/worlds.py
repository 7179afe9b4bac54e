# SPDX-License-Identifier: Apache-2.0
"""Meshes the suite runs on, and short ways to run per-device functions on them."""

import dataclasses
import functools
import math

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


@dataclasses.dataclass(frozen=True)
class World:
    """A mesh, and the roles of its axes.

    Attributes:
      name: test id.
      mesh: concrete mesh.
      axis: context-parallel axis, or a tuple of axes, major first.
      batch: axis of the batch, or None.
      tensor: tensor-parallel axis, or None.
    """

    name: str
    mesh: Mesh
    axis: str | tuple[str, ...] = "cp"
    batch: str | None = None
    tensor: str | None = None

    @property
    def axes(self) -> tuple[str, ...]:
        return (self.axis,) if isinstance(self.axis, str) else self.axis

    @property
    def num_ranks(self) -> int:
        return math.prod(self.mesh.shape[a] for a in self.axes)

    def size(self, axis: str | None) -> int:
        return 1 if axis is None else self.mesh.shape[axis]

    @property
    def tokens(self) -> P:
        """Sequence shards: [B, S, ...]."""
        return P(self.batch, self.axes)

    @property
    def heads(self) -> P:
        """Head shards: [B, S, heads, ...], tensor parallel major."""
        tensor = () if self.tensor is None else (self.tensor,)
        return P(self.batch, None, (*tensor, *self.axes))

    def put(self, value, spec=P()):
        """Places an array (or a tree of them under one spec) on the mesh."""
        return jax.tree.map(
            lambda v: jax.device_put(v, NamedSharding(self.mesh, spec)), value
        )

    def place(self, values, specs):
        """Places several operands, each under its own spec."""
        return tuple(self.put(v, s) for v, s in zip(values, specs, strict=True))

    def abstract(self, shape, dtype="float32", spec=P()):
        """The shape of an operand placed so."""
        return abstract(self.mesh, shape, dtype, spec)

    def shard_map(self, fn, in_specs, out_specs):
        return jax.shard_map(fn, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs)

    def run(self, fn, values, in_specs, out_specs):
        """Compiles and runs a per-device function on global arrays."""
        mapped = jax.jit(self.shard_map(fn, in_specs, out_specs))
        return mapped(*self.place(values, in_specs))

    def vjp(self, fn, in_specs, out_specs):
        """Compiled (operands, cotangent) -> (result, gradients of all operands)."""
        mapped = self.shard_map(fn, in_specs, out_specs)

        @jax.jit
        def both(operands, cotangent):
            out, back = jax.vjp(mapped, *operands)
            return out, back(cotangent)

        return both


def abstract(mesh, shape, dtype="float32", spec=P()) -> jax.ShapeDtypeStruct:
    """A shape on a mesh, which may be an abstract one of any size."""
    sharding = NamedSharding(mesh, spec)
    return jax.ShapeDtypeStruct(shape, jax.numpy.dtype(dtype), sharding=sharding)


@functools.cache
def world(name: str) -> World:
    """Builds a world by name; every name is a test id."""
    devices = np.array(jax.devices()[:8])
    if name.startswith("cp") and name[2:].isdigit():
        size = int(name[2:])
        return World(name, _mesh(devices[:size].reshape(size), ("cp",)))
    base, _, kind = name.partition("-")
    types = AxisType.Auto if kind == "auto" else AxisType.Explicit
    if base == "cp4" and kind == "reversed":
        return World(name, _mesh(devices[:4][::-1], ("cp",)))
    if base == "cp4dp2" and kind == "transposed":
        # CP is the major axis and its groups are strided twice over.
        grid = devices.reshape(2, 4).T
        return World(name, _mesh(grid, ("cp", "dp")), batch="dp")
    if base == "cp2dp4":
        return World(name, _mesh(devices.reshape(2, 4), ("cp", "dp")), batch="dp")
    if base == "dp2cp4":
        if kind in ("dp_auto", "cp_auto"):
            types = tuple(
                AxisType.Auto if kind.startswith(a) else AxisType.Explicit
                for a in ("dp", "cp")
            )
        mesh = _mesh(devices.reshape(2, 4), ("dp", "cp"), types)
        return World(name, mesh, batch="dp")
    if base == "dp2cp2tp2":
        mesh = _mesh(devices.reshape(2, 2, 2), ("dp", "cp", "tp"), types)
        return World(name, mesh, batch="dp", tensor="tp")
    if base == "tp2cp4":
        mesh = _mesh(devices.reshape(2, 4), ("tp", "cp"), types)
        return World(name, mesh, tensor="tp")
    if base == "tuple":
        axis = {"": ("a", "b"), "swapped": ("b", "a")}[kind]
        return World(name, _mesh(devices.reshape(2, 4), ("a", "b")), axis=axis)
    if base == "tuple2x2dp2":
        mesh = _mesh(devices.reshape(2, 2, 2), ("a", "dp", "b"))
        return World(name, mesh, axis=("a", "b"), batch="dp")
    if base.startswith("dp"):  # dp<n>x<cp>
        dp, cp = map(int, base[2:].split("x"))
        mesh = _mesh(devices[: dp * cp].reshape(dp, cp), ("dp", "cp"), types)
        return World(name, mesh, batch="dp")
    raise ValueError(name)


def _mesh(devices, names, types=AxisType.Explicit):
    types = types if isinstance(types, tuple) else (types,) * len(names)
    return Mesh(devices, names, axis_types=types)
