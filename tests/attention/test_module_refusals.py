# SPDX-License-Identifier: Apache-2.0
"""What ``UlyssesAttention`` refuses, and with which words."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from jax_ulysses.models import UlyssesAttention
from tests.helpers.attention_cases import LayerCase
from tests.helpers.modules import module_of
from tests.helpers.worlds import world


@pytest.mark.user_case(22)
def test_no_mesh():
    module = module_of(LayerCase())
    with pytest.raises(ValueError, match=r"needs a mesh: pass mesh=.*jax.set_mesh"):
        module(jnp.zeros((2, 16, 12)))


@pytest.mark.user_case(22)
def test_mesh_without_the_axis():
    w = world("cp4")
    module = module_of(LayerCase(), w, axis_name="sp")
    with pytest.raises(ValueError, match=r"'sp' is not in the mesh.*nothing would be"):
        module(jnp.zeros((2, 16, 12)))


@pytest.mark.user_case(22, 23)
@pytest.mark.parametrize("spec", [P(), P("dp"), P("dp", None, "cp"), P(None, "dp")])
def test_explicit_input_that_is_not_sharded_on_the_sequence(spec):
    w, case = world("dp2cp4-explicit"), LayerCase()
    module = module_of(case, w)
    with jax.set_mesh(w.mesh), pytest.raises(ValueError, match=r"expected \('cp',\)"):
        jax.eval_shape(module.__call__, w.abstract((2, 16, 12), spec=spec))


def test_explicit_batch_over_an_axis_that_is_not_named():
    """It would be gathered: every rank of that axis would compute all of the batch."""
    w = world("dp2cp4-explicit")
    module = module_of(LayerCase(), w, batch_axes=("data",))
    match = r"sharded over \['dp'\] on its batch axis.*pass batch_axes=\('dp',\)"
    with jax.set_mesh(w.mesh), pytest.raises(ValueError, match=match):
        jax.eval_shape(module.__call__, w.abstract((2, 16, 12), spec=P("dp", "cp")))
    replicated = w.abstract((2, 16, 12), spec=P(None, "cp"))
    with jax.set_mesh(w.mesh):
        assert jax.eval_shape(module.__call__, replicated).shape == (2, 16, 12)


def test_shapes_are_checked():
    w = world("dp2cp4-explicit")
    module = module_of(LayerCase(), w)
    with pytest.raises(ValueError, match=r"B=3 cannot be shared by 2 devices .*3 % 2"):
        module(jnp.zeros((3, 16, 12)))
    with pytest.raises(ValueError, match=r"x must have shape \[B, S, D\]"):
        module(jnp.zeros((16, 12)))
    zigzag = module_of(LayerCase(zigzag=True), w)
    with pytest.raises(ValueError, match=r"S=12 must be a multiple of 2P=8"):
        zigzag(jnp.zeros((2, 12, 12)))
    key = jnp.zeros((2, 5, 2, 4))
    with pytest.raises(ValueError, match="cross_attention=False, so cross_kv must not"):
        module(jnp.zeros((2, 16, 12)), cross_kv=(key, key))
    cross = module_of(LayerCase(cross=5, causal=False), w)
    with pytest.raises(ValueError, match="cross_attention=True, so cross_kv must be"):
        cross(jnp.zeros((2, 16, 12)))
    with pytest.raises(ValueError, match="d_model=10 is not divisible by num_heads=4"):
        UlyssesAttention(10, 4, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="num_heads=0 and num_kv_heads=0 must be"):
        UlyssesAttention(10, 0, rngs=nnx.Rngs(0))
    ids = jnp.zeros((2, 13), jnp.int32)
    with pytest.raises(ValueError, match=r"segment_ids .*= \(2, 14\).*; got \(2, 13\)"):
        module(jnp.zeros((2, 14, 12)), segment_ids=ids)


@pytest.mark.user_case(3)
def test_heads_that_do_not_fit_are_refused_with_numbers():
    w = world("cp8")
    module = module_of(LayerCase(heads=4, kv_heads=4), w, batch_axes=None)
    wanted = pytest.raises(ValueError, match=r"N=4, num_kv_heads K=4, P=8")
    with jax.set_mesh(w.mesh), wanted:
        jax.eval_shape(module.__call__, w.abstract((2, 16, 12), spec=w.tokens))
