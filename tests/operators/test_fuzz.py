# SPDX-License-Identifier: Apache-2.0
"""Random calls: each equals the oracle, or is refused while tracing. Nothing else.

``JAX_ULYSSES_FUZZ_CASES`` sets how many (the first implementation runs all of them,
each further one half); ``HYPOTHESIS_PROFILE=long`` draws new ones every time.
"""

import os

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import jax_ulysses as ju
from jax_ulysses import TokenOrder
from tests.helpers import implementations, mapping_oracle, tags
from tests.helpers.projection_cases import BACKWARD, FORWARD, Case
from tests.helpers.worlds import world

CASES = int(os.environ.get("JAX_ULYSSES_FUZZ_CASES", max(300, settings().max_examples)))
# P -> its share of the cases, and the meshes that have it.
RANKS = {
    1: (0.07, ("cp1", "dp2x1")),
    2: (0.3, ("cp2", "dp2x2", "cp2dp4", "dp2x2-auto")),
    4: (0.36, ("cp4", "cp4-reversed", "dp2cp4-auto", "cp4dp2-transposed")),
    8: (0.27, ("cp8", "tuple", "tuple-swapped")),
}
REFUSED = (ValueError, NotImplementedError)
PROJECTIONS = (
    "qkv_proj_a2a",
    "qkv_proj_a2a",
    "q_proj_a2a",
    "a2a_out_proj",
    "a2a_proj",
    "a2a_proj/features",
)


FAULTS = ("weight rows", "weight columns", "weight dtype", "bias", "heads", "tokens")


@st.composite
def head_counts(draw, ranks, may_fit=True):
    """N and K that P ranks can share; without ``may_fit`` any, which mostly do not."""
    if not may_fit:
        return draw(st.integers(1, 20)), draw(st.integers(1, 9))
    heads = ranks * draw(st.sampled_from((1, 2, 3, 4)))
    fits = [
        k
        for k in range(1, heads + 1)
        if heads % k == 0 and (k % ranks == 0 or ranks % k == 0)
    ]
    # Several heads with several copies each are few among the fitting, and the most
    # easily confused: in front and twice.
    several = [k for k in fits if 1 < k < ranks]
    return heads, draw(st.sampled_from(several * 2 + fits))


@st.composite
def projections(draw, ranks):
    """A mesh name, a case on it, and one fault by name or None."""
    fault = draw(st.sampled_from((None,) * 24 + FAULTS))
    heads, kv_heads = draw(head_counts(ranks, fault != "heads"))
    name = draw(st.sampled_from(RANKS[ranks][1]))
    zigzag = draw(st.booleans())
    tokens = draw(st.integers(1, 6))
    case = Case(
        operator=draw(st.sampled_from(PROJECTIONS)),
        batch=draw(st.integers(1, 2)) * world(name).size(world(name).batch),
        tokens=tokens * 2 if zigzag and fault != "tokens" else tokens,
        d_model=draw(st.integers(1, 20)),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=draw(st.integers(1, 9)),
        dtype=draw(st.sampled_from(("float32", "bfloat16", "float32", "float16"))),
        zigzag=zigzag,
        bias=draw(st.booleans()),
    )
    return name, case, fault


def _spoil(operands, fault):
    if fault == "weight rows":
        operands[1] = np.concatenate([operands[1], operands[1][:1]])
    elif fault == "weight columns":  # Of an output projection, these are free.
        operands[1] = operands[1][:, :-1]
    elif fault == "weight dtype":
        operands[1] = operands[1].astype(np.int8)
    elif fault == "bias" and len(operands) > 2:
        operands[2] = operands[2][:-1]
    return operands


def _magnitudes(arrays):
    return [np.abs(np.asarray(a).astype(np.float64)) for a in arrays]


def _assert_bounded(case, actual, expected, magnitude, tolerance, what):
    """Errors relative to the sum of magnitudes: tiny sums may cancel to nothing."""
    flat = [v if isinstance(v, tuple) else (v,) for v in (actual, expected, magnitude)]
    for i, (a, e, m) in enumerate(zip(*flat, strict=True)):
        assert a.shape == e.shape, (what, i, a.shape, e.shape)
        assert a.dtype.name == case.dtype
        error = np.linalg.norm(np.asarray(a).astype(np.float64) - e)
        assert error <= tolerance * np.linalg.norm(m) + 1e-30, (what, i, error)


