# SPDX-License-Identifier: Apache-2.0
"""What the operators lower to for GPUs, on a host without one; copies, and refusals."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jax_ulysses as ju
from jax_ulysses.pallas import config as configs
from jax_ulysses.testing import abstract_gpu_mesh
from tests.helpers.worlds import abstract
from tests.pallas import gpu_programs as programs


@pytest.mark.parametrize("operator", programs.OPERATORS)
def test_one_batch_element_in_contiguous_order_moves_nothing(operator):
    """Kernel and all-to-all alone; no packing, no transpose, no slices."""
    text = programs.lower(programs.case(operator)).as_text()
    segments = 3 if operator == "qkv_proj_a2a" else 1
    assert programs.kernels_of(text) == 1
    assert programs.exchanges_of(text) == segments
    assert not programs.moves_of(text)
    assert "stablehlo.dot_general" not in text


@pytest.mark.parametrize("operator", ["qkv_proj_a2a", "a2a_out_proj"])
@pytest.mark.parametrize("kwargs", [{"batch": 2}, {"zigzag": True}])
def test_other_cases_reorder_tokens(operator, kwargs):
    """One copy a segment by XLA; also shows that the test above sees copies."""
    text = programs.lower(programs.case(operator, **kwargs)).as_text()
    assert programs.kernels_of(text) == 1
    assert programs.moves_of(text)


@pytest.mark.parametrize("kv_heads", [2, 1])
def test_replicated_heads_move_nothing_forward(kv_heads):
    text = programs.lower(programs.case("qkv_proj_a2a", kv_heads=kv_heads)).as_text()
    assert programs.kernels_of(text) == 1
    assert not programs.moves_of(text)


@pytest.mark.parametrize("zigzag", [False, True], ids=["contiguous", "zigzag"])
@pytest.mark.parametrize("operator", programs.OPERATORS)
def test_gradients(operator, zigzag):
    """Two kernels and as many all-to-alls back as forward; weights by XLA's dot."""
    for batch, kv_heads in ((1, 4), (2, 2)):
        case = programs.case(operator, batch, zigzag, kv_heads)
        text = programs.lower(case, gradients=True).as_text()
        segments = 3 if operator == "qkv_proj_a2a" else 1
        assert programs.kernels_of(text) == 2
        assert programs.exchanges_of(text) == 2 * segments
        assert text.count("stablehlo.dot_general") == 1


@pytest.mark.parametrize("candidate", configs.CANDIDATES)
def test_every_tiling(candidate, monkeypatch):
    """Forward and backward: W as it lies, and its transpose."""
    monkeypatch.setattr(configs, "choose", lambda *_: candidate[0])
    for operator in ("qkv_proj_a2a", "a2a_out_proj"):
        case = programs.case(operator, head_dim=128)
        assert programs.kernels_of(programs.lower(case, gradients=True).as_text()) == 2


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
def test_head_dims(head_dim, dtype):
    for operator in ("qkv_proj_a2a", "a2a_out_proj"):
        case = programs.case(operator, head_dim=head_dim, dtype=dtype, bias=False)
        assert programs.kernels_of(programs.lower(case, gradients=True).as_text()) == 2


@pytest.mark.parametrize("tokens", [1, 3, 63, 200])
def test_any_number_of_tokens(tokens):
    for operator in ("qkv_proj_a2a", "a2a_out_proj"):
        text = programs.lower(programs.case(operator, tokens=tokens)).as_text()
        assert programs.kernels_of(text) == 1


def _project(mesh, dtype="bfloat16", width=256, head_dim=64, name="pallas"):
    def call(x, w):
        kwargs = dict(axis_name="cp", num_heads=8, num_kv_heads=4)
        return ju.qkv_proj_a2a(x, w, **kwargs, implementation=name)

    specs = ((P(None, "cp"), P()), (P(None, None, "cp"),) * 3)
    mapped = jax.shard_map(call, mesh=mesh, in_specs=specs[0], out_specs=specs[1])
    x = abstract(mesh, (1, 256, width), dtype, P(None, "cp"))
    w = abstract(mesh, (width, 16 * head_dim), dtype)
    jax.eval_shape(mapped, x, w)
    return ju.taken_implementations()["qkv_proj_a2a"]


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"dtype": "float32"}, "bfloat16 and float16, not float32"),
        ({"width": 40}, r"the left operand is \[40\] columns wide; .* 16"),
        ({"head_dim": 20}, r"the result is \[20, 40\] columns wide; .* 16"),
    ],
)
def test_refusals(kwargs, match):
    mesh = abstract_gpu_mesh((4,), ("cp",))
    with pytest.raises(NotImplementedError, match=match):
        _project(mesh, **kwargs)
    taken = _project(mesh, **kwargs, name=("pallas", "xla"))
    assert taken["implementation"] == "xla"


def test_other_devices():
    with pytest.raises(NotImplementedError, match="not on cpu"):
        _project(jax.make_mesh((4,), ("cp",), devices=jax.devices()[:4]))
    device = jax.sharding.AbstractDevice(
        device_kind="NVIDIA B200", num_cores=148, platform="gpu"
    )
    types = (jax.sharding.AxisType.Explicit,)
    mesh = jax.sharding.AbstractMesh(
        (4,), ("cp",), axis_types=types, abstract_device=device
    )
    with pytest.raises(NotImplementedError, match="Hopper GPUs have; .* 'NVIDIA B200'"):
        _project(mesh)


def test_exchanges_are_those_of_xla():
    """Nothing to fuse: one all-to-all, whatever the dtype."""
    mesh = abstract_gpu_mesh((4,), ("cp",))

    def call(x):
        return ju.scatter_heads(x, "cp", implementation="pallas")

    mapped = jax.shard_map(
        call, mesh=mesh, in_specs=P(None, "cp"), out_specs=P(None, None, "cp")
    )
    x = abstract(mesh, (1, 64, 8, 3), jnp.int8, P(None, "cp"))
    text = jax.jit(mapped).trace(x).lower(lowering_platforms=("cuda",)).as_text()
    assert programs.exchanges_of(text) == 1
    assert programs.kernels_of(text) == 0
