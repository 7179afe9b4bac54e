# SPDX-License-Identifier: Apache-2.0
"""One case of a fused projection, forward and backward, beside the oracle."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import jax_ulysses as ju
from jax_ulysses import TokenOrder
from tests.helpers import oracle

# Relative L2. Gradients of replicated heads are rounded once more than results.
FORWARD = {"float64": 1e-14, "float32": 2e-6, "bfloat16": 4e-3, "float16": 6e-4}
BACKWARD = {"float64": 1e-14, "float32": 3e-6, "bfloat16": 6e-3, "float16": 9e-4}


@dataclasses.dataclass(frozen=True)
class Case:
    """Global sizes of one call.

    Attributes:
      operator: "qkv_proj_a2a", "q_proj_a2a", "a2a_out_proj", "a2a_proj", or
        "a2a_proj/features" for the form with three axes.
      batch: B.
      tokens: T, on one rank.
      d_model: D.
      heads: N.
      kv_heads: K; used by "qkv_proj_a2a" only.
      head_dim: H.
      dtype: of all operands.
      zigzag: token order.
      bias: whether there is one.
    """

    operator: str = "qkv_proj_a2a"
    batch: int = 2
    tokens: int = 4
    d_model: int = 12
    heads: int = 8
    kv_heads: int = 8
    head_dim: int = 6
    dtype: str = "float32"
    zigzag: bool = False
    bias: bool = True

    @property
    def is_scatter(self) -> bool:
        return self.operator in ("qkv_proj_a2a", "q_proj_a2a")

    @property
    def segments(self) -> tuple[int, ...]:
        """Global heads per segment."""
        if self.operator == "qkv_proj_a2a":
            return (self.heads, self.kv_heads, self.kv_heads)
        return (self.heads,)

    def call(self, axis, implementation):
        """The per-device function."""
        kwargs = {
            "axis_name": axis,
            "implementation": implementation,
            "token_order": TokenOrder.ZIGZAG if self.zigzag else TokenOrder.CONTIGUOUS,
        }
        if self.operator == "qkv_proj_a2a":
            kwargs |= {"num_heads": self.heads, "num_kv_heads": self.kv_heads}
        if self.operator == "q_proj_a2a":
            kwargs |= {"num_heads": self.heads}
        fn = getattr(ju, self.operator.partition("/")[0])
        return lambda *operands: fn(*operands, **kwargs)

    def specs(self, w, weight=P(), bias=P()):
        """in_specs and out_specs."""
        rest = (weight, bias) if self.bias else (weight,)
        if self.operator == "qkv_proj_a2a":
            return (w.tokens, *rest), (w.heads,) * 3
        if self.operator == "q_proj_a2a":
            return (w.tokens, *rest), w.heads
        return (w.heads, *rest), w.tokens

    def operands(self, num_ranks: int, seed: int = 0) -> list[np.ndarray]:
        """Activations, weight and, with a bias, that; of order 1."""
        rng = np.random.default_rng(seed)
        length, features = self.tokens * num_ranks, self.heads * self.head_dim
        if self.is_scatter:
            width = sum(self.segments) * self.head_dim
            shapes = [(self.batch, length, self.d_model), (self.d_model, width)]
        else:
            x = (self.batch, length, self.heads, self.head_dim)
            if self.operator == "a2a_proj/features":
                x = (*x[:2], features)
            shapes = [x, (features, self.d_model)]
        if self.bias:
            shapes.append(shapes[1][1:])
        return [self.cast(rng.normal(size=s)) for s in shapes]

    def cotangents(self, expected, seed: int = 1):
        """Random cotangents of the result."""
        rng = np.random.default_rng(seed)
        if isinstance(expected, tuple):
            return tuple(self.cast(rng.normal(size=e.shape)) for e in expected)
        return self.cast(rng.normal(size=expected.shape))

    def cast(self, x):
        return np.asarray(x, np.float64).astype(jnp.dtype(self.dtype))

    def expected(self, operands, num_ranks: int):
        """The oracle's result."""
        x, weight, *bias = operands
        bias = bias[0] if bias else None
        if self.is_scatter:
            parts = oracle.qkv_proj(
                x, weight, bias, self.segments, num_ranks, self.zigzag
            )
            return parts if self.operator == "qkv_proj_a2a" else parts[0]
        return oracle.out_proj(x, weight, bias, num_ranks, self.zigzag)

    def expected_gradients(self, operands, cotangents, num_ranks: int):
        """The oracle's gradients of all operands."""
        x, weight = operands[:2]
        if self.is_scatter:
            if self.operator == "q_proj_a2a":
                cotangents = (cotangents,)
            gradients = oracle.qkv_proj_gradients(
                x, weight, self.segments, num_ranks, cotangents, self.zigzag
            )
        else:
            gradients = oracle.out_proj_gradients(
                x, weight, num_ranks, cotangents, self.zigzag
            )
        return gradients[: len(operands)]

    def assert_close(self, actual, expected, tolerance, what):
        """Every array within the relative L2 tolerance, finite, and of the dtype."""
        actual = actual if isinstance(actual, tuple) else (actual,)
        expected = expected if isinstance(expected, tuple) else (expected,)
        assert len(actual) == len(expected)
        for i, (a, e) in enumerate(zip(actual, expected)):
            assert a.dtype == jnp.dtype(self.dtype), (what, i, a.dtype)
            error = oracle.rel_l2(a, e)
            assert error <= tolerance, f"{what}[{i}] of {self}: rel L2 {error:.2e}"

    def check(self, w, implementation: str | None, seed: int = 0) -> None:
        """Compares result and all gradients with the oracle's."""
        ranks = w.num_ranks
        operands = self.operands(ranks, seed)
        expected = self.expected(operands, ranks)
        cotangents = self.cotangents(expected)
        in_specs, out_specs = self.specs(w)
        both = w.vjp(self.call(w.axis, implementation), in_specs, out_specs)
        placed = w.place(operands, in_specs)
        if isinstance(cotangents, tuple):
            placed_cotangents = w.place(cotangents, out_specs)
        else:
            placed_cotangents = w.put(cotangents, out_specs)
        out, gradients = both(placed, placed_cotangents)
        self.assert_close(out, expected, FORWARD[self.dtype], "result")
        expected_gradients = self.expected_gradients(operands, cotangents, ranks)
        self.assert_close(
            gradients, expected_gradients, BACKWARD[self.dtype], "gradient"
        )
