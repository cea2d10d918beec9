"""Reads a Fusion back from its text.

In: what `str(fusion)` printed, Python over the names below and nothing else. Out: the Fusion: `read(str(f))
== f`. Example of a line:

    add_0 = tensor('add_0', float32, (a0, a1))
"""

from __future__ import annotations

import keyword
from functools import lru_cache
from typing import Any

from . import size as sz
from . import statements
from .dtypes import DTYPES, DType
from .fusion import (
    Axis,
    Fusion,
    Located,
    Lookup,
    NumberInput,
    Output,
    Pointwise,
    Position,
    Random,
    Reduce,
    Reshape,
    Scan,
    TensorInput,
    Update,
    Value,
    Walk,
    Within,
)
from .layout import Room
from .values import Window, extent


def read(text: str) -> Fusion:
    """The Fusion that `text` builds. Raises SyntaxError, with the line and the reason, where it is not such
    code."""
    return statements.record(text, Fusion, vocabulary())


def vocabulary() -> dict[str, Any]:
    """What the names in such code mean."""
    names: dict[str, Any] = {d.name: d for d in DTYPES.values()}
    names |= {"leaf": _leaf, "ceildiv": sz.ceildiv, "min": sz.minimum, "max": sz.maximum, "eq": sz.eq,
              "lt": sz.lt, "le": sz.le, "pow2": sz.pow2, "nextpow2": sz.nextpow2,
              "const": sz.const}  # fmt: skip
    names |= {
        "axis": _axis,
        "tensor": _tensor,
        "Fusion": Fusion,
        "output": Output,
        "room": Room,
        "input": TensorInput,
    }
    names |= {"number": _number, "number_input": NumberInput, "literal": _literal, "extent": extent,
              "pointwise": Pointwise, "reduce": Reduce, "scan": Scan, "random": Random, "update": Update,
              "reshape": Reshape, "lookup": Lookup, "located": Located, "walk": Walk,
              "window": Window, "within": Within, "position": Position}  # fmt: skip
    return names | {"inf": float("inf"), "nan": float("nan")}


def _leaf(position: int, name: str) -> sz.Size:
    return sz.leaf(position, _identifier(name))


def _axis(name: str, extent: sz.Size | int) -> Axis:
    return Axis(_identifier(name), sz.as_size(extent))


def _tensor(name: str, dtype: DType, dims: tuple[Axis | None, ...]) -> Value:
    return Value(_identifier(name), dtype, dims)


def _number(name: str, dtype: DType) -> Value:
    return Value(_identifier(name), dtype, None)


def _literal(value: bool | int | float | complex, dtype: DType) -> Value:
    return Value(repr(value), dtype, None, value)


def _identifier(name: str) -> str:
    """`name`, which is printed as that of a variable."""
    if not name.isidentifier() or keyword.iskeyword(name):
        raise ValueError(f"{name!r} is not a name")
    if name in _taken():
        raise ValueError(f"{name!r} means something else in such code")
    return name


@lru_cache(maxsize=1)
def _taken() -> frozenset[str]:
    return frozenset(vocabulary())
