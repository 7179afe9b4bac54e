# SPDX-License-Identifier: Apache-2.0
"""One call of an attention layer with any set of features, beside the oracle."""

import dataclasses

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

import jax_ulysses as ju
from jax_ulysses import AttentionParams, TokenOrder
from tests.helpers import mapping_oracle, oracle

FORWARD, BACKWARD = 3e-6, 2e-5


@dataclasses.dataclass(frozen=True)
class LayerCase:
    """Global sizes and features; letters as in the library's table.

    Attributes:
      batch: B.
      length: S.
      d_model: D.
      heads: N.
      kv_heads: K.
      head_dim: H.
      causal: as in ``ulysses_attention``.
      window: likewise; integers only.
      rope_theta: likewise.
      bias: biases on both projections.
      qk_norm: scales for queries and keys.
      sinks: a logit a head.
      segments: document ids that differ between rows.
      padding: real lengths that differ between rows, one token at least.
      positions: explicit positions that are not 0..S-1.
      cross: length of cross keys, 0 for none.
      joint: length of joint keys, 0 for none.
      zigzag: token order.
    """

    batch: int = 2
    length: int = 16
    d_model: int = 12
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 4
    causal: bool = True
    window: int | None = None
    rope_theta: float | None = 100.0
    bias: bool = False
    qk_norm: bool = False
    sinks: bool = False
    segments: bool = False
    padding: bool = False
    positions: bool = False
    cross: int = 0
    joint: int = 0
    zigzag: bool = False

    def params(self, seed=0) -> dict[str, np.ndarray]:
        """Parameters by the names of ``AttentionParams``."""
        rng = np.random.default_rng(seed)
        total = self.heads + (0 if self.cross else 2 * self.kv_heads)
        shapes = {
            "w_qkv": (self.d_model, total * self.head_dim),
            "w_out": (self.heads * self.head_dim, self.d_model),
        }
        if self.bias:
            shapes |= {"b_qkv": (total * self.head_dim,), "b_out": (self.d_model,)}
        if self.qk_norm:
            shapes |= {"q_norm": (self.head_dim,)}
            if not self.cross:
                shapes |= {"k_norm": (self.head_dim,)}
        if self.sinks:
            shapes |= {"sinks": (self.heads,)}
        return {
            n: rng.normal(size=s).astype(np.float32)
            / (s[0] ** 0.5 if len(s) > 1 else 1)
            for n, s in shapes.items()
        }

    def x(self, seed=1) -> np.ndarray:
        """[B, S, D] in true order."""
        rng = np.random.default_rng(seed)
        return rng.normal(size=(self.batch, self.length, self.d_model)).astype(
            np.float32
        )

    def tokens(self, seed=2) -> dict[str, np.ndarray]:
        """Per-token inputs [B, S] in true order, those in use."""
        rng = np.random.default_rng(seed)
        rows, result = range(self.batch), {}
        if self.positions:
            steps = rng.integers(1, 4, (self.batch, self.length))
            result["positions"] = np.cumsum(steps, axis=1).astype(np.int32)
        if self.segments:
            ids = [np.arange(self.length) // (3 + 2 * row) for row in rows]
            result["segment_ids"] = np.stack(ids).astype(np.int32)
        if self.padding:
            real = [max(1, self.length - 1 - 4 * row) for row in rows]
            ids = np.arange(self.length)
            result["padding_mask"] = np.stack([ids < n for n in real])
        return result

    def context(self, seed=3) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Cross and joint keys and values, those in use."""
        rng = np.random.default_rng(seed)
        return {
            name: tuple(
                rng.normal(
                    size=(self.batch, length, self.kv_heads, self.head_dim)
                ).astype(np.float32)
                for _ in range(2)
            )
            for name, length in (("cross_kv", self.cross), ("joint_kv", self.joint))
            if length
        }

    def mask(self, tokens) -> np.ndarray:
        """[B, S, L] in true order."""
        if self.cross:
            return np.ones((self.batch, self.length, self.cross), bool)
        return oracle.mask_of(
            self.batch,
            self.length,
            causal=self.causal,
            window=self.window,
            segments=tokens.get("segment_ids"),
            padding=tokens.get("padding_mask"),
            num_joint=self.joint,
        )

    def oracle(self, x, params, tokens, context) -> oracle.Layer:
        """The dense layer, in true order."""
        return oracle.Layer(
            x,
            params,
            self.heads,
            self.kv_heads,
            self.mask(tokens),
            rope_theta=self.rope_theta,
            positions=tokens.get("positions"),
            padding=tokens.get("padding_mask"),
            **context,
        )

    def call(self, axis, implementation=None, **extra):
        """Per-device function of (x, params, tokens, context)."""

        def fn(x, params, tokens, context):
            return ju.ulysses_attention(
                x,
                AttentionParams(**params),
                axis_name=axis,
                num_heads=self.heads,
                num_kv_heads=self.kv_heads,
                causal=self.causal and not self.cross,
                window=self.window,
                rope_theta=self.rope_theta,
                token_order=TokenOrder.ZIGZAG if self.zigzag else TokenOrder.CONTIGUOUS,
                implementation=implementation,
                **extra,
                **tokens,
                **context,
            )

        return fn

    def in_specs(self, w):
        return w.tokens, P(), w.tokens, P(w.batch)

    def operands(self, num_ranks):
        """x, params, tokens, context; what is per token in shard order."""

        def order(v):
            return mapping_oracle.shards_order(v, num_ranks, self.zigzag)

        tokens = {n: order(v) for n, v in self.tokens().items()}
        return order(self.x()), self.params(), tokens, self.context()

    def runner(self, w, implementation=None, **extra):
        """Compiled function from operands to the result in true order."""
        in_specs = self.in_specs(w)
        fn = self.call(w.axis, implementation, **extra)
        mapped = jax.jit(w.shard_map(fn, in_specs, w.tokens))

        def run(operands):
            out = np.asarray(mapped(*w.place(operands, in_specs)))
            return mapping_oracle.true_order(out, w.num_ranks, self.zigzag)

        return run

    def run(self, w, implementation=None, operands=None, **extra):
        """The result in true order, forward only."""
        operands = operands or self.operands(w.num_ranks)
        return self.runner(w, implementation, **extra)(operands)

    def check(self, w, implementation=None, backward=True, **extra) -> dict:
        """Compares result and all gradients with the oracle; returns gradients."""
        ranks = w.num_ranks
        true = self.x(), self.params(), self.tokens(), self.context()
        expected = self.oracle(*true)
        if not backward:
            out = self.run(w, implementation, **extra)
            error = oracle.rel_l2(out, expected.out)
            assert error < FORWARD, f"result: rel L2 {error:.2e}"
            return {}
        x, params, tokens, context = self.operands(ranks)
        in_specs = self.in_specs(w)
        mapped = w.shard_map(
            self.call(w.axis, implementation, **extra), in_specs, w.tokens
        )

        @jax.jit
        def both(x, params, tokens, context, ct):
            out, back = jax.vjp(
                lambda x, params, context: mapped(x, params, tokens, context),
                x,
                params,
                context,
            )
            return out, back(ct)

        ct = np.random.default_rng(9).normal(size=x.shape).astype(np.float32)
        placed = w.place((x, params, tokens, context), in_specs)
        out, (dx, dparams, dcontext) = both(*placed, w.put(ct, w.tokens))

        def true_order(v):
            return mapping_oracle.true_order(np.asarray(v), ranks, self.zigzag)

        actual = {"x": true_order(dx), **dparams, **dcontext}
        error = oracle.rel_l2(true_order(out), expected.out)
        assert error < FORWARD, f"result: rel L2 {error:.2e}"
        gradients = expected.gradients(true_order(ct))
        assert set(gradients) == set(actual)
        for name, gradient in gradients.items():
            for a, e in zip(jax.tree.leaves(actual[name]), jax.tree.leaves(gradient)):
                error = oracle.rel_l2(a, e)
                assert error < BACKWARD, f"gradient of {name}: rel L2 {error:.2e}"
        return actual
