# SPDX-License-Identifier: Apache-2.0
"""Sums over the heap, halves of backward passes and training steps on ranks.

Each function runs in the processes of a rig, in all of them alike, raises what a test
would, and returns what is worth recording.
"""

import dataclasses
import hashlib
import sysconfig
import time
import traceback

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import PartitionSpec as P

import jax_ulysses as ju
from jax_ulysses.models.config import TrainConfig
from jax_ulysses.models.data import Corpus
from jax_ulysses.models.presets import ModelConfig
from jax_ulysses.models.trainer import Trainer
from tests.gpu.basics import handler_calls, initialize
from tests.gpu.shards import SEQUENCE, local_shards, place, worst_error
from tests.gpu.sum_cases import sums, sums_along_both_axes
from tests.helpers import hlo, oracle
from tests.helpers.projection_cases import BACKWARD, Case
from tests.helpers.worlds import World


def weight_gradients(rank):
    """``jax.grad`` for a replicated weight; no collective of XLA on a shared GPU."""
    initialize(rank)
    p = rank.num_ranks
    errors = {}
    for operator in ("qkv_proj_a2a", "a2a_out_proj"):
        case = Case(operator, 2, 64, 128, 2 * p, p, 64, "bfloat16")
        in_specs, out_specs = case.specs(World("rig", rank.mesh))
        operands = case.operands(p)
        cts = case.cotangents(case.expected(operands, p))
        fn = case.call("cp", rank.implementation)
        mapped = jax.shard_map(
            lambda operands, cts, fn=fn: jax.vjp(fn, *operands)[1](cts),
            mesh=rank.mesh,
            in_specs=(in_specs, out_specs),
            out_specs=in_specs,
        )
        placed = (
            _place(rank.mesh, operands, in_specs),
            _place(rank.mesh, cts, out_specs),
        )
        with ju.settings(reductions="auto" if _shared(rank) else "heap"):
            compiled = jax.jit(mapped).lower(*placed).compile()
        assert not hlo.parse(compiled.as_text()).count, "a collective of XLA"
        expected = case.expected_gradients(operands, cts, p)
        for i, (found, wanted) in enumerate(zip(compiled(*placed), expected)):
            error = worst_error(found, wanted)
            assert error <= BACKWARD["bfloat16"], (operator, i, error)
            errors[f"{operator}[{i}]"] = error
    return errors


def halves(rank):
    """Split backward passes: the input's gradient bit for bit that of ``jax.grad``."""
    initialize(rank)
    p, name = rank.num_ranks, rank.implementation
    keywords = {"axis_name": "cp", "implementation": name}
    case = Case("qkv_proj_a2a", 2, 64, 128, 2 * p, p, 64, "bfloat16", bias=False)
    in_specs, out_specs = case.specs(World("rig", rank.mesh))
    operands = case.operands(p)
    cts = case.cotangents(case.expected(operands, p))
    fn = case.call("cp", name)

    def split(x, w, cts):
        heads = {"num_heads": 2 * p, "num_kv_heads": p}
        dx, dy = ju.qkv_proj_a2a_bwd_input(*cts, w, **heads, **keywords)
        main = jax.lax.pcast(jnp.zeros(w.shape, jnp.float32), "cp", to="varying")
        for _ in range(2):
            main = ju.qkv_proj_a2a_bwd_weight(x, dy, accumulate_into=main)
        return dx, ju.psum(main, "cp", via="heap")

    def whole(x, w, cts):
        w = jax.lax.pcast(w, "cp", to="varying")
        return jax.vjp(fn, x, w)[1](cts)[0]

    specs = (*in_specs, out_specs)
    placed = (*_place(rank.mesh, operands, in_specs), _place(rank.mesh, cts, out_specs))
    options = {"mesh": rank.mesh, "in_specs": specs}
    dx, dw = jax.jit(jax.shard_map(split, out_specs=(SEQUENCE, P()), **options))(
        *placed
    )
    same = jax.jit(jax.shard_map(whole, out_specs=SEQUENCE, **options))(*placed)
    for mine, theirs in zip(local_shards(dx), local_shards(same), strict=True):
        assert np.array_equal(mine, theirs)
    expected = case.expected_gradients(operands, cts, p)
    error = oracle.rel_l2(local_shards(dw)[0], 2 * np.asarray(expected[1], np.float64))
    assert error <= BACKWARD["bfloat16"], error
    return {"weight_error": error}


