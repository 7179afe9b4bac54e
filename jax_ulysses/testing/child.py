# SPDX-License-Identifier: Apache-2.0
"""One process of ``run_ranks``: ``python -m jax_ulysses.testing.child <job>``."""

import contextlib
import importlib
import json
import logging
import os
import pathlib
import sys
import time
from typing import Any

import jax
import numpy as np
from jax._src import distributed
from jax.sharding import AxisType, Mesh

from jax_ulysses import sm_budget as budgets
from jax_ulysses.testing.ranks import Rank
from jax_ulysses.testing.rigs import process_count


def main() -> None:
    """Runs the job, writes the result and ends the process at once."""
    job = json.loads(sys.argv[1])
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    sys.path += job["paths"]
    processes = process_count(job["rig"], job["num_ranks"])
    if processes > 1:
        jax.distributed.initialize(
            f"127.0.0.1:{job['port']}",
            processes,
            job["index"],
            local_device_ids=[0 if job["rig"] == "shared" else job["index"]],
        )
    devices = jax.devices()[: job["num_ranks"]]
    if len(devices) < job["num_ranks"]:
        sys.exit(f"{len(devices)} devices, {job['num_ranks']} ranks")
    mesh = Mesh(np.array(devices), ("cp",), axis_types=(AxisType.Explicit,))
    sm_budget = None
    if job["rig"] == "shared":
        num_sms = devices[job["index"]].core_count
        sm_budget = budgets.shared(num_sms, job["num_ranks"])
    rank = Rank(
        index=job["index"],
        num_ranks=job["num_ranks"],
        mesh=mesh,
        sm_budget=sm_budget,
        implementation="host" if job["rig"] == "cpu" else "cuda",
    )
    module, _, function = job["target"].partition(":")
    value = getattr(importlib.import_module(module), function)(rank, *job["args"])
    result = pathlib.Path(job["result"])
    result.with_suffix(".part").write_text(json.dumps(value))
    result.with_suffix(".part").rename(result)
    if processes > 1:
        _leave(job["index"], processes)
    sys.stdout.flush()
    sys.stderr.flush()
    # Not through JAX's shutdown, which waits for processes that a test has killed.
    os._exit(0)


def _leave(index: int, processes: int) -> None:
    """Lets process 0, which holds the store that all others listen to, go last."""
    client: Any = distributed.global_state.client
    key = "jax_ulysses/testing/left/{}".format
    client.key_value_set(key(index), "")
    for other in range(processes) if index == 0 else ():
        with contextlib.suppress(Exception):  # A test may have killed it.
            client.blocking_key_value_get(key(other), 5000)
    if index == 0:
        time.sleep(0.5)


if __name__ == "__main__":
    main()
