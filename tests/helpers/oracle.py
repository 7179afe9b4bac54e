# SPDX-License-Identifier: Apache-2.0
"""The operators and their gradients on one device, dense, in float64 numpy.

Written by hand and without the library, so that a mistake there cannot cancel here.
``tests/operators/test_oracle.py`` checks the gradients by finite differences.
"""

import numpy as np

from tests.helpers import mapping_oracle


def _einsum(subscripts, *operands):
    """numpy's einsum through BLAS: without it wide weights take minutes."""
    return np.einsum(subscripts, *operands, optimize=True)


def wide(*arrays):
    """Arrays as float64 (None stays None)."""
    return tuple(
        None if a is None else np.asarray(a).astype(np.float64) for a in arrays
    )


def rel_l2(actual, expected) -> float:
    """Relative L2 distance; the absolute one where the expected norm is zero."""
    actual, expected = wide(actual, expected)
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    norm = np.linalg.norm(expected)
    return float(np.linalg.norm(actual - expected) / (norm or 1.0))


def qkv_proj(x, w, bias, heads, num_ranks, zigzag=False):
    """x [B,S,D] in shard order -> per segment [B, S, P*local, H] in true order."""
    x, w, bias = wide(x, w, bias)
    y = x @ w if bias is None else x @ w + bias
    y = y.reshape(*y.shape[:2], sum(heads), -1)
    parts = np.split(y, np.cumsum(heads)[:-1], axis=2)
    return tuple(mapping_oracle.scatter(p, num_ranks, zigzag) for p in parts)


def qkv_proj_gradients(x, w, heads, num_ranks, cotangents, zigzag=False):
    """Gradients of x, w and bias for cotangents shaped like ``qkv_proj``'s result."""
    x, w = wide(x, w)
    parts = [
        mapping_oracle.gather(c, m, num_ranks, zigzag)
        for c, m in zip(wide(*cotangents), heads)
    ]
    dy = np.concatenate([p.reshape(*p.shape[:2], -1) for p in parts], axis=-1)
    return dy @ w.T, _einsum("bsd,bsc->dc", x, dy), dy.sum((0, 1))


def out_proj(a, w, bias, num_ranks, zigzag=False):
    """a [B,S,N,H] in true order -> [B,S,D] in shard order."""
    a, w, bias = wide(a, w, bias)
    y = a.reshape(*a.shape[:2], -1) @ w
    y = y if bias is None else y + bias
    return mapping_oracle.shards_order(y, num_ranks, zigzag)


def out_proj_gradients(a, w, num_ranks, dy, zigzag=False):
    """Gradients of a, w and bias for a cotangent shaped like ``out_proj``'s result."""
    a, w, dy = wide(a, w, dy)
    dy = mapping_oracle.true_order(dy, num_ranks, zigzag)
    flat = a.reshape(*a.shape[:2], -1)
    return (
        (dy @ w.T).reshape(a.shape),
        _einsum("bsc,bsd->cd", flat, dy),
        dy.sum((0, 1)),
    )


def mask_of(
    batch,
    length,
    *,
    causal=False,
    window=None,
    segments=None,
    padding=None,
    num_joint=0,
):
    """[B, S, num_joint + S] bool by three nested loops; True may attend."""
    mask = np.zeros((batch, length, num_joint + length), bool)
    for b in range(batch):
        for i in range(length):
            mask[b, i, :num_joint] = True
            for j in range(length):
                sees = not (causal and j > i)
                if window is not None:
                    sees = sees and abs(i - j) < window
                if segments is not None:
                    sees = sees and segments[b][i] == segments[b][j]
                if padding is not None:
                    sees = sees and bool(padding[b][j])
                mask[b, i, num_joint + j] = sees
    return mask


