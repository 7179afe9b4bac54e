# SPDX-License-Identifier: Apache-2.0
"""What the operators lower to on GPUs, without one."""

import contextlib
import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jax_ulysses as ju
from jax_ulysses import native
from jax_ulysses.ffi import targets
from jax_ulysses.testing import abstract_gpu_mesh, dry_group
from tests.helpers.worlds import abstract

HAS_CUDA = "cuda" in targets.build_info()["platforms"]
SEQUENCE, HEADS = P(None, "cp"), P(None, None, "cp")


@pytest.fixture
def make_group(monkeypatch):
    """Groups of four GPUs that are not there."""
    if not HAS_CUDA:
        # The lowering is Python's alone; what kernels refuse is tested where they are.
        monkeypatch.setattr(targets, "can_implement", lambda **_: None)

    @contextlib.contextmanager
    def make(**kwargs):
        mesh = abstract_gpu_mesh((4,), ("cp",))
        with dry_group(mesh, **kwargs):
            yield mesh

    return make


@pytest.fixture
def mesh(make_group):
    with make_group() as mesh:
        yield mesh


def _lower(mesh, function, in_specs, out_specs, *operands):
    mapped = jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
    traced = jax.jit(mapped).trace(*operands)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


def _project(x, w, **kwargs):
    return ju.qkv_proj_a2a(x, w, axis_name="cp", num_heads=8, num_kv_heads=4, **kwargs)


def _operands(mesh, dtype=jnp.bfloat16, d_model=64, head_dim=16, tokens=32):
    x = abstract(mesh, (2, 4 * tokens, d_model), dtype, SEQUENCE)
    return x, abstract(mesh, (d_model, 16 * head_dim), dtype)


def _targets_of(text):
    return re.findall(r"custom_call @(jax_ulysses[\w.]+)\(", text)


@pytest.mark.user_case(54)
@pytest.mark.parametrize("operator", ["qkv_proj_a2a", "a2a_out_proj"])
def test_more_elements_on_a_rank_than_32_bits_count(operator, make_group):
    """2^32 of them in x or the heads, and in the slot, of 8 GiB."""
    with make_group(workspace_bytes=1 << 35) as mesh:
        x, w = _operands(mesh, d_model=8192, head_dim=512, tokens=1 << 18)
        if operator == "qkv_proj_a2a":
            text = _lower(mesh, _project, (SEQUENCE, P()), (HEADS,) * 3, x, w)
        else:
            heads = abstract(mesh, (2, 4 << 18, 16, 512), x.dtype, HEADS)
            project = functools.partial(ju.a2a_out_proj, axis_name="cp")
            text = _lower(mesh, project, (HEADS, P()), SEQUENCE, heads, w)
    assert len(_targets_of(text)) == 1


def test_first_choice_on_a_gpu_is_cuda_as_a_collective(mesh):
    text = _lower(mesh, _project, (SEQUENCE, P()), (HEADS,) * 3, *_operands(mesh))
    assert _targets_of(text) == [targets.GEMM_A2A]
    taken = ju.taken_implementations()["qkv_proj_a2a"]
    assert taken["implementation"] == "cuda"
    # The call is in a function of its own, which is annotated where it is called.
    (call,) = re.findall(r"call @compute_on.*", text)
    assert '_xla_stream_annotation = "collective"' in call
    assert 'inlineable = "false"' in call
    # XLA takes a function for a collective only if it holds that call and nothing else.
    function = text[text.index("func.func private @compute_on(") :]
    operations = re.findall(r"stablehlo\.\w+", function[: function.index("return")])
    assert operations == ["stablehlo.custom_call"]


def test_collective_calls_can_be_switched_off(mesh):
    with ju.settings(collective_calls=False):
        text = _lower(mesh, _project, (SEQUENCE, P()), (HEADS,) * 3, *_operands(mesh))
    assert _targets_of(text) == [targets.GEMM_A2A]
    assert "_xla_stream_annotation" not in text


def test_gradient_is_the_other_dataflow(mesh):
    def loss(x, w):
        parts = _project(x, w)
        return sum(jnp.sum(jnp.square(p.astype(jnp.float32))) for p in parts)

    def gradients(x, w):
        return jax.grad(loss, argnums=(0, 1))(x, w)

    text = _lower(mesh, gradients, (SEQUENCE, P()), (SEQUENCE, P()), *_operands(mesh))
    assert sorted(_targets_of(text)) == [targets.A2A_GEMM, targets.GEMM_A2A]
    assert len(re.findall(r'call @compute_on.*annotation = "collective"', text)) == 2


