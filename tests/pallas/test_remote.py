# SPDX-License-Identifier: Apache-2.0
"""``pallas_remote``: what it lowers to, and where it refuses. It never ran."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_ulysses as ju
from jax_ulysses.testing import abstract_gpu_mesh
from tests.helpers.worlds import abstract
from tests.pallas import gpu_programs as programs

REMOTE = "uses_xla_collective_metadata = true"


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("operator", ["qkv_proj_a2a", "q_proj_a2a"])
def test_one_kernel_and_no_all_to_all(operator, kv_heads):
    case = programs.case(operator, kv_heads=kv_heads)
    text = programs.lower(case, implementation="pallas_remote").as_text()
    assert programs.kernels_of(text) == 1
    assert programs.exchanges_of(text) == 0
    assert not programs.moves_of(text)
    assert text.count(REMOTE) == 1
    # The barrier that stands for the handshake at the entry.
    assert "skip_device_barrier = false" in text
    local = programs.lower(case, implementation="pallas").as_text()
    assert REMOTE not in local


def test_gradients():
    """The backward of a2a_out_proj is remote; that of the others exchanges by XLA."""
    case = programs.case("a2a_out_proj")
    text = programs.lower(case, True, implementation="pallas_remote").as_text()
    assert programs.kernels_of(text) == 2
    assert programs.exchanges_of(text) == 1
    assert text.count(REMOTE) == 1


@pytest.mark.parametrize("tokens", [1, 200])
def test_any_number_of_tokens_and_zigzag(tokens):
    case = programs.case("qkv_proj_a2a", 2, tokens % 2 == 0, tokens=tokens)
    text = programs.lower(case, implementation="pallas_remote").as_text()
    assert programs.exchanges_of(text) == 0


def _trace(mesh, axes):
    def call(x, w):
        return ju.q_proj_a2a(
            x, w, axis_name="cp", num_heads=4, implementation="pallas_remote"
        )

    mapped = jax.shard_map(
        call, mesh=mesh, in_specs=(P(*axes), P()), out_specs=P(axes[0], None, "cp")
    )
    x = abstract(mesh, (2, 64, 64), "bfloat16", P(*axes))
    jax.eval_shape(mapped, x, abstract(mesh, (64, 256), "bfloat16"))


def test_refusals():
    with pytest.raises(NotImplementedError, match=r"alone; it is \{'dp': 2, 'cp': 2\}"):
        _trace(abstract_gpu_mesh((2, 2), ("dp", "cp")), ("dp", "cp"))
    mesh = jax.sharding.Mesh(
        np.array(jax.devices()[:4]),
        ("cp",),
        axis_types=(jax.sharding.AxisType.Explicit,),
    )
    with pytest.raises(NotImplementedError, match="not on cpu"):
        _trace(mesh, (None, "cp"))
