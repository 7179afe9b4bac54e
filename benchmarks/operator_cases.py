# SPDX-License-Identifier: Apache-2.0
"""What ``bench_operators`` measures: operators and variants at one shape."""

import concurrent.futures
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import separate
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from timing import chain, interleaved_us, relative_distance, summary

import jax_ulysses as ju
from jax_ulysses import dispatch, reference
from jax_ulysses.spec import HeadExchange

SEQUENCE, HEADS = P(None, "cp"), P(None, None, "cp")
# Relative L2 between two implementations in bf16 that both keep the library's bound.
TOLERANCE = 8e-3

type Variant = Callable[[Any, jax.Array], tuple]


class Case:
    """One geometry and sequence length, B = 1, bf16.

    Attributes:
      operators: name -> (spec of an operand, specs of the results, variants).
    """

    def __init__(
        self,
        mesh: Mesh,
        geometry: dict[str, int],
        sequence: int,
        calls: int,
        native: str = "cuda",
    ):
        self._mesh, self._sequence, self._calls = mesh, sequence, calls
        # "host" where there is no GPU: to test this file.
        self._name, self._native = native, dispatch._BACKENDS[native]
        separate.register(native)
        n, k, self._head_dim = (geometry[x] for x in ("heads", "kv_heads", "head_dim"))
        self._width = geometry["d_model"]
        p = mesh.shape["cp"]
        self._qkv = HeadExchange((n, k, k), self._head_dim, p, ("cp",))
        self._out = HeadExchange((n,), self._head_dim, p, ("cp",))
        self.operators = {
            "qkv_proj_a2a": (SEQUENCE, (HEADS,) * 3, self._qkv_forward),
            "qkv_proj_a2a.backward": (
                (HEADS,) * 3,
                (SEQUENCE,),
                self._qkv_backward,
            ),
            "a2a_out_proj": (HEADS, (SEQUENCE,), self._out_forward),
            "a2a_out_proj.backward": (SEQUENCE, (HEADS,), self._out_backward),
        }

    def measure(self, operator: str, rounds: int) -> Iterator[dict[str, Any]]:
        """Times all variants of an operator that run here.

        Yields:
          Rows with "variant", the local GEMM's "rows", "n" and "k", times, and
          "error": largest relative L2 of a result against XLA's.
        """
        operand_spec, result_specs, variants = self.operators[operator]
        weight = self._weight(operator)
        operands = [self._operand(operator, seed) for seed in range(self._calls)]
        pending, programs, errors, wanted = {}, {}, {}, None
        with concurrent.futures.ThreadPoolExecutor() as pool:
            for name, function in variants().items():
                specs = result_specs if not name.startswith("only ") else None
                try:
                    lowered = self._lower(
                        function, operand_spec, specs, operands, weight
                    )
                except NotImplementedError as error:
                    yield {"variant": name, "refused": str(error)}
                    continue
                pending[name] = pool.submit(lowered.compile)
        for name, future in pending.items():
            program = future.result()
            programs[name] = lambda program=program: program(operands, weight)
            if name.startswith("only "):
                continue
            results = programs[name]()
            wanted = results if name == "xla" else wanted
            pairs = zip(results, wanted, strict=True)
            errors[name] = max(float(relative_distance(*pair)) for pair in pairs)
            if not errors[name] <= TOLERANCE:
                raise AssertionError(f"{operator}, {name}: off by {errors[name]}")
        times = interleaved_us(programs, calls=self._calls, rounds=rounds)
        n, k = weight.shape[::-1] if "backward" not in operator else weight.shape
        shape = {"rows": self._sequence // self._mesh.shape["cp"], "n": n, "k": k}
        for name, samples in times.items():
            yield (
                shape
                | {"variant": name}
                | summary(samples)
                | ({"error": errors[name]} if name in errors else {})
            )

    # --- operands ---

    def _normal(self, shape, spec, seed, scale=1.0):
        make = jax.jit(
            lambda key: (scale * jax.random.normal(key, shape)).astype(jnp.bfloat16),
            out_shardings=NamedSharding(self._mesh, spec),
        )
        return make(jax.random.key(seed))

    def _weight(self, operator):
        columns = sum(self._qkv.heads) * self._head_dim
        shape = (self._width, columns)
        if operator.startswith("a2a_out_proj"):
            shape = (self._out.heads[0] * self._head_dim, self._width)
        return self._normal(shape, P(), 1000, shape[0] ** -0.5)

    def _operand(self, operator, seed):
        tokens = self._normal((1, self._sequence, self._width), SEQUENCE, seed)
        if operator in ("qkv_proj_a2a", "a2a_out_proj.backward"):
            return tokens
        ex = self._qkv if operator.startswith("qkv") else self._out
        parts = tuple(
            self._normal(
                (1, self._sequence, local * ex.num_ranks, self._head_dim), HEADS, seed
            )
            for local in ex.local_heads
        )
        return parts if operator.startswith("qkv") else parts[0]

    def _lower(self, function, operand_spec, result_specs, operands, weight):
        """The traced program; NotImplementedError if the implementation refuses."""
        count = 1 if result_specs is None else len(result_specs)
        out_specs = [P("cp")] if result_specs is None else list(result_specs)

        def body(operands, weight):
            results = chain(function, count)(operands, weight)
            # Parts alone have results of any shape: their size is not looked at.
            return results if result_specs else [r.reshape(1, -1) for r in results]

        mapped = jax.shard_map(
            body,
            mesh=self._mesh,
            in_specs=([operand_spec] * self._calls, P()),
            out_specs=out_specs * self._calls,
        )
        return jax.jit(mapped).lower(operands, weight)

    # --- variants ---

    def _implementations(self, operator: Callable[[str], Variant]):
        others = dispatch.available_implementations()
        # Without a deadline, "pallas_remote" might never come back.
        others = [n for n in others if n not in ("host", "pallas_remote")]
        names = dict.fromkeys(["xla", self._name, *others])
        return {n: operator(n) for n in names} | {
            f"{self._name} unmarked": _unmarked(operator(self._name))
        }

    def _qkv_operator(self, name: str) -> Variant:
        n, k = self._qkv.heads[:2]
        return lambda x, w: ju.qkv_proj_a2a(
            x, w, axis_name="cp", num_heads=n, num_kv_heads=k, implementation=name
        )

    def _qkv_forward(self) -> dict[str, Variant]:
        return self._implementations(self._qkv_operator) | {
            "only dot": lambda x, w: (_dot(x, w),),
        }

    def _qkv_backward(self) -> dict[str, Variant]:
        """Gradient of x. The kernels also write what that of w needs."""
        x = (1, self._sequence // self._qkv.num_ranks, self._width)
        return self._implementations(_backward_of(self._qkv_operator, x)) | {
            "only exchange": lambda parts, w: (
                reference.join_segments(self._native.gather(self._qkv, parts)),
            ),
            "only NCCL": lambda parts, w: (
                reference.join_segments(reference.gather(self._qkv, parts)),
            ),
        }

    def _out_operator(self, name: str) -> Variant:
        return lambda a, w: (
            ju.a2a_out_proj(a, w, axis_name="cp", implementation=name),
        )

    def _out_forward(self) -> dict[str, Variant]:
        rows = self._sequence // self._out.num_ranks
        return self._implementations(self._out_operator) | {
            # As many bytes as the rank's rows of the gathered operand.
            "only dot": lambda a, w: (_dot(lax.reshape(a, (1, rows, w.shape[0])), w),),
            "only exchange": lambda a, w: (
                _flat(self._native.gather(self._out, (a,))[0]),
            ),
            "only NCCL": lambda a, w: (_flat(reference.gather(self._out, (a,))[0]),),
        }

    def _out_backward(self) -> dict[str, Variant]:
        a = (1, self._sequence, self._out.local_heads[0], self._head_dim)
        return self._implementations(_backward_of(self._out_operator, a)) | {
            "only dot": lambda dy, w: (_dot(dy, w, transposed=True),),
        }


def _backward_of(operator: Callable[[str], Variant], shape: tuple[int, ...]):
    """The gradient of an operator's first argument, of this shape."""

    def named(name):
        def variant(cotangents, w):
            # Nothing depends on its value, so XLA drops it and the forward pass.
            zeros = lax.pcast(jnp.zeros(shape, jnp.bfloat16), "cp", to="varying")
            backward = jax.vjp(lambda x: operator(name)(x, w), zeros)[1]
            one = not isinstance(cotangents, tuple)
            return backward((cotangents,) if one else cotangents)

        return variant

    return named


def _unmarked(function: Variant) -> Variant:
    """Without the mark that makes the call a collective for XLA."""

    def traced(*args):
        with ju.settings(collective_calls=False):
            return function(*args)

    return traced


def _dot(x, w, transposed=False):
    return reference.project(x, w, None, w_transposed=transposed)


def _flat(x):
    return lax.reshape(x, (*x.shape[:2], x.shape[2] * x.shape[3]))
