# SPDX-License-Identifier: Apache-2.0
"""The documentation is true: its code runs, its error messages are the real ones."""

import functools
import os
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from helpers import shadowed
from jax._src.core import ShardingTypeError
from jax.sharding import PartitionSpec as P

import jax_ulysses
import jax_ulysses.local_attention
from jax_ulysses import group, liveness
from jax_ulysses.ffi import targets
from jax_ulysses.models import UlyssesAttention
from jax_ulysses.watchdog import Watchdog

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
# Pages with programs, each of which runs in an interpreter of its own. README's two
# programs are independent; the blocks of a page in docs/ build on each other.
PROGRAMS = [
    pytest.param(program, id=f"{path.name}-{i}")
    for path in PAGES
    if (blocks := BLOCK.findall(path.read_text()))
    for i, program in enumerate(
        blocks if path.name == "README.md" else ["\n".join(blocks)]
    )
]


def test_enough_pages_have_programs():
    assert len(PROGRAMS) >= 6


@pytest.mark.parametrize("program", PROGRAMS)
def test_program_runs(program, tmp_path):
    ours = {"XLA_FLAGS", "PYTHONPATH"}
    environment = {k: v for k, v in os.environ.items() if k not in ours}
    environment["JAX_PLATFORMS"] = "cpu"
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, result.stderr


def _in_shard_map(function, *, shape=(1, 16, 8, 4), spec=P(None, "cp"), **options):
    mesh = jax.make_mesh((2, 4), ("dp", "cp"), (jax.sharding.AxisType.Auto,) * 2)
    call = jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, **options)
    jax.eval_shape(call, jax.ShapeDtypeStruct(shape, jnp.float32))


def _scatter(x):
    return jax_ulysses.scatter_heads(x, "cp")


def _project(num_heads, num_kv_heads, dtype=jnp.float32):
    def call(x):
        columns = (num_heads + 2 * num_kv_heads) * 2
        return jax_ulysses.qkv_proj_a2a(
            x,
            jnp.zeros((x.shape[2], columns), dtype),
            axis_name="cp",
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
        )

    _in_shard_map(call, shape=(1, 16, 8))


def _wrong_in_specs():
    mesh = jax.make_mesh((8,), ("cp",))
    with jax.set_mesh(mesh):
        jax.shard_map(_scatter, in_specs=P(None, "cp"), out_specs=P(None, "cp"))(
            jnp.zeros((1, 16, 8, 4))
        )


def _attention(length=16, **options):
    layer = UlyssesAttention(8, 4, rngs=nnx.Rngs(0), **options)
    with jax.set_mesh(jax.make_mesh((2, 4), ("dp", "cp"))):
        layer(jnp.zeros((2, length, 8)))


def _without_mesh():
    UlyssesAttention(8, 4, rngs=nnx.Rngs(0))(jnp.zeros((2, 16, 8)))


def _call_attention():
    def mine(query, key, value):
        return query

    x = jnp.zeros((1, 4, 2, 2))
    jax_ulysses.local_attention.call_attention(mine, x, x, x, is_causal=True)


def _scatter_on(mesh):
    call = jax.shard_map(
        lambda x: jax_ulysses.scatter_heads(x, "cp", implementation="host"),
        mesh=mesh,
        in_specs=P(None, "cp"),
        out_specs=P(None, None, "cp"),
    )
    sharding = jax.NamedSharding(mesh, P(None, "cp"))
    x = jax.device_put(jnp.zeros((1, 16, 8, 4)), sharding)
    jax.block_until_ready(jax.jit(call)(x))


def _other_device_order():
    devices = jax.devices()
    jax_ulysses.initialize(jax.make_mesh((8,), ("cp",)), "cp")
    try:
        swapped = devices[1::-1] + devices[2:]
        _scatter_on(jax.make_mesh((8,), ("cp",), devices=swapped))
    finally:
        jax_ulysses.finalize()


def _vmapped():
    mesh = jax.make_mesh((8,), ("cp",))
    jax_ulysses.initialize(mesh, "cp")
    one = functools.partial(
        jax_ulysses.scatter_heads, axis_name="cp", implementation="host"
    )
    tokens, heads = P(None, None, "cp"), P(None, None, None, "cp")
    call = jax.shard_map(jax.vmap(one), mesh=mesh, in_specs=tokens, out_specs=heads)
    sharding = jax.NamedSharding(mesh, tokens)
    x = jax.ShapeDtypeStruct((3, 1, 16, 8, 4), jnp.float32, sharding=sharding)
    try:
        jax.eval_shape(call, x)
    finally:
        jax_ulysses.finalize()