def main_gradient(rank):
    """Two halves of a step add to a donated main gradient where it is."""
    initialize(rank)
    case = Case("qkv_proj_a2a", 2, 64, 128, 2, 1, 64, "bfloat16", bias=False)
    x = case.operands(rank.num_ranks)[0]
    dy = np.roll(x, 1, axis=2)
    placed = _place(rank.mesh, (x, dy), (SEQUENCE, SEQUENCE))
    program = jax.jit(
        jax.shard_map(
            lambda x, dy, main: ju.qkv_proj_a2a_bwd_weight(x, dy, accumulate_into=main),
            mesh=rank.mesh,
            in_specs=(SEQUENCE, SEQUENCE, P("cp")),
            out_specs=P("cp"),
        ),
        donate_argnums=2,
    )
    columns = x.shape[2]
    shards = [np.split(a.astype(np.float64), rank.num_ranks, 1) for a in (x, dy)]
    parts = [np.einsum("btd,btc->dc", *pair) for pair in zip(*shards)]
    for dtype in (np.float32, ml_dtypes.bfloat16):
        zero = np.zeros((rank.num_ranks * columns, columns), dtype)
        # A copy by JAX: memory of NumPy would not be donated.
        main = place(rank.mesh, zero, P("cp")).copy()
        plan = program.lower(*placed, main).compile().memory_analysis()
        assert plan.alias_size_in_bytes == columns * columns * zero.itemsize, plan
        addresses = _addresses(main)
        for _ in range(2):
            main = program(*placed, main)
            assert _addresses(main) == addresses
        error = worst_error(main, 2 * np.concatenate(parts))
        assert error <= BACKWARD["bfloat16"], (dtype, error)


def _addresses(array):
    return [s.data.unsafe_buffer_pointer() for s in array.addressable_shards]


def _corpus() -> Corpus:
    """Some real text that every process has."""
    with open(f"{sysconfig.get_path('stdlib')}/argparse.py", "rb") as file:
        data = np.frombuffer(file.read(), np.uint8)
    return Corpus(
        train=data[:80_000], valid=data[80_000:], num_files=1, source="a file"
    )


def _trainer(rank, **changes) -> Trainer:
    p = rank.num_ranks
    config = TrainConfig(
        preset="test",
        model=ModelConfig(
            d_model=128, num_layers=2, num_heads=2 * p, num_kv_heads=p, head_dim=32,
            ffn_dim=256,
        ),
        dp=1, cp=p, seq_len=256, batch=2, steps=20, lr=1e-3, seed=0, dtype="bf16",
        token_order=ju.TokenOrder.CONTIGUOUS, implementation=rank.implementation,
        checkpoint_every=100, reductions="auto" if _shared(rank) else "heap",
    )  # fmt: skip
    return Trainer(dataclasses.replace(config, **changes), _corpus())


def _losses(trainer, steps):
    losses = []

    def on_step(record, _):
        losses.append(record.loss)
        return record.step == steps - 1

    state = trainer.run(trainer.init_state(), 0, on_step)
    return losses, jax.device_get(state["params"])


def training(rank, steps=10):
    """A few steps of the model, twice: no collective of XLA, the same bits."""
    trainer = _trainer(rank)
    initialize(rank, mesh=trainer.mesh)
    found = hlo.parse(trainer.compiled.as_text())
    assert not found.count, found.count
    # An exchange each way, forward and backward, and one sum.
    assert found.fused.total() == 5, found.fused
    losses, params = _losses(trainer, steps)
    assert losses[-1] < losses[0]
    again, same = _losses(trainer, steps)
    assert losses == again
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(same), strict=True):
        assert np.array_equal(a, b)
    return {"losses": losses, "memory": trainer.step_memory()}


def curve(rank, steps=30):
    """Losses and a hash of the parameters of a training run, and its handler calls."""
    trainer = _trainer(rank, steps=steps)
    initialize(rank, mesh=trainer.mesh)
    before = handler_calls()
    losses, params = _losses(trainer, steps)
    calls = handler_calls() - before
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(params):
        digest.update(np.asarray(leaf).tobytes())
    ju.finalize()
    return {"losses": losses, "params": digest.hexdigest(), "handler_calls": calls}


def _place(mesh, values, specs):
    if not isinstance(values, (tuple, list)):
        return place(mesh, values, specs)
    return tuple(place(mesh, v, s) for v, s in zip(values, specs, strict=True))


def _shared(rank) -> bool:
    """Whether all ranks are on one GPU, where XLA's collectives do not work."""
    return rank.sm_budget is not None


CASES = (
    sums,
    sums_along_both_axes,
    weight_gradients,
    halves,
    main_gradient,
    training,
)


def run_all(rank) -> dict:
    """Runs every case; name -> failure, result and seconds."""
    results = {}
    for case in CASES:
        start, failure, value = time.monotonic(), None, None
        try:
            value = case(rank)
        except Exception:
            failure = traceback.format_exc()[-2000:]
        ju.finalize()
        results[case.__name__] = {
            "failure": failure,
            "value": value,
            "seconds": round(time.monotonic() - start, 2),
        }
    return results