def test_the_gathered_operand_is_made_for_gradients_only(mesh):
    def project(a, w):
        return ju.a2a_out_proj(a, w, axis_name="cp")

    def gradient(a, w):
        return jax.grad(lambda w: jnp.sum(project(a, w).astype(jnp.float32)))(w)

    a = abstract(mesh, (2, 128, 8, 16), jnp.bfloat16, HEADS)
    w = abstract(mesh, (128, 64), jnp.bfloat16)
    text = _lower(mesh, project, (HEADS, P()), SEQUENCE, a, w)
    (call,) = re.findall(rf"custom_call @{re.escape(targets.A2A_GEMM)}\(.*", text)
    assert "want_gathered = 0 : i64" in call
    assert call.endswith("(tensor<2x32x64xbf16>, tensor<0xbf16>)")
    text = _lower(mesh, gradient, (HEADS, P()), P(), a, w)
    (call,) = re.findall(rf"custom_call @{re.escape(targets.A2A_GEMM)}\(.*", text)
    assert "want_gathered = 1 : i64" in call
    assert call.endswith("(tensor<2x32x64xbf16>, tensor<2x32x128xbf16>)")


def test_exchanges(mesh):
    def there_and_back(x):
        return ju.gather_heads(2 * ju.scatter_heads(x, "cp"), "cp")

    x = abstract(mesh, (2, 128, 8, 16), jnp.float32, SEQUENCE)
    text = _lower(mesh, there_and_back, SEQUENCE, SEQUENCE, x)
    assert _targets_of(text) == [targets.EXCHANGE] * 2


def test_dry_programs_do_not_run(mesh8):
    """A session with id 0 never exists."""
    with pytest.raises(ValueError, match="no group for session 0"):
        targets.group_info(0)


REFUSALS = {
    "dtype": (dict(dtype=jnp.float32), "bfloat16 and float16 only"),
    "d_model": (dict(d_model=60), "multiple of 8"),
    "head_dim": (dict(head_dim=12), "multiple of 8"),
    "heap": (dict(d_model=1024, tokens=1 << 20), "bytes per slot, the group has"),
}


@pytest.mark.skipif(not HAS_CUDA, reason="built without nvcc and CUTLASS")
@pytest.mark.parametrize("case", REFUSALS)
def test_refusals_come_from_the_kernels(mesh, case):
    change, message = REFUSALS[case]
    with pytest.raises(NotImplementedError, match=message):
        _lower(
            mesh,
            lambda x, w: _project(x, w, implementation="cuda"),
            (SEQUENCE, P()),
            (HEADS,) * 3,
            *_operands(mesh, **change),
        )


def test_a_build_without_kernels_says_so(monkeypatch):
    """The one reason that a machine without nvcc can give."""
    if HAS_CUDA:
        pytest.skip("this build has kernels")
    with (
        dry_group(mesh := abstract_gpu_mesh((4,), ("cp",))),
        pytest.raises(NotImplementedError, match="contains no CUDA kernels"),
    ):
        _lower(
            mesh,
            lambda x, w: _project(x, w, implementation="cuda"),
            (SEQUENCE, P()),
            (HEADS,) * 3,
            *_operands(mesh),
        )


def test_description_names_the_width_of_each_dataflow():
    exchange = native.HeadExchange((8, 4), 16, 4, ("cp",))

    def width(dataflow, shapes, transposed):
        request = native.Request(
            "op", dataflow, exchange, transposed, "cuda", "bfloat16", shapes
        )
        return native.description(request)["width"]

    x, parts = (2, 32, 24), ((2, 128, 2, 16), (2, 128, 1, 16))
    assert width("gemm_a2a", (x, (24, 192)), False) == 24
    assert width("gemm_a2a", (x, (192, 24)), True) == 24
    assert width("a2a_gemm", (*parts, (192, 24)), False) == 24
    assert width("a2a_gemm", (*parts, (24, 192)), True) == 24


def _replicated_gradient(x, w, implementation):
    """Gradients of a projection whose 2 KV heads 4 ranks share."""

    def loss(x, w):
        parts = ju.qkv_proj_a2a(
            x,
            w,
            axis_name="cp",
            num_heads=8,
            num_kv_heads=2,
            implementation=implementation,
        )
        return sum(jnp.sum(jnp.sin(p.astype(jnp.float32))) for p in parts)

    return jax.grad(loss, argnums=(0, 1))(x, w)


def test_copies_of_heads_are_summed_by_the_fused_kernel(mesh):
    x = abstract(mesh, (2, 128, 64), jnp.bfloat16, SEQUENCE)
    w = abstract(mesh, (64, 12 * 16), jnp.bfloat16)
    text = _lower(
        mesh,
        lambda x, w: _replicated_gradient(x, w, "cuda"),
        (SEQUENCE, P()),
        (SEQUENCE, P()),
        x,
        w,
    )
    assert _targets_of(text) == [targets.GEMM_A2A, targets.A2A_GEMM]
    assert "want_gathered = 1 : i64" in text
