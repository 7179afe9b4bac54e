# SPDX-License-Identifier: Apache-2.0
"""Peer groups over the eight virtual devices, made and freed by each test."""

import itertools

import jax
import pytest

from jax_ulysses.ffi import targets

# Far from the ids that jax_ulysses.initialize hands out.
_sessions = itertools.count(1_000_000)


class World:
    """A mesh of 8 / P lines ("dp") of P ranks ("cp"), and the session of its group."""

    def __init__(self, num_ranks, deadline_ms, slot_bytes, start_epoch):
        self.num_ranks = num_ranks
        self.num_lines = jax.device_count() // num_ranks
        self.mesh = jax.make_mesh((self.num_lines, num_ranks), ("dp", "cp"))
        self.session = next(_sessions)
        self._options = dict(
            num_ranks=num_ranks,
            members=[
                (device.local_hardware_id, line, rank)
                for line, row in enumerate(self.mesh.devices)
                for rank, device in enumerate(row)
            ],
            slot_bytes=slot_bytes,
            num_slots=2,
            deadline_ms=deadline_ms,
            platform="cpu",
            start_epoch=start_epoch,
        )
        self.create()

    def create(self):
        targets.group_create(session=self.session, **self._options)

    def destroy(self):
        targets.group_destroy(self.session)

    def run(self, function, in_specs, out_specs, *arrays):
        """Runs a per-device function under jit and shard_map on global arrays."""
        placed = [
            jax.device_put(a, jax.NamedSharding(self.mesh, s))
            for a, s in zip(arrays, in_specs)
        ]
        mapped = jax.shard_map(
            function, mesh=self.mesh, in_specs=tuple(in_specs), out_specs=out_specs
        )
        return jax.jit(mapped)(*placed)


@pytest.fixture
def make_world():
    worlds = []

    def make(num_ranks=4, deadline_ms=20_000, slot_bytes=1 << 20, start_epoch=0):
        worlds.append(World(num_ranks, deadline_ms, slot_bytes, start_epoch))
        return worlds[-1]

    yield make
    for world in worlds:
        # A test may have freed it already.
        try:
            world.destroy()
        except ValueError as error:
            assert "no group" in str(error)