class Attention:
    """Dense grouped-query attention with its gradient.

    Query head n attends to KV head n // (N/K). Rows that see nothing give zeros.
    A sink is the logit of one more key, whose value is zero.
    """

    def __init__(self, q, k, v, mask, sinks=None):
        self.q, self.k, self.v, self.sinks = wide(q, k, v, sinks)
        self.group = self.q.shape[2] // self.k.shape[2]
        self.scale = 1 / np.sqrt(self.q.shape[-1])
        keys, values = (np.repeat(t, self.group, axis=2) for t in (self.k, self.v))
        logits = _einsum("bsnh,btnh->bnst", self.q, keys) * self.scale
        logits = np.where(mask[:, None], logits, -np.inf)
        top = np.max(logits, axis=-1, keepdims=True)
        if self.sinks is not None:
            top = np.maximum(top, self.sinks[:, None, None])
        top = np.where(np.isfinite(top), top, 0)
        weights = np.exp(logits - top)
        total = weights.sum(-1, keepdims=True)
        self.sink_p = 0.0
        if self.sinks is not None:
            extra = np.exp(self.sinks[:, None, None] - top)
            total = total + extra
            self.sink_p = extra / total
        self.p = weights / np.where(total == 0, 1, total)
        self.out = _einsum("bnst,btnh->bsnh", self.p, values)

    def gradients(self, dout):
        """dq, dk, dv, dsinks (None without sinks)."""
        (dout,) = wide(dout)
        keys, values = (np.repeat(t, self.group, axis=2) for t in (self.k, self.v))
        dp = _einsum("bsnh,btnh->bnst", dout, values)
        inner = np.sum(dp * self.p, axis=-1, keepdims=True)
        dlogits = self.p * (dp - inner)
        dq = _einsum("bnst,btnh->bsnh", dlogits, keys) * self.scale
        dk = _einsum("bnst,bsnh->btnh", dlogits, self.q) * self.scale
        dv = _einsum("bnst,bsnh->btnh", self.p, dout)
        dsinks = None
        if self.sinks is not None:
            dsinks = np.sum(-self.sink_p * inner, axis=(0, 2, 3))
        return dq, self._ungroup(dk), self._ungroup(dv), dsinks

    def _ungroup(self, t):
        return t.reshape(*t.shape[:2], -1, self.group, t.shape[-1]).sum(3)


class Rope:
    """Rotary embedding by complex numbers: pair (i, i + H/2) is one number."""

    def __init__(self, positions, head_dim, theta):
        half = head_dim // 2
        rates = [theta ** (-i / half) for i in range(half)]
        angle = np.asarray(positions, np.float64)[..., None] * np.asarray(rates)
        self.turn = np.exp(1j * angle)[:, :, None]

    def __call__(self, x, inverse=False):
        half = x.shape[-1] // 2
        z = x[..., :half] + 1j * x[..., half:]
        z = z * (np.conj(self.turn) if inverse else self.turn)
        return np.concatenate([z.real, z.imag], axis=-1)

    def gradient(self, dy):
        """The transpose of a rotation is its inverse."""
        return self(dy, inverse=True)


class RmsNorm:
    """x / sqrt(mean(x^2) + epsilon) * scale, with its gradient."""

    def __init__(self, x, scale, epsilon=1e-6):
        self.x, self.scale = wide(x, scale)
        self.r = np.sqrt(np.mean(self.x**2, axis=-1, keepdims=True) + epsilon)
        self.out = self.x / self.r * self.scale

    def gradients(self, dy):
        """dx, dscale."""
        g = dy * self.scale
        dot = np.mean(g * self.x, axis=-1, keepdims=True)
        dx = g / self.r - self.x * dot / self.r**3
        return dx, np.sum(dy * self.x / self.r, axis=tuple(range(dy.ndim - 1)))


