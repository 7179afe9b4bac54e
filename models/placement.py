# SPDX-License-Identifier: Apache-2.0
"""Where a run's arrays live: the mesh, and NumPy arrays placed on it."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

import jax_ulysses

from .config import ConfigError

AXES = ("dp", "cp")


def make_mesh(dp: int, cp: int, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Returns a (dp, cp) mesh over the first of `devices`, with Explicit axes.

    Explicit axes put every array's layout into its type: an activation that is not
    sharded over cp by mistake is an error while tracing and not a silent all-gather.
    `UlyssesAttention` makes the axes manual for its own part.

    Args:
      dp: Ranks on the data-parallel axis.
      cp: Ranks on the context-parallel axis.
      devices: None takes those of all processes.

    Raises:
      ConfigError: If there are fewer devices than dp * cp, or a process has none of
        them.
    """
    everywhere = devices is None
    devices = jax.devices() if everywhere else devices
    if len(devices) < dp * cp:
        platform = devices[0].platform
        hint = "" if platform == "cpu" else "; JAX_PLATFORMS=cpu takes virtual ones"
        raise ConfigError(
            f"dp {dp} x cp {cp} needs {dp * cp} devices, there are {len(devices)} "
            f"of platform {platform}{hint}"
        )
    devices = devices[: dp * cp]
    idle = jax.process_count() - len({d.process_index for d in devices})
    if everywhere and idle:
        raise ConfigError(
            f"dp {dp} x cp {cp} leaves {idle} of {jax.process_count()} processes "
            "without a device: start fewer, or raise dp"
        )
    return jax.make_mesh((dp, cp), AXES, devices=devices)


def put(tree, sharding: NamedSharding):
    """Places NumPy arrays, which every process has whole, without any communication."""
    if sharding.is_fully_addressable:
        return jax.device_put(tree, sharding)
    return jax.tree.map(
        lambda a: jax.make_array_from_callback(a.shape, sharding, lambda i: a[i]), tree
    )


@functools.cache
def zigzag_order(seq_len: int, num_ranks: int) -> np.ndarray:
    """Returns which token of the plain sequence stands at each place."""
    plain = jnp.arange(seq_len)
    return np.asarray(jax_ulysses.to_zigzag(plain, num_ranks, axis=0))
