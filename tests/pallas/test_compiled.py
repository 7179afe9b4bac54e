# SPDX-License-Identifier: Apache-2.0
"""What XLA compiles the operators to for four H200s, ahead of time, without any.

Needs JAX's CUDA plugin (``pip install 'jax[cuda13]'``), no GPU. XLA compiles for the
description of a device; Mosaic compiles its kernel when a program is loaded, so that
part is not seen here.
"""

import os
import re

import numpy as np
import pytest
from jax._src import xla_bridge
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

from jax_ulysses import mosaic, sharding
from jax_ulysses.testing import abstract_gpu_mesh
from tests.pallas import gpu_programs as programs

pytest.importorskip("jax_plugins.xla_cuda13", reason="needs jax-cuda13-plugin")

# What NVIDIA says of the H200: the fields without which XLA does not compile.
H200 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 151397597184
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
device_description_str: "NVIDIA H200"
"""


@pytest.fixture(scope="module")
def mesh():
    """Four devices to compile for."""
    # Finds the plugin although JAX_PLATFORMS leaves CUDA out. It needs no libraries
    # of CUDA to compile.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    xla_bridge.discover_pjrt_plugins()
    try:
        topology = topologies.get_topology_desc(
            "four", platform="cuda", target_config=H200, topology="1x1x4"
        )
    except Exception as error:
        pytest.skip(f"the plugin cannot describe devices here: {error}")
    types = (AxisType.Explicit,)
    return Mesh(np.array(topology.devices), ("cp",), axis_types=types)


@pytest.fixture
def compile_entry(mesh, monkeypatch):
    """Compiles a case; returns its entry computation, one operation a line."""
    device = abstract_gpu_mesh((4,), ("cp",)).abstract_device
    monkeypatch.setattr(mosaic, "_device", lambda: device)
    monkeypatch.setattr(sharding, "platform", lambda: "cuda")

    def compile_entry(case, **kwargs):
        text = programs.lower(case, mesh=mesh, **kwargs).compile().as_text()
        return re.findall(
            r"= (?:\([^=]*?\)|\S+) ([\w-]+)\(", text[text.index("ENTRY") :]
        )

    return compile_entry


FREE = {"parameter", "tuple", "get-tuple-element", "bitcast", "constant"}


def _work(operations):
    """What takes time, in order; asynchronous halves as one."""
    work = [o.removesuffix("-start") for o in operations if not o.endswith("-done")]
    return [o for o in work if o not in FREE]


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_gemm_a2a(kv_heads, compile_entry):
    """Kernel, one all-to-all a segment, and nothing else."""
    case = programs.case("qkv_proj_a2a", kv_heads=kv_heads)
    assert _work(compile_entry(case)) == ["custom-call", *["all-to-all"] * 3]


def test_a2a_gemm(compile_entry):
    """All-to-all, kernel, and nothing else."""
    case = programs.case("a2a_out_proj")
    assert _work(compile_entry(case)) == ["all-to-all", "custom-call"]


@pytest.mark.parametrize("kwargs", [{"batch": 2}, {"zigzag": True}])
@pytest.mark.parametrize("operator", ["qkv_proj_a2a", "a2a_out_proj"])
def test_other_orders_cost_one_pass_a_segment(operator, kwargs, compile_entry):
    work = _work(compile_entry(programs.case(operator, **kwargs)))
    segments = 3 if operator == "qkv_proj_a2a" else 1
    assert sorted(work) == sorted(["custom-call", *["all-to-all", "fusion"] * segments])


def test_reference_does_more(compile_entry):
    """The same operator by XLA alone packs before and unpacks after its exchange."""
    work = _work(compile_entry(programs.case("qkv_proj_a2a"), implementation="xla"))
    assert work.count("all-to-all") == 1
    assert work.index("all-to-all") >= 2
    assert "fusion" in work[work.index("all-to-all") :]
