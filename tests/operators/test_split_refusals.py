# SPDX-License-Identifier: Apache-2.0
"""Wrong arguments of a backward pass in two halves: a ValueError while tracing."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jax_ulysses as ju
from tests.helpers.worlds import world

# B=2, S=16, P=4, D=12, N=8, K=4, H=3.
RIGHT = {
    "qkv_proj_a2a_bwd_input": {
        "dq": (2, 16, 2, 3),
        "dk": (2, 16, 1, 3),
        "dv": (2, 16, 1, 3),
        "w_qkv": (12, 48),
        "num_heads": 8,
        "num_kv_heads": 4,
    },
    "q_proj_a2a_bwd_input": {"dq": (2, 16, 2, 3), "w_q": (12, 24)},
    "a2a_out_proj_fwd": {"a": (2, 16, 2, 3), "w_out": (24, 12)},
    "a2a_out_proj_bwd_input": {"dy": (2, 4, 12), "w_out": (24, 12), "num_heads": 8},
    "qkv_proj_a2a_bwd_weight": {"x": (2, 4, 12), "dy": (2, 4, 48)},
    "a2a_out_proj_bwd_weight": {"gathered": (2, 4, 24), "dy": (2, 4, 12)},
}
QKV, Q, FWD, OUT, QKV_WEIGHT, OUT_WEIGHT = RIGHT
MAIN = {"accumulate_into": (12, 48)}


def _trace(operator, changes=(), dtypes=(), equal=()):
    """Traces a call.

    Args:
      operator: its name.
      changes: arguments other than the right ones; a tuple is a local shape.
      dtypes: of operands that are not float32.
      equal: operands that are the same on every rank; so are weights.
    """
    arguments = RIGHT[operator] | dict(changes)
    dtypes = dict(dtypes)
    if "weight" not in operator:
        arguments["axis_name"] = "cp"

    def operand(name, shape):
        x = jnp.zeros(shape, dtypes.get(name, jnp.float32))
        same = name.startswith("w_") or name in equal
        return x if same else lax.pcast(x, "cp", to="varying")

    def call():
        getattr(ju, operator)(
            **{
                name: operand(name, value) if isinstance(value, tuple) else value
                for name, value in arguments.items()
            }
        )
        return jnp.zeros(())

    jax.eval_shape(
        jax.shard_map(call, mesh=world("cp4").mesh, in_specs=(), out_specs=P())
    )


@pytest.mark.parametrize("operator", RIGHT)
def test_plain_calls_trace(operator):
    """The calls that the refusals below vary are right themselves."""
    _trace(operator)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_main_gradients_that_are_taken(dtype):
    """Besides float32 and bfloat16, the dtype of the operands."""
    dtypes = {"x": "float16", "dy": "float16", "accumulate_into": dtype}
    _trace(QKV_WEIGHT, MAIN, dtypes)


def test_a_main_gradient_in_float64():
    with jax.enable_x64():
        _trace(QKV_WEIGHT, MAIN, {"accumulate_into": "float64"})


ZIGZAG = ju.TokenOrder.ZIGZAG
SHAPES = {
    "heads": (QKV, {"num_heads": 6}, "N must be a multiple of K"),
    "kv heads": (QKV, {"num_kv_heads": 8}, r"dk must have shape \(2, 16, 2, 3\)"),
    "dv": (QKV, {"dv": (2, 16, 1, 6)}, r"dv must have shape \(2, 16, 1, 3\)"),
    "dq rank": (QKV, {"dq": (2, 16, 6)}, r"dq must have shape \[B, S, heads, H\]"),
    "columns": (QKV, {"w_qkv": (12, 45)}, "w_qkv has 45 columns, expected 48"),
    "w rank": (QKV, {"w_qkv": (12, 48, 1)}, r"w_qkv must have shape \[D, columns\]"),
    "w empty": (QKV, {"w_qkv": (0, 48)}, r"w_qkv is empty: shape \(0, 48\)"),
    "tokens": (
        QKV,
        {"dq": (2, 15, 2, 3), "dk": (2, 15, 1, 3), "dv": (2, 15, 1, 3)},
        "dq has S=15 tokens, which P=4 ranks cannot share",
    ),
    "zigzag": (
        Q,
        {"dq": (2, 12, 2, 3), "token_order": ZIGZAG},
        "dq has T=3 with P=4",
    ),
    "q rank": (Q, {"dq": (2, 16)}, r"dq must have shape \[B, S, N/P, H\]"),
    "q columns": (Q, {"w_q": (12, 21)}, "w_q has 21 columns, expected 24"),
    "fwd rank": (FWD, {"a": (2, 16, 6)}, r"a must have shape \[B, S, N/P, H\]"),
    "fwd rows": (FWD, {"w_out": (21, 12)}, "w_out has 21 rows, expected 24"),
    "out heads": (OUT, {"num_heads": 6}, "N must be a multiple of P"),
    "out rank": (OUT, {"dy": (2, 12)}, r"dy must have shape \[B, T, D\]"),
    "out w rank": (OUT, {"w_out": ()}, r"w_out must have shape \[rows, cols\]"),
    "out rows": (OUT, {"num_heads": 20}, "w_out has 24 rows, which num_heads N=20"),
    "out columns": (OUT, {"w_out": (24, 9)}, "w_out has 9 columns, expected 12"),
    "out zigzag": (
        OUT,
        {"dy": (2, 3, 12), "token_order": ZIGZAG},
        "dy has T=3 with P=4",
    ),
    "x rank": (QKV_WEIGHT, {"x": (4, 12)}, r"x must have shape \[B, T, rows\]"),
    "dy rank": (QKV_WEIGHT, {"dy": (4, 48)}, r"dy must have shape \[B, T, cols\]"),
    "weight tokens": (
        QKV_WEIGHT,
        {"x": (2, 3, 12)},
        r"x \(2, 3, 12\) and dy \(2, 4, 48\) must have the same B and T",
    ),
    "main": (
        OUT_WEIGHT,
        {"accumulate_into": (24, 13)},
        r"accumulate_into must have shape \(24, 12\).*columns of gathered",
    ),
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name):
    operator, changes, message = SHAPES[name]
    with pytest.raises(ValueError, match=message):
        _trace(operator, changes)


BF16 = "bfloat16"
INT8 = {"dq": "int8", "w_q": "int8"}
DTYPES = {
    "weight": (QKV, {"w_qkv": BF16}, "w_qkv has dtype bfloat16 but dq has float32"),
    "dv": (QKV, {"dv": BF16}, "dv has dtype bfloat16 but dq has float32"),
    "int8": (Q, INT8, "dq has dtype int8; projections take"),
    "fwd": (FWD, {"w_out": BF16}, "w_out has dtype bfloat16 but a has float32"),
    "out": (OUT, {"w_out": BF16}, "w_out has dtype bfloat16 but dy has float32"),
    "out int8": (OUT, {"dy": "int8", "w_out": "int8"}, "dy has dtype int8"),
    "dy": (QKV_WEIGHT, {"dy": BF16}, "dy has dtype bfloat16 but x has float32"),
    "weight int8": (QKV_WEIGHT, {"x": "int8", "dy": "int8"}, "x has dtype int8"),
    "main": (
        QKV_WEIGHT,
        {"accumulate_into": "float16"},
        "accumulate_into has dtype float16; main gradients are float32, bfloat16",
    ),
    "main int32": (
        QKV_WEIGHT,
        {"accumulate_into": "int32"},
        "accumulate_into has dtype int32; main gradients are float32, bfloat16",
    ),
}


@pytest.mark.parametrize("name", DTYPES)
def test_dtypes(name):
    operator, dtypes, message = DTYPES[name]
    changes = MAIN if "accumulate_into" in dtypes else {}
    with pytest.raises(ValueError, match=message):
        _trace(operator, changes, dtypes)


EQUAL = {
    (QKV, "dk"): "dk .* is replicated over axis 'cp', but must be sharded",
    (Q, "dq"): "q_proj_a2a_bwd_input: dq .* is replicated over axis 'cp'",
    (FWD, "a"): "a2a_out_proj.*: a .* is replicated over axis 'cp'",
    (OUT, "dy"): "a2a_out_proj_bwd_input: dy .* is replicated over axis 'cp'",
    (
        QKV_WEIGHT,
        "accumulate_into",
    ): r"typed as equal over axes \['cp'\], but each rank adds its own part",
}


@pytest.mark.parametrize(("operator", "name"), EQUAL)
def test_operands_that_are_equal_on_all_ranks(operator, name):
    changes = MAIN if name == "accumulate_into" else {}
    with pytest.raises(ValueError, match=EQUAL[operator, name]):
        _trace(operator, changes, equal=(name,))
