# SPDX-License-Identifier: Apache-2.0
"""Times compiled programs against each other on the devices of one process."""

import json
import pathlib
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def chain(function: Callable, out_count: int) -> Callable:
    """A program body that calls ``function`` once per operand, one after the other.

    One call lasts tens of microseconds and starting a program from Python hundreds:
    a program of many calls hides that. Each call waits for the one before it through
    an optimisation barrier, so XLA can neither merge nor overlap nor drop them.

    Args:
      function: (operand, weights) -> tuple of ``out_count`` arrays.
      out_count: number of its results.

    Returns:
      (list of operands, weights) -> list of all results, in order.
    """

    def body(operands, weights):
        results = []
        for operand in operands:
            if results:
                operand, *last = lax.optimization_barrier(
                    (operand, *results[-out_count:])
                )
                results[-out_count:] = last
            results.extend(function(operand, weights))
        return results

    return body


def interleaved_us(
    programs: dict[str, Callable[[], Any]],
    *,
    calls: int,
    rounds: int,
    executions: int = 2,
    seed: int = 0,
) -> dict[str, list[float]]:
    """Microseconds a call, all programs in random order in every round.

    The card slows down under load, so that one after the other would favour the
    first. Executions of a sample are started together: the host's work for the
    second hides behind the first. All devices must finish, so the slowest counts.

    Args:
      programs: name -> starts one execution and returns its results.
      calls: of the operator, in one execution.
      rounds: samples of each program, after two that do not count.
      executions: started together for one sample.
      seed: of the order; processes that measure together need the same.

    Returns:
      Name -> samples.
    """
    order = random.Random(seed)
    samples: dict[str, list[float]] = {name: [] for name in programs}
    for turn in range(rounds + 2):
        for name in order.sample(sorted(programs), len(programs)):
            start = time.perf_counter()
            results = [programs[name]() for _ in range(executions)]
            jax.block_until_ready(results)
            elapsed = time.perf_counter() - start
            if turn >= 2:
                samples[name].append(elapsed / (executions * calls) * 1e6)
    return samples


@jax.jit
def relative_distance(actual, wanted):
    """Relative L2 distance, on the devices: these arrays are large."""
    actual, wanted = actual.astype(jnp.float32), wanted.astype(jnp.float32)
    return jnp.linalg.norm(actual - wanted) / jnp.linalg.norm(wanted)


def emit(row: dict[str, Any], out: pathlib.Path | None) -> None:
    """Prints a row of a result file and, if one is given, appends it to that."""
    line = json.dumps(row)
    print(line, flush=True)
    if out:
        with out.open("a") as file:
            file.write(line + "\n")


def summary(samples: list[float]) -> dict[str, float]:
    """Median and deciles, in the fields of a result file."""
    tenths = statistics.quantiles(samples, n=10, method="inclusive")
    return {
        "us": round(statistics.median(samples), 2),
        "us_p10": round(tenths[0], 2),
        "us_p90": round(tenths[-1], 2),
    }