def _dead_process():
    child = subprocess.Popen(["sleep", "60"])
    process = liveness.find(child.pid, 1, [1])
    child.kill()
    child.wait()
    mesh = jax.make_mesh((8,), ("cp",))
    jax_ulysses.initialize(mesh, "cp")
    session = group.find(("cp",)).session
    watchdog = Watchdog()
    watchdog.watch(session, targets.group_info, targets.group_fail, [process])
    watchdog.forget(session)
    try:
        _scatter_on(mesh)
    finally:
        jax_ulysses.finalize()


def _look_up():
    with jax.set_mesh(jax.make_mesh((2, 4), ("dp", "cp"))):
        tokens = jax.reshard(jnp.zeros((2, 16), jnp.int32), P("dp", "cp"))
        nnx.Embed(50, 8, rngs=nnx.Rngs(0))(tokens)


def _source_folder():
    raise RuntimeError(shadowed.report(ROOT)["built"]["reason"])


# Heading in troubleshooting.md -> what provokes it.
MESSAGES = {
    "works on per-device shapes and must be called inside jax.shard_map": (
        lambda: jax_ulysses.scatter_heads(jnp.zeros((1, 16, 8, 4)), "cp")
    ),
    "is not in the mesh, whose axes are": (
        lambda: _in_shard_map(lambda x: jax_ulysses.scatter_heads(x, "sp"))
    ),
    "are not manual here": lambda: _in_shard_map(_scatter, axis_names={"cp"}),
    "needs jax.shard_map(..., check_vma=True), the default": (
        lambda: _in_shard_map(_scatter, check_vma=False)
    ),
    "is replicated over axis": lambda: _in_shard_map(
        _scatter, shape=(2, 16, 8, 4), spec=P("dp")
    ),
    "does not match the specs of the input": _wrong_in_specs,
    "to provide output PartitionSpec for the gather indexing": _look_up,
    "the source folder jax_ulysses/ shadows the installed package": _source_folder,
    "N must be a multiple of P": lambda: _project(6, 6),
    "N must be a multiple of K": lambda: _project(8, 3),
    "K must be a multiple of P (KV heads are split) or P a multiple of K": (
        lambda: _project(12, 6)
    ),
    "tokens, which P=4 ranks cannot share": (
        lambda: _in_shard_map(
            lambda x: jax_ulysses.gather_heads(x, "cp"),
            shape=(1, 10, 8, 4),
            spec=P(None, None, "cp"),
        )
    ),
    "TokenOrder.ZIGZAG cuts S into 2P chunks": (
        lambda: _in_shard_map(
            lambda x: jax_ulysses.scatter_heads(
                x, "cp", token_order=jax_ulysses.TokenOrder.ZIGZAG
            ),
            shape=(1, 12, 8, 4),
        )
    ),
    "cast one of them": lambda: _project(8, 8, jnp.bfloat16),
    "runs on cuda devices, not on cpu": (
        lambda: _in_shard_map(
            lambda x: jax_ulysses.scatter_heads(x, "cp", implementation="cuda")
        )
    ),
    "vmap is only supported for the ffi_call primitive": _vmapped,
    "device order differs from the one given to initialize": _other_device_order,
    "ended without jax_ulysses.finalize()": _dead_process,
    "UlyssesAttention needs a mesh": _without_mesh,
    "is sharded over nothing on its sequence axis": _attention,
    "so the layer cannot pad it": (
        lambda: _attention(15, token_order=jax_ulysses.TokenOrder.ZIGZAG)
    ),
    "takes no keyword": _call_attention,
}


_ERRORS = (ValueError, NotImplementedError, RuntimeError, ShardingTypeError)


@pytest.mark.parametrize("fragment", MESSAGES)
def test_message_is_real_and_explained(fragment):
    with pytest.raises(_ERRORS) as caught:
        MESSAGES[fragment]()
    message = " ".join(str(caught.value).split())
    assert fragment in message
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    assert f"`{fragment}`" in page


def test_every_quoted_message_is_provoked():
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    quoted = set(re.findall(r"^### `(.*)`$", page, re.MULTILINE))
    assert quoted == set(MESSAGES)
