# SPDX-License-Identifier: Apache-2.0
"""The FFI targets: registered once, and callable with plain ints and arrays.

Letters: B batch, S global sequence, T = S / P, M heads of one segment, H head
dimension, D model dimension, C = sum(M) * H columns of a fused matrix, P ranks.
``local`` heads of a segment are M / P, or 1 where P is a multiple of M (the head is
then replicated on P / M ranks).

The wrappers run per device, inside ``shard_map`` with every mesh axis manual. The
process must have made the group (``group_create``) before the program runs; tracing
and lowering need no group and no GPU.
"""

import threading
from collections.abc import Callable, Sequence

import jax
import numpy as np

from jax_ulysses.ffi import _targets

group_create = _targets.group_create
group_prepare = _targets.group_prepare
group_connect = _targets.group_connect
group_fail = _targets.group_fail
group_close = _targets.group_close
group_destroy = _targets.group_destroy
group_info = _targets.group_info
inject_fault = _targets.inject_fault
can_implement = _targets.can_implement
# Only in builds with kernels.
device_memory = getattr(_targets, "device_memory", None)
device_uuid = getattr(_targets, "device_uuid", None)
build_info = _targets.build_info

EXCHANGE = "jax_ulysses.exchange.v1"
GEMM_A2A = "jax_ulysses.gemm_a2a.v1"
A2A_GEMM = "jax_ulysses.a2a_gemm.v1"
PSUM = "jax_ulysses.psum.v1"

SCATTER = 0
GATHER = 1

# A function of arrays to one that does the same in some other way.
type Around = Callable[[Callable[..., tuple[jax.Array, ...]]], Callable]

_lock = threading.Lock()


def register() -> None:
    """Registers the handlers with XLA. Any call after the first does nothing.

    Importing this module registers. The mark lies on the extension module, which
    the interpreter loads once, so that reloading this file does not register again.
    """
    with _lock:
        if getattr(_targets, "_registered", False):
            return
        for ours, theirs in (("cpu", "cpu"), ("cuda", "CUDA")):
            for name, capsule in _targets.registrations(ours).items():
                jax.ffi.register_ffi_target(
                    name, capsule, platform=theirs, api_version=1
                )
        vars(_targets)["_registered"] = True


register()


