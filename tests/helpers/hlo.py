# SPDX-License-Identifier: Apache-2.0
"""Counts collectives, and the bytes they move, in compiled HLO text."""

import collections
import dataclasses
import re

import jax

_BYTES = {
    "pred": 1,
    "s8": 1,
    "u8": 1,
    "f8e4m3fn": 1,
    "f8e5m2": 1,
    "bf16": 2,
    "f16": 2,
    "s32": 4,
    "u32": 4,
    "f32": 4,
    "f64": 8,
}
_KINDS = (
    "all-to-all",
    "ragged-all-to-all",
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "collective-permute",
    "collective-broadcast",
)
_LINE = re.compile(
    r"= (?P<result>\(.*?\)|\S+) (?P<kind>"
    + "|".join(sorted(_KINDS, key=len, reverse=True))
    + r")(?P<start>-start)?\("
)
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\]")
_CUSTOM = re.compile(r'custom_call_target="(jax_ulysses\.[^"]+)"')


@dataclasses.dataclass
class Collectives:
    """What a module contains.

    Attributes:
      count: number of operations by kind.
      sizes: bytes of the result on one device, of each operation, by kind.
      fused: number of calls by FFI target of the library.
    """

    count: collections.Counter
    sizes: dict[str, list[int]]
    fused: collections.Counter

    @property
    def exchanges(self) -> int:
        """Exchanges of any implementation."""
        return self.count["all-to-all"] + self.fused.total()

    @property
    def others(self) -> dict[str, int]:
        """Collectives that are no exchange."""
        return {k: n for k, n in self.count.items() if k != "all-to-all"}


def of(jitted, *args) -> Collectives:
    """Compiles a jitted function and looks at the result."""
    return parse(jitted.lower(*args).compile().as_text())


def of_function(fn, *args) -> Collectives:
    """The same for a function that is not jitted yet."""
    return of(jax.jit(fn), *args)


def parse(text: str) -> Collectives:
    """Reads a compiled module."""
    count, sizes = collections.Counter(), collections.defaultdict(list)
    for line in text.splitlines():
        found = _LINE.search(line)
        if not found:
            continue
        count[found["kind"]] += 1
        total = 0
        for dtype, dims in _SHAPE.findall(found["result"]):
            size = _BYTES[dtype]
            for dim in filter(None, dims.split(",")):
                size *= int(dim)
            total += size
        sizes[found["kind"]].append(total)
    return Collectives(count, dict(sizes), collections.Counter(_CUSTOM.findall(text)))
