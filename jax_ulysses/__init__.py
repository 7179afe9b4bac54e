# SPDX-License-Identifier: Apache-2.0
"""Ulysses context parallelism for JAX: all-to-alls fused with the GEMMs beside them."""

from jax_ulysses.api import a2a_out_proj as a2a_out_proj
from jax_ulysses.api import a2a_proj as a2a_proj
from jax_ulysses.api import gather_heads as gather_heads
from jax_ulysses.api import q_proj_a2a as q_proj_a2a
from jax_ulysses.api import qkv_proj_a2a as qkv_proj_a2a
from jax_ulysses.api import scatter_heads as scatter_heads
from jax_ulysses.attention import AttentionParams as AttentionParams
from jax_ulysses.attention import ulysses_attention as ulysses_attention
from jax_ulysses.config import settings as settings
from jax_ulysses.dispatch import available_implementations as available_implementations
from jax_ulysses.dispatch import taken_implementations as taken_implementations
from jax_ulysses.group import GroupReport as GroupReport
from jax_ulysses.group import finalize as finalize
from jax_ulysses.group import initialize as initialize
from jax_ulysses.order import from_zigzag as from_zigzag
from jax_ulysses.order import to_zigzag as to_zigzag
from jax_ulysses.reductions import psum as psum
from jax_ulysses.remat import CHECKPOINT_NAMES as CHECKPOINT_NAMES
from jax_ulysses.remat import checkpoint_policy as checkpoint_policy
from jax_ulysses.spec import TokenOrder as TokenOrder
from jax_ulysses.split import a2a_out_proj_bwd_input as a2a_out_proj_bwd_input
from jax_ulysses.split import a2a_out_proj_bwd_weight as a2a_out_proj_bwd_weight
from jax_ulysses.split import a2a_out_proj_fwd as a2a_out_proj_fwd
from jax_ulysses.split import q_proj_a2a_bwd_input as q_proj_a2a_bwd_input
from jax_ulysses.split import q_proj_a2a_bwd_weight as q_proj_a2a_bwd_weight
from jax_ulysses.split import qkv_proj_a2a_bwd_input as qkv_proj_a2a_bwd_input
from jax_ulysses.split import qkv_proj_a2a_bwd_weight as qkv_proj_a2a_bwd_weight

__version__ = "0.1.0"
