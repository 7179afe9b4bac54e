# SPDX-License-Identifier: Apache-2.0
"""Results and gradients of the operators on ranks, against the oracle.

Runs in the processes of a rig. Weights are typed as differing between ranks, so that
each rank keeps its part of their gradient and XLA needs no collective of its own.
"""

import itertools
import time
import traceback

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

import jax_ulysses as ju
from jax_ulysses import TokenOrder
from tests.gpu.shards import (
    HEADS,
    RANKS,
    SEQUENCE,
    assert_same_bits,
    place,
    run,
    worst_error,
)
from tests.helpers import mapping_oracle, tags
from tests.helpers.projection_cases import BACKWARD, FORWARD, Case

WORKSPACE_BYTES = 64 << 20


def projection_cases(num_ranks: int) -> dict[str, tuple[Case]]:
    """Case name -> arguments of ``check_projection``."""
    p = num_ranks
    cases = {}
    for operator, zigzag, batch in itertools.product(
        ("qkv_proj_a2a", "a2a_out_proj"), (False, True), (1, 2)
    ):
        name = f"{operator}-{'zigzag' if zigzag else 'contiguous'}-b{batch}"
        case = Case(operator, batch, 96, 256, 2 * p, p, 64, "bfloat16", zigzag)
        cases[name] = (case,)
    for head_dim, dtype in ((80, "bfloat16"), (96, "float16"), (128, "bfloat16")):
        for operator in ("qkv_proj_a2a", "a2a_out_proj"):
            case = Case(operator, 1, 160, 320, 2 * p, p, head_dim, dtype, bias=False)
            cases[f"{operator}-h{head_dim}-{dtype}"] = (case,)
    if p > 2:
        case = Case("qkv_proj_a2a", 2, 64, 128, 2 * p, p // 2, 64, "bfloat16", True)
        cases["qkv_proj_a2a-replicated"] = (case,)
    rng = np.random.default_rng(p)
    for i in range(6):
        operator = ("qkv_proj_a2a", "a2a_out_proj")[i % 2]
        zigzag = bool(rng.integers(2))
        tokens = int(rng.integers(1, 200)) * (2 if zigzag else 1)
        case = Case(
            operator,
            int(rng.integers(1, 4)),
            tokens,
            8 * int(rng.integers(1, 70)),
            p * int(rng.integers(1, 5)),
            p,
            8 * int(rng.integers(1, 17)),
            "bfloat16",
            zigzag,
            bool(rng.integers(2)),
        )
        if case.heads % case.kv_heads:
            case = Case(**{**case.__dict__, "kv_heads": case.heads})
        cases[f"random-{i}"] = (case,)
    return cases


def check_projection(rank, case: Case) -> dict:
    """Errors of the results and the gradients of one case."""
    p, mesh = rank.num_ranks, rank.mesh
    operands = case.operands(p)
    expected = case.expected(operands, p)
    outs = expected if isinstance(expected, tuple) else (expected,)
    call = case.call("cp", rank.implementation)
    wide, narrow = (SEQUENCE, HEADS) if case.is_scatter else (HEADS, SEQUENCE)
    out_specs = (narrow,) * len(outs)

    def forward(*operands):
        out = call(*operands)
        return out if isinstance(out, tuple) else (out,)

    in_specs = (wide, *[P()] * (len(operands) - 1))
    result = run(mesh, forward, in_specs, out_specs, *operands)
    errors = {
        f"out{i}": worst_error(a, e) for i, (a, e) in enumerate(zip(result, outs))
    }
    limits = dict.fromkeys(errors, FORWARD[case.dtype])
    cotangents = (
        tuple(case.cotangents(expected))
        if len(outs) > 1
        else (case.cotangents(outs[0]),)
    )

    def backward(x, w, *rest):
        w = lax.pcast(w, "cp", to="varying")
        bias, cts = rest[: len(operands) - 2], rest[len(operands) - 2 :]
        _, back = jax.vjp(lambda x, w: forward(x, w, *bias), x, w)
        dx, dw = back(tuple(cts))
        return dx, dw[None]

    specs = (*in_specs, *out_specs)
    dx, dw = run(mesh, backward, specs, (wide, RANKS), *operands, *cotangents)
    cts = cotangents if len(outs) > 1 else cotangents[0]
    errors["dx"] = worst_error(dx, case.expected_gradients(operands, cts, p)[0])
    errors["dw"] = worst_error(dw, _weight_gradients(rank, case, operands, cts))
    limits |= {"dx": BACKWARD[case.dtype], "dw": BACKWARD[case.dtype]}
    bad = {n: e for n, e in errors.items() if not e <= limits[n]}
    return {
        "errors": errors,
        "failure": f"beyond the tolerance: {bad}" if bad else None,
    }


def _weight_gradients(rank, case, operands, cotangents):
    """What each rank contributes: the sequence-sharded factor is cut to its rows.

    Zeros for ranks of other processes.
    """
    parts, num_ranks = [], rank.num_ranks
    for r, device in enumerate(rank.mesh.devices):
        if device.process_index != jax.process_index():
            parts.append(np.zeros(operands[1].shape))
            continue
        rows = slice(r * case.tokens, (r + 1) * case.tokens)
        factor = operands[0] if case.is_scatter else cotangents
        own = np.zeros_like(factor)
        own[:, rows] = factor[:, rows]
        if case.is_scatter:
            parts.append(
                case.expected_gradients((own, *operands[1:]), cotangents, num_ranks)[1]
            )
        else:
            parts.append(case.expected_gradients(operands, own, num_ranks)[1])
    return np.stack(parts)


def check_exchange(rank, dtype: str, zigzag: bool, heads: int, head_dim: int) -> dict:
    """Scatter and gather of tagged elements, bit for bit."""
    p = rank.num_ranks
    order = TokenOrder.ZIGZAG if zigzag else TokenOrder.CONTIGUOUS
    kwargs = dict(token_order=order, implementation=rank.implementation)

    def there_and_back(x):
        y = ju.scatter_heads(x, "cp", **kwargs)
        return y, ju.gather_heads(y, "cp", **kwargs)

    mapped = jax.shard_map(
        there_and_back,
        mesh=rank.mesh,
        in_specs=(SEQUENCE,),
        out_specs=(HEADS, SEQUENCE),
    )
    program = jax.jit(mapped)
    for x in tags.planes((2, 10 * p, heads, head_dim), jnp.dtype(dtype)):
        y, z = program(place(rank.mesh, x, SEQUENCE))
        assert_same_bits(y, mapping_oracle.scatter(x, p, zigzag))
        copies = mapping_oracle.all_heads(heads, p)
        assert_same_bits(z, x[:, :, copies])
    return {"errors": {}, "failure": None}


def exchange_cases(num_ranks: int) -> dict[str, tuple]:
    """Case name -> arguments of ``check_exchange``."""
    cases = {
        f"exchange-{dtype}-{'zigzag' if zigzag else 'contiguous'}": (
            dtype,
            zigzag,
            2 * num_ranks,
            head_dim,
        )
        for dtype, zigzag, head_dim in (
            ("bfloat16", False, 64),
            ("bfloat16", True, 8),
            ("float32", False, 5),
            ("int8", True, 3),
            ("float16", True, 128),
        )
    }
    cases["exchange-one-head-a-rank"] = ("bfloat16", False, num_ranks, 64)
    return cases


def names(num_ranks: int) -> list[str]:
    """All cases, in the order in which they run."""
    return [*exchange_cases(num_ranks), *projection_cases(num_ranks)]


def run_all(rank, only=None) -> dict:
    """Runs every case on this rank; case name -> errors, failure and seconds."""
    ju.initialize(rank.mesh, "cp", WORKSPACE_BYTES, sm_budget=rank.sm_budget)
    p = rank.num_ranks
    jobs = {n: (check_exchange, a) for n, a in exchange_cases(p).items()}
    jobs |= {n: (check_projection, a) for n, a in projection_cases(p).items()}
    results = run_jobs(rank, jobs, only)
    ju.finalize()
    return results


def run_jobs(rank, jobs, only=None) -> dict:
    """Runs (check, its arguments) of every name, or of those in ``only``."""
    results = {}
    for name, (check, args) in jobs.items():
        if only is not None and name not in only:
            continue
        start = time.monotonic()
        try:
            results[name] = check(rank, *args)
        except Exception:
            results[name] = {"errors": {}, "failure": traceback.format_exc()[-1500:]}
        results[name]["seconds"] = round(time.monotonic() - start, 2)
    return results
