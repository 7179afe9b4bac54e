# SPDX-License-Identifier: Apache-2.0
"""A Hopper GEMM that reads and writes the exchange layout in place.

One kernel serves both dataflows. Where the columns of an operand lie is all that
differs: its producer reads A block by block, its epilogue stores the result block by
block (``layout.Segment``).

A CTA has three warpgroups and a ring of ``stages`` slots in shared memory:

- the producer issues TMA loads, for one tile after the other without a pause;
- two consumers multiply (WGMMA), each its half of the tile, and store it by TMA; halves
  of its rows while they multiply the next tile.

==========  ==================================  =====================================
barrier     who arrives, when                   who waits, before what
==========  ==================================  =====================================
full[s]     TMA, when both operands of the      both consumers, before WGMMA reads
            slot are in shared memory           the slot
empty[s]    each consumer, when its WGMMA has   the producer, before TMA overwrites
            read the slot                       the slot
==========  ==================================  =====================================

With ``split="tiles"`` each consumer is a *team* that multiplies and stores every second
tile. The slots go on being used in the order of the steps, but each team has barriers
of its own: who waits at a barrier has to see each of its phases, and a team does not
see those of the other's tiles.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_ulysses.pallas.config import CONSUMERS
from jax_ulysses.pallas.epilogue_mgpu import Epilogue, store_locally
from jax_ulysses.pallas.plan import Plan

# 512 registers a lane and four warps: the producer gives up what it does not need.
_PRODUCER_REGISTERS, _CONSUMER_REGISTERS = 40, 232


def cta(
    *refs, plan: Plan, a_smem, w_smem, out_smem, full, empty, store=store_locally
) -> None:
    """The body of every warpgroup of every CTA.

    Args:
      *refs: operands, then results, as ``gemm.gemm`` passes them.
      plan: what to compute.
      a_smem: [stages, rows, columns].
      w_smem: [stages, ...], a tile as it lies in memory.
      out_smem: [consumers, slots, rows, columns] of the epilogue.
      full: a barrier a stage, of each team.
      empty: a barrier a stage, of each team.
      store: what stores a piece of a block, as ``store_locally``.
    """
    a_refs, rest = refs[: len(plan.a)], refs[len(plan.a) :]
    w_ref, rest = rest[0], rest[1:]
    bias_ref, out_refs = (rest[0], rest[1:]) if plan.has_bias else (None, rest)
    wg = lax.axis_index("wg")

    @pl.when(wg == CONSUMERS)
    def _():
        plgpu.set_max_registers(_PRODUCER_REGISTERS, action="decrease")
        _produce(a_refs, w_ref, a_smem, w_smem, full, empty, plan)

    def consume(group):
        plgpu.set_max_registers(_CONSUMER_REGISTERS, action="increase")
        first, stop = plan.config.columns_of(group)
        epilogue = Epilogue(
            bias_ref, out_refs, out_smem.at[group], stop - first, plan, store
        )
        _consume(group, a_smem, w_smem, full, empty, epilogue, plan)

    if plan.config.split == "n":
        # Each warpgroup has columns of its own, and so code of its own.
        for group in range(CONSUMERS):
            pl.when(wg == group)(functools.partial(consume, group))
    else:
        pl.when(wg < CONSUMERS)(lambda: consume(wg))


def _num_tiles(plan: Plan):
    """Tiles of this CTA."""
    ctas, cta = lax.axis_size("ctas"), lax.axis_index("ctas")
    return lax.div(plan.tiles[0] * plan.tiles[1] - cta + ctas - 1, ctas)


def _for_each_tile(plan: Plan, body, first=0, stride: int = 1, carry=None):
    """Calls body(first row, first column, first step, carry) for a CTA's tiles.

    All warpgroups of a CTA walk the same tiles in the same order, or every
    ``stride``-th of them from ``first`` on. Each call returns the carry of the next.
    """
    config = plan.config
    ctas, cta = lax.axis_size("ctas"), lax.axis_index("ctas")

    def tile(i, carry):
        local = first + i * stride
        m, n = plgpu.planar_snake(
            local * ctas + cta,
            plan.tiles,
            "mn".index(config.band_dim),
            config.band,
        )
        return body(m * config.tile_m, n * config.tile_n, local * plan.k_steps, carry)

    count = lax.div(_num_tiles(plan) - first + stride - 1, stride)
    return lax.fori_loop(0, count, tile, carry)


def _team(step, plan: Plan):
    """Who multiplies what pipeline step ``step`` loads."""
    if plan.config.teams == 1:
        return 0
    return lax.rem(lax.div(step, plan.k_steps), plan.config.teams)


def _produce(a_refs, w_ref, a_smem, w_smem, full, empty, plan: Plan):
    config = plan.config

    def wait_until_empty(step):
        """Until who had the slot of a step before has read it."""
        team = _team(lax.max(step - config.stages, 0), plan)
        slot = lax.rem(step, config.stages)
        plgpu.barrier_wait(empty.at[team * config.stages + slot])

    def tile(m, n, step, _):
        team = _team(step, plan)
        for ref, segment in zip(a_refs, plan.a):
            per_block = plan.k_tiles(segment)

            def load(i, _, ref=ref, segment=segment, per_block=per_block, step=step):
                block, k = lax.div(i, per_block), lax.rem(i, per_block) * config.tile_k
                slot = lax.rem(step + i, config.stages)
                wait_until_empty(step + i)
                arrived = full.at[team * config.stages + slot]
                plgpu.copy_gmem_to_smem(
                    ref.at[block, pl.ds(m, config.tile_m), pl.ds(k, config.tile_k)],
                    a_smem.at[slot],
                    arrived,
                )
                row = segment.start + block * segment.width + k
                # Past the end of a block come rows that belong to the next one; they
                # meet A's zeros.
                index = (pl.ds(row, config.tile_k), pl.ds(n, config.tile_n))
                plgpu.copy_gmem_to_smem(
                    w_ref.at[index[::-1] if plan.w_transposed else index],
                    w_smem.at[slot],
                    arrived,
                )

            lax.fori_loop(0, segment.blocks * per_block, load, None)
            step = step + segment.blocks * per_block

    _for_each_tile(plan, tile)

    # So that every phase of every barrier has been seen.
    end = _num_tiles(plan) * plan.k_steps

    @pl.loop(0, config.stages)
    def _(i):
        wait_until_empty(end + i)


def _consume(group, a_smem, w_smem, full, empty, epilogue, plan: Plan):
    """Multiplies and stores the tiles of warpgroup ``group``.

    It may be traced if all warpgroups have the same columns.
    """
    config = plan.config
    team = 0 if config.teams == 1 else group
    rows, row = slice(None), 0
    if config.split == "m":
        row = group * config.group_m
        rows = pl.ds(row, config.group_m)
    column, stop = config.columns_of(group)
    columns = pl.ds(column, stop - column)

    # Every slot is empty at first; the producer asks the first team.
    @pl.when(team == 0)
    def _():
        @pl.loop(0, config.stages)
        def _(slot):
            plgpu.barrier_arrive(empty.at[slot])

    late = len(epilogue.offsets) if config.stores_late else 0

    def following(slot):
        return lax.select(slot == config.stages - 1, jnp.int32(0), slot + 1)

    def tile(m, n, _, carry):
        # The slot is carried along. One computed from the step would often be a
        # constant: ptxas then keeps the addresses of each in registers, and spills.
        first, finished = carry

        def multiply_tile(acc):
            def multiply(slot):
                plgpu.barrier_wait(full.at[team * config.stages + slot])
                if plan.w_transposed:
                    w = w_smem.at[slot, columns].transpose((1, 0))
                else:
                    w = w_smem.at[slot, :, columns]
                plgpu.wgmma(acc, a_smem.at[slot, rows], w)

            def release(slot):
                plgpu.barrier_arrive(empty.at[team * config.stages + slot])

            def step(_, before):
                slot = following(before)
                multiply(slot)
                # The step before has read its slot; this one is still running.
                plgpu.wgmma_wait(1)
                release(before)
                return slot

            slot = first
            multiply(slot)
            # The tile before is stored beside the first steps, a piece beside each.
            for piece in range(late):
                if 0 < piece < plan.k_steps:
                    slot = step(piece, slot)
                epilogue.store(finished, piece)
            done = min(max(late, 1), plan.k_steps)
            slot = lax.fori_loop(done, plan.k_steps, step, slot)
            plgpu.wgmma_wait(0)
            release(slot)
            return slot, epilogue.finish(acc[...], m + row, n + column)

        acc = plgpu.ACC((config.group_m, stop - column), jnp.float32)
        slot, finished = pl.run_scoped(multiply_tile, acc)
        if config.teams == 1:
            slot = following(slot)
        else:
            others = (config.teams - 1) * plan.k_steps
            slot = lax.rem(slot + 1 + others, config.stages)
        if late:
            return slot, finished
        epilogue.store_all(finished)
        return slot, None

    first = lax.rem(jnp.int32(team * plan.k_steps), config.stages)
    finished = epilogue.nothing() if late else None
    _, finished = _for_each_tile(plan, tile, team, config.teams, (first, finished))
    if late:
        epilogue.store_all(finished)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