def local_heads(heads: int, num_ranks: int) -> int:
    """Heads of one segment on each rank.

    Args:
      heads: M, global.
      num_ranks: P.

    Raises:
      ValueError: M is neither a multiple nor a divisor of P.
    """
    if heads < 1 or (heads % num_ranks != 0 and num_ranks % heads != 0):
        raise ValueError(
            f"{heads} heads over P={num_ranks} ranks: must be a multiple or a divisor"
        )
    return max(heads // num_ranks, 1)


def exchange(
    parts: Sequence[jax.Array],
    *,
    group: int,
    axis_name: str | Sequence[str],
    heads: Sequence[int],
    num_ranks: int,
    direction: int,
    token_order: int = 0,
    sum_replicas: bool = False,
    varying_axes: Sequence[str] = (),
    around: Around | None = None,
) -> tuple[jax.Array, ...]:
    """One all-to-all for all segments.

    Args:
      parts: per segment [B, T, M, H] to scatter, [B, S, local, H] to gather.
      group: session of the peer group.
      axis_name: mesh axes of the group, major first: they say which rank this is.
      heads: M of each segment.
      num_ranks: P.
      direction: SCATTER or GATHER.
      token_order: 0 contiguous, 1 zigzag.
      sum_replicas: when gathering, sum the copies of a replicated head (in float32,
        rounded once) instead of taking the first.
      varying_axes: mesh axes over which the results vary besides those of operands.
      around: applied to the function that makes the call, and nothing else.

    Returns:
      Per segment the other of the two shapes.
    """
    first = parts[0]
    batch, tokens, _, head_dim = first.shape
    if direction == SCATTER:
        shapes = [
            (batch, tokens * num_ranks, local_heads(m, num_ranks), head_dim)
            for m in heads
        ]
    else:
        shapes = [(batch, tokens // num_ranks, m, head_dim) for m in heads]
    results = [_result(s, parts, varying_axes) for s in shapes]
    attributes = dict(
        **_attributes(group, token_order, heads),
        direction=np.int64(direction),
        sum_replicas=np.int64(sum_replicas),
    )
    return _call(EXCHANGE, results, attributes, around, _rank(axis_name), *parts)


def gemm_a2a(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None = None,
    *,
    group: int,
    axis_name: str | Sequence[str],
    heads: Sequence[int],
    num_ranks: int,
    head_dim: int,
    token_order: int = 0,
    w_transposed: bool = False,
    varying_axes: Sequence[str] = (),
    around: Around | None = None,
) -> tuple[jax.Array, ...]:
    """Projects a sequence shard and scatters the heads: x @ w + bias, then all-to-all.

    Args:
      x: [B, T, D].
      w: [D, C], or [C, D] if w_transposed (then x @ w.T).
      bias: [C] or None; added in the accumulator.
      group: session of the peer group.
      axis_name: mesh axes of the group, major first: they say which rank this is.
      heads: M of each segment.
      num_ranks: P.
      head_dim: H.
      token_order: 0 contiguous, 1 zigzag.
      w_transposed: how w is stored.
      varying_axes: mesh axes over which the results vary besides those of operands.
      around: applied to the function that makes the call, and nothing else.

    Returns:
      Per segment [B, S, local, H] of x's dtype.
    """
    batch, tokens, _ = x.shape
    operands = (x, w, _bias(bias, x))
    results = [
        _result(
            (batch, tokens * num_ranks, local_heads(m, num_ranks), head_dim),
            operands,
            varying_axes,
        )
        for m in heads
    ]
    attributes = dict(
        **_attributes(group, token_order, heads),
        head_dim=np.int64(head_dim),
        w_transposed=np.int64(w_transposed),
    )
    return _call(GEMM_A2A, results, attributes, around, _rank(axis_name), *operands)


def a2a_gemm(
    parts: Sequence[jax.Array],
    w: jax.Array,
    bias: jax.Array | None = None,
    *,
    group: int,
    axis_name: str | Sequence[str],
    heads: Sequence[int],
    num_ranks: int,
    token_order: int = 0,
    w_transposed: bool = False,
    want_gathered: bool = True,
    varying_axes: Sequence[str] = (),
    around: Around | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Gathers head shards and projects them: all-to-all, then g @ w + bias.

    Args:
      parts: per segment [B, S, local, H].
      w: [C, D], or [D, C] if w_transposed (then g @ w.T).
      bias: [D] or None; added in the accumulator.
      group: session of the peer group.
      axis_name: mesh axes of the group, major first: they say which rank this is.
      heads: M of each segment.
      num_ranks: P.
      token_order: 0 contiguous, 1 zigzag.
      w_transposed: how w is stored.
      want_gathered: whether g is a result, or an empty array in its place.
      varying_axes: mesh axes over which the results vary besides those of operands.
      around: applied to the function that makes the call, and nothing else.

    Returns:
      y [B, T, D], and what it was made from, g [B, T, C]. The copies of a replicated
      head are summed in g (in float32, rounded once).
    """
    batch, tokens, _, head_dim = parts[0].shape
    operands = (*parts, w, _bias(bias, parts[0]))
    local = (batch, tokens // num_ranks)
    results = [
        _result((*local, w.shape[0 if w_transposed else 1]), operands, varying_axes),
        _result(
            (*local, sum(heads) * head_dim) if want_gathered else (0,),
            operands,
            varying_axes,
        ),
    ]
    attributes = dict(
        **_attributes(group, token_order, heads),
        w_transposed=np.int64(w_transposed),
        want_gathered=np.int64(want_gathered),
    )
    y, gathered = _call(
        A2A_GEMM, results, attributes, around, _rank(axis_name), *operands
    )
    return y, gathered


def psum(
    vectors: Sequence[jax.Array],
    *,
    group: int,
    axis_name: str | Sequence[str],
    equal_axes: Sequence[str] = (),
    around: Around | None = None,
) -> tuple[jax.Array, ...]:
    """Sums each vector over the ranks, in rank order: the same bits on all of them.

    Args:
      vectors: arrays of any shapes and of floating point dtypes, none empty.
      group: session of the peer group.
      axis_name: mesh axes of the group, major first: they say which rank this is.
      equal_axes: further mesh axes over which the results are known to be equal.
      around: applied to the function that makes the call, and nothing else.

    Returns:
      The sums, of the operands' dtypes, typed as equal on all ranks of the group.
      Added in float32 (float64 for float64), rounded once.
    """
    axes = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    results = []
    for vector in vectors:
        kind = jax.typeof(vector)
        varying = kind.mat.varying.difference(axes, equal_axes)
        same = kind.mat.update(varying=varying)
        results.append(kind.update(weak_type=False, manual_axis_type=same))
    attributes = dict(
        group=np.int64(group),
        counts=np.array([vector.size for vector in vectors], np.int64),
    )
    return _call(PSUM, results, attributes, around, _rank(axes), *vectors)


def _call(target, results, attributes, around, *operands):
    def call(*operands):
        return tuple(jax.ffi.ffi_call(target, results)(*operands, **attributes))

    return (call if around is None else around(call))(*operands)


def _attributes(group, token_order, heads):
    return dict(
        group=np.int64(group),
        token_order=np.int64(token_order),
        heads=np.array(heads, np.int64),
    )


def _rank(axis_name):
    # The handler compares it with the group's: a program can run on a mesh that lists
    # the same devices in another order.
    return jax.lax.axis_index(axis_name).astype(np.int32).reshape(1)


def _bias(bias, like):
    # Targets have a fixed number of operands; an empty bias is none. It is cut from an
    # operand: as a constant, grad of scan would carry it through the loop, and XLA:CPU
    # (jaxlib 0.11.2) crashes on an empty loop operand.
    return like.reshape(-1)[:0] if bias is None else bias


def _result(shape, operands, varying_axes):
    """Type of a result: varies over every mesh axis that any operand varies over.

    A bare ShapeDtypeStruct would be typed as replicated under shard_map, and a wrong
    shard returned without an error.
    """
    types = [jax.typeof(x) for x in operands]
    varying = frozenset(varying_axes).union(*(t.mat.varying for t in types))
    return types[0].update(
        shape=shape,
        weak_type=False,
        manual_axis_type=types[0].mat.update(varying=varying),
    )
