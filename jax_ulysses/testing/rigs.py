# SPDX-License-Identifier: Apache-2.0
"""Where ranks live, and what their processes find in the environment."""

import os
from typing import Literal

# "shared": one process a rank, all on one GPU. "processes": one process a rank, each
# with a GPU of its own. "devices": one process with a GPU a rank. "cpu": one process
# with a virtual CPU device a rank.
type Rig = Literal["shared", "processes", "devices", "cpu"]

# Of the GPU's memory, for the XLA pools of all ranks on it together. The rest is for
# heaps, CUDA contexts (about half a GiB each) and code.
SHARED_POOLS = 0.5


def process_count(rig: Rig, num_ranks: int) -> int:
    """Processes that the ranks live in."""
    return num_ranks if rig in ("shared", "processes") else 1


def environment_of(rig: Rig, num_ranks: int) -> dict[str, str]:
    """Variables of a rank's process, besides those of this one."""
    flags = [
        flag
        for flag in os.environ.get("XLA_FLAGS", "").split()
        if "host_platform_device_count" not in flag
    ]
    if rig == "cpu":
        flags.append(f"--xla_force_host_platform_device_count={num_ranks}")
        return {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(flags)}
    common = {
        "JAX_PLATFORMS": "cuda",
        "XLA_FLAGS": " ".join(flags),
        # Loading a kernel while another one spins can deadlock in the driver.
        "CUDA_MODULE_LOADING": "EAGER",
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }
    if rig == "shared":
        share = SHARED_POOLS / num_ranks
        common["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{share:.3f}"
    return common