def _check_projection(implementation, name, case, fault):
    w = world(name)
    operands = case.operands(w.num_ranks)
    operands = _spoil(operands, fault)
    valid = _is_valid(case, fault, operands, w.num_ranks)
    in_specs, out_specs = case.specs(w)
    call = case.call(w.axis, implementation.on(w))
    try:
        placed = w.place(operands, in_specs)
        mapped = jax.jit(w.shard_map(call, in_specs, out_specs))
        shapes = mapped.trace(*placed).out_info
    except REFUSED as error:
        assert not valid, f"refused a valid call: {error}"
        return
    assert valid, "accepted a call that the rules forbid"
    expected = case.expected(operands, w.num_ranks)
    assert jax.tree.map(lambda s: s.shape, shapes) == jax.tree.map(
        lambda e: e.shape, expected
    )
    cts = case.cotangents(expected)
    placed_cts = (
        w.place(cts, out_specs) if isinstance(cts, tuple) else w.put(cts, out_specs)
    )
    out, gradients = w.vjp(call, in_specs, out_specs)(placed, placed_cts)

    sizes = _magnitudes(operands)
    bound = case.expected(sizes, w.num_ranks)
    _assert_bounded(case, out, expected, bound, FORWARD[case.dtype], "result")
    expected = case.expected_gradients(operands, cts, w.num_ranks)
    ct_sizes = _magnitudes(cts if isinstance(cts, tuple) else (cts,))
    ct_sizes = tuple(ct_sizes) if isinstance(cts, tuple) else ct_sizes[0]
    bound = case.expected_gradients(sizes, ct_sizes, w.num_ranks)
    _assert_bounded(
        case, gradients, tuple(expected), tuple(bound), BACKWARD[case.dtype], "gradient"
    )


def _is_valid(case, fault, operands, ranks) -> bool:
    """The rules of the documentation, written down independently of the library."""
    n, k = case.heads, case.kv_heads
    if n % ranks:
        return False
    if case.operator == "qkv_proj_a2a" and (
        n % k or (k % ranks != 0 and ranks % k != 0)
    ):
        return False
    if case.zigzag and case.tokens % 2:
        return False
    if operands[1].dtype != operands[0].dtype or 0 in operands[1].shape:
        return False
    features = n * case.head_dim
    rows, cols = operands[1].shape
    if case.is_scatter:
        if rows != case.d_model or cols % sum(case.segments):
            return False
        # Without head_dim=, a narrower weight that still divides means a smaller H.
        if cols != sum(case.segments) * case.head_dim:
            return False
    elif rows != features:
        return False
    return len(operands) < 3 or operands[2].shape == (cols,)


@st.composite
def exchanges(draw, ranks):
    heads, kv_heads = draw(
        head_counts(ranks, draw(st.sampled_from([True] * 9 + [False])))
    )
    heads = draw(st.sampled_from((heads, kv_heads)))
    name = draw(st.sampled_from(RANKS[ranks][1]))
    shape = (
        draw(st.integers(1, 3)) * world(name).size(world(name).batch),
        ranks * draw(st.integers(1, 6)),
        heads,
        draw(st.integers(1, 9)),
    )
    dtypes = (
        "float32",
        "bfloat16",
        "float16",
        "int8",
        "float8_e4m3fn",
        "bool",
        "int32",
    )
    return name, shape, draw(st.sampled_from(dtypes)), draw(st.booleans())


def _check_exchange(implementation, name, shape, dtype, zigzag):
    w = world(name)
    ranks, heads = w.num_ranks, shape[2]
    kwargs = {
        "implementation": implementation.on(w),
        "token_order": TokenOrder.ZIGZAG if zigzag else TokenOrder.CONTIGUOUS,
    }
    splits = heads % ranks == 0
    valid = (splits or ranks % heads == 0) and not (zigzag and shape[1] // ranks % 2)

    def local(x):
        y = ju.scatter_heads(x, w.axis, **kwargs)
        return y, ju.gather_heads(y, w.axis, **kwargs)

    mapped = jax.jit(w.shard_map(local, (w.tokens,), (w.heads, w.tokens)))
    xs = [w.put(x, w.tokens) for x in tags.planes(shape, dtype)[:3]]
    try:
        mapped.trace(xs[0])
    except REFUSED as error:
        assert not valid, f"refused a valid call: {error}"
        return
    assert valid, "accepted a call that the rules forbid"
    for x in xs:
        y, back = mapped(x)
        x = np.asarray(x)
        copies = x[:, :, mapping_oracle.all_heads(heads, ranks)]
        tags.equal_bits(y, mapping_oracle.scatter(x, ranks, zigzag))
        tags.equal_bits(back, copies)


def _profile(ranks, implementation, share):
    cases = CASES * RANKS[ranks][0] * share
    if implementation != implementations.NAMES[0]:
        cases /= 2
    return settings(
        max_examples=max(1, round(cases)),
        suppress_health_check=list(HealthCheck),
        deadline=None,
    )


@pytest.mark.fuzz
@pytest.mark.user_case(1, 3, 8, 11, 30)
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("ranks", RANKS)
def test_projections(ranks, implementation):
    @_profile(ranks, implementation.name, 0.75)
    @given(projections(ranks))
    def check(drawn):
        _check_projection(implementation, *drawn)

    check()


@pytest.mark.fuzz
@pytest.mark.user_case(1, 6)
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("ranks", RANKS)
def test_exchanges(ranks, implementation):
    @_profile(ranks, implementation.name, 0.3)
    @given(exchanges(ranks))
    def check(drawn):
        _check_exchange(implementation, *drawn)

    check()
