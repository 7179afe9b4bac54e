# SPDX-License-Identifier: Apache-2.0
"""What an operator is asked to do, and every check of its arguments.

All shape validation of the library lives here. A wrong argument is a
``ValueError`` at trace time that names the numbers and the rule.
"""

import dataclasses
import enum
import math
import numbers

import jax.numpy as jnp


class TokenOrder(enum.Enum):
    """Which global tokens a rank's sequence shard holds.

    Attributes:
      CONTIGUOUS: rank r holds tokens [r*T, (r+1)*T).
      ZIGZAG: the sequence is cut into 2P chunks; rank r holds chunk r, then
        chunk 2P-1-r. This balances causal attention in ring schemes; Ulysses
        accepts it so that data pipelines made for those keep working.
    """

    CONTIGUOUS = "contiguous"
    ZIGZAG = "zigzag"

    @classmethod
    def _missing_(cls, value):
        raise ValueError(
            f"token_order={value!r} must be one of {[o.value for o in cls]}, or a "
            "TokenOrder."
        )


@dataclasses.dataclass(frozen=True)
class HeadExchange:
    """The mapping between sequence shards and head shards: all of the routing.

    A *segment* is a run of heads that is divided over the ranks by itself:
    Q, K and V are three segments, an attention output is one.

    Attributes:
      heads: global head count of each segment, before the exchange.
      head_dim: H.
      num_ranks: P.
      axis_name: mesh axes that make up the context-parallel axis, major first.
      token_order: tokens of a sequence shard.
    """

    heads: tuple[int, ...]
    head_dim: int
    num_ranks: int
    axis_name: tuple[str, ...]
    token_order: TokenOrder = TokenOrder.CONTIGUOUS

    def __post_init__(self):
        for num_heads in self.heads:
            check_heads("heads", num_heads, self.num_ranks)

    @property
    def local_heads(self) -> tuple[int, ...]:
        """Heads of each segment on one rank."""
        return tuple(max(m // self.num_ranks, 1) for m in self.heads)

    @property
    def replicas(self) -> tuple[int, ...]:
        """How many ranks hold each head of a segment (1 unless it is replicated)."""
        return tuple(max(self.num_ranks // m, 1) for m in self.heads)

    @property
    def num_columns(self) -> int:
        """Width of all segments side by side: C."""
        return sum(self.heads) * self.head_dim


@dataclasses.dataclass(frozen=True)
class Request:
    """One call of a dataflow, as an implementation sees it before accepting it.

    Attributes:
      operator: public name, for messages.
      dataflow: "scatter", "gather", "gemm_a2a" or "a2a_gemm".
      exchange: the routing.
      w_transposed: the GEMM multiplies by the transpose of the weight operand.
      platform: lower-case platform of the mesh, such as "cpu" or "cuda".
      dtype: name of the payload's dtype.
      shapes: shapes of all array operands, per device.
      want_gathered: of "a2a_gemm": whether the gathered operand is a result too.
    """

    operator: str
    dataflow: str
    exchange: HeadExchange
    w_transposed: bool
    platform: str
    dtype: str
    shapes: tuple[tuple[int, ...], ...]
    want_gathered: bool = True


GEMM_DTYPES = ("float32", "bfloat16", "float16", "float64")


def arrays(*operands) -> tuple:
    """Arrays of what JAX takes for one, such as Flax's parameters; None stays."""
    return tuple(None if x is None else jnp.asarray(x) for x in operands)


def _check_count(what: str, count) -> None:
    if isinstance(count, bool) or not isinstance(count, numbers.Integral):
        raise ValueError(f"{what}={count!r} must be a whole number.")


def check_heads(what: str, num_heads: int, num_ranks: int) -> None:
    """Raises ValueError unless heads can be split or replicated over the ranks."""
    _check_count(what, num_heads)
    if num_heads < 1:
        raise ValueError(f"{what}={num_heads}: must be at least 1.")
    if num_heads % num_ranks and num_ranks % num_heads:
        raise ValueError(
            f"{what}={num_heads} cannot be divided over P={num_ranks} ranks: "
            f"{what} % P must be 0 (split) or P % {what} must be 0 (replicate), "
            f"but {num_heads} % {num_ranks} = {num_heads % num_ranks} and "
            f"{num_ranks} % {num_heads} = {num_ranks % num_heads}."
        )


def check_query_heads(num_heads: int, num_kv_heads: int, num_ranks: int) -> None:
    """Raises ValueError unless N, K and P fit together."""
    _check_count("num_heads", num_heads)
    _check_count("num_kv_heads", num_kv_heads)
    rule = (
        f"num_heads N={num_heads}, num_kv_heads K={num_kv_heads}, P={num_ranks} "
        "(counts on one rank, after any tensor-parallel split)"
    )
    if num_heads < 1 or num_kv_heads < 1:
        raise ValueError(f"{rule}: head counts must be at least 1.")
    if num_heads % num_kv_heads:
        raise ValueError(
            f"{rule}: N must be a multiple of K, but {num_heads} % {num_kv_heads} = "
            f"{num_heads % num_kv_heads}."
        )
    if num_heads % num_ranks:
        raise ValueError(
            f"{rule}: N must be a multiple of P, but {num_heads} % {num_ranks} = "
            f"{num_heads % num_ranks}. Use a P that divides N."
        )
    if num_kv_heads % num_ranks and num_ranks % num_kv_heads:
        raise ValueError(
            f"{rule}: K must be a multiple of P (KV heads are split) or P a multiple "
            f"of K (KV heads are replicated), but {num_kv_heads} % {num_ranks} = "
            f"{num_kv_heads % num_ranks} and {num_ranks} % {num_kv_heads} = "
            f"{num_ranks % num_kv_heads}."
        )


def check_rank(name: str, shape: tuple[int, ...], letters: str) -> None:
    """Raises ValueError unless ``shape`` has one dimension for each letter."""
    if len(shape) != len(letters.split()):
        raise ValueError(
            f"{name} must have shape [{letters.replace(' ', ', ')}], got {shape}."
        )
    if math.prod(shape) == 0:
        raise ValueError(f"{name} is empty: shape {shape}.")


def check_tokens(name: str, length: int, num_ranks: int, order: TokenOrder, *, local):
    """Raises ValueError unless the sequence length fits ranks and token order.

    Args:
      name: operand the length belongs to.
      length: T if ``local``, else S.
      num_ranks: P.
      order: token order of the sequence shards.
      local: whether ``length`` is per rank.
    """
    if not local and length % num_ranks:
        raise ValueError(
            f"{name} has S={length} tokens, which P={num_ranks} ranks cannot share: "
            f"{length} % {num_ranks} = {length % num_ranks}. Pad the sequence, or use "
            "jax_ulysses.models.UlyssesAttention, which pads and masks."
        )
    chunk_of = length if local else length // num_ranks
    if order is TokenOrder.ZIGZAG and chunk_of % 2:
        raise ValueError(
            f"TokenOrder.ZIGZAG cuts S into 2P chunks, so T = S / P must be even; "
            f"{name} has T={chunk_of} with P={num_ranks}."
        )


def check_payload(name: str, dtype) -> None:
    """Raises ValueError for dtypes of which several elements share a byte.

    XLA:CPU (jaxlib 0.11.2) aborts the process in an all-to-all of these.
    """
    dtype = jnp.dtype(dtype)
    if dtype == jnp.bool_ or jnp.issubdtype(dtype, jnp.complexfloating):
        return
    info = jnp.iinfo if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo
    if info(dtype).bits < 8:
        raise ValueError(
            f"{name} has dtype {dtype.name} of {info(dtype).bits} bits; an exchange "
            "moves whole bytes. Convert it to int8 or float8, or pack it into uint8."
        )


def check_gemm_dtype(name: str, dtype) -> None:
    """Raises ValueError for payloads that a projection cannot multiply."""
    if jnp.dtype(dtype).name not in GEMM_DTYPES:
        raise ValueError(
            f"{name} has dtype {jnp.dtype(dtype).name}; projections take "
            f"{', '.join(GEMM_DTYPES)}."
        )


def check_same_dtype(name: str, dtype, ref_name: str, ref_dtype) -> None:
    """Raises ValueError unless two operands share a dtype; nothing is cast."""
    if jnp.dtype(dtype) != jnp.dtype(ref_dtype):
        raise ValueError(
            f"{name} has dtype {jnp.dtype(dtype).name} but {ref_name} has "
            f"{jnp.dtype(ref_dtype).name}; cast one of them."
        )


def check_weight(name, shape, rows, rows_mean, cols, cols_mean):
    """Raises ValueError unless a weight has the shape that heads and inputs imply.

    ``cols`` None leaves the number of columns free.
    """
    check_rank(name, shape, "rows cols")
    if shape[0] != rows:
        raise ValueError(
            f"{name} has {shape[0]} rows, expected {rows} ({rows_mean}); "
            f"its shape is {shape}."
        )
    if cols is not None and shape[1] != cols:
        raise ValueError(
            f"{name} has {shape[1]} columns, expected {cols} ({cols_mean}); "
            f"its shape is {shape}."
        )


def check_bias(name: str, shape: tuple[int, ...], cols: int) -> None:
    """Raises ValueError unless a bias has one element per output column."""
    if shape != (cols,):
        raise ValueError(f"{name} must have shape ({cols},), got {shape}.")