class Layer:
    """A whole attention layer, true token order, with gradients of every operand.

    Args:
      x: [B, S, D].
      params: dict with w_qkv, w_out and optionally b_qkv, b_out, q_norm, k_norm, sinks.
      num_heads: N.
      num_kv_heads: K.
      mask: [B, S, L] bool, see ``mask_of``.
      rope_theta: base, or None.
      positions: [B, S] or None for 0..S-1.
      padding: [B, S] bool: attention outputs of False rows are zero.
      cross_kv: (k, v), the only keys and values.
      joint_kv: (k, v), put before the sequence's own.
    """

    def __init__(
        self,
        x,
        params,
        num_heads,
        num_kv_heads,
        mask,
        *,
        rope_theta=10000.0,
        positions=None,
        padding=None,
        cross_kv=None,
        joint_kv=None,
    ):
        (self.x,) = wide(x)
        names = ("w_qkv", "w_out", "b_qkv", "b_out", "q_norm", "k_norm", "sinks")
        self.p = dict(zip(names, wide(*(params.get(n) for n in names))))
        self.padding, self.cross, self.joint = padding, cross_kv, joint_kv
        n, k = num_heads, num_kv_heads
        y = self.x @ self.p["w_qkv"]
        if self.p["b_qkv"] is not None:
            y = y + self.p["b_qkv"]
        total = n if cross_kv is not None else n + 2 * k
        y = y.reshape(*y.shape[:2], total, -1)
        self.cuts = [n] if cross_kv is not None else [n, n + k]
        q, *kv = np.split(y, self.cuts, axis=2)
        if cross_kv is not None:
            kv = wide(*cross_kv)
            q = q[:, :, :n]
        self.rope = None
        if rope_theta is not None:
            if positions is None:
                positions = np.arange(self.x.shape[1])[None]
            self.rope = Rope(positions, y.shape[-1], rope_theta)
        q, self.q_norm = self._norm_rope(q, self.p["q_norm"])
        key, value = kv[0], kv[1]
        if cross_kv is None:
            key, self.k_norm = self._norm_rope(key, self.p["k_norm"])
        self.num_joint = 0
        if joint_kv is not None:
            self.num_joint = joint_kv[0].shape[1]
            key = np.concatenate([wide(joint_kv[0])[0], key], axis=1)
            value = np.concatenate([wide(joint_kv[1])[0], value], axis=1)
        self.attention = Attention(q, key, value, mask, self.p["sinks"])
        a = self.attention.out
        if padding is not None:
            a = a * np.asarray(padding, bool)[:, :, None, None]
        self.a = a
        self.out = a.reshape(*a.shape[:2], -1) @ self.p["w_out"]
        if self.p["b_out"] is not None:
            self.out = self.out + self.p["b_out"]

    def _norm_rope(self, t, scale):
        norm = None
        if scale is not None:
            norm = RmsNorm(t, scale)
            t = norm.out
        return (t if self.rope is None else self.rope(t)), norm

    def _norm_rope_gradient(self, dt, norm):
        if self.rope is not None:
            dt = self.rope.gradient(dt)
        return (dt, None) if norm is None else norm.gradients(dt)

    def gradients(self, dout):
        """Gradients of x, each parameter given, and context keys and values."""
        (dout,) = wide(dout)
        g = {}
        flat = self.a.reshape(*self.a.shape[:2], -1)
        g["w_out"] = _einsum("bsc,bsd->cd", flat, dout)
        g["b_out"] = dout.sum((0, 1))
        da = (dout @ self.p["w_out"].T).reshape(self.a.shape)
        if self.padding is not None:
            da = da * np.asarray(self.padding, bool)[:, :, None, None]
        dq, dk, dv, g["sinks"] = self.attention.gradients(da)
        if self.num_joint:
            g["joint_kv"] = dk[:, : self.num_joint], dv[:, : self.num_joint]
            dk, dv = dk[:, self.num_joint :], dv[:, self.num_joint :]
        dq, g["q_norm"] = self._norm_rope_gradient(dq, self.q_norm)
        if self.cross is not None:
            g["cross_kv"] = dk, dv
            dy = dq
        else:
            dk, g["k_norm"] = self._norm_rope_gradient(dk, self.k_norm)
            dy = np.concatenate([dq, dk, dv], axis=2)
        dy = dy.reshape(*dy.shape[:2], -1)
        g["w_qkv"] = _einsum("bsd,bsc->dc", self.x, dy)
        g["b_qkv"] = dy.sum((0, 1))
        g["x"] = dy @ self.p["w_qkv"].T
        given = {n for n, v in self.p.items() if v is not None}
        return {n: v for n, v in g.items() if n not in self.p or n in given}
