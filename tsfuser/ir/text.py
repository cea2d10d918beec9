"""Reads a Fusion back from its text.

In: what `str(fusion)` printed, Python over the names below and nothing else. Out: the Fusion: `read(str(f))
== f`. Example of a line:

    add_0 = tensor('add_0', float32, (a0, a1))
"""

from __future__ import annotations

from typing import Any

from . import size as sz
from .dtypes import DTYPES
from .fusion import (
    Axis,
    Fusion,
    Lookup,
    NumberInput,
    Output,
    Pointwise,
    Position,
    Random,
    Reduce,
    Reshape,
    TensorInput,
    Update,
    Value,
    Walk,
    Within,
)
from .layout import Room
from .values import Window, extent


def read(text: str) -> Fusion:
    """The Fusion that `text` builds. Raises SyntaxError or NameError where it is not such code."""
    names = vocabulary()
    exec(compile(text, "<fusion>", "exec"), {"__builtins__": {}, "True": True, "False": False}, names)
    return names["fusion"]


def vocabulary() -> dict[str, Any]:
    """What the names in such code mean."""
    names: dict[str, Any] = {d.name: d for d in DTYPES.values()}
    names |= {"leaf": sz.leaf, "ceildiv": sz.ceildiv, "min": sz.minimum, "max": sz.maximum, "eq": sz.eq,
              "lt": sz.lt, "le": sz.le, "pow2": sz.pow2, "nextpow2": sz.nextpow2,
              "const": sz.const}  # fmt: skip
    names |= {
        "axis": lambda name, extent: Axis(name, sz.as_size(extent)),
        "tensor": Value,
        "Fusion": Fusion,
        "output": Output,
        "room": Room,
        "input": TensorInput,
    }
    names |= {"number": lambda name, dtype: Value(name, dtype, None), "number_input": NumberInput,
              "pointwise": Pointwise, "reduce": Reduce, "random": Random, "update": Update,
              "reshape": Reshape, "lookup": Lookup, "walk": Walk,
              "window": Window, "within": Within, "position": Position}  # fmt: skip
    names |= {
        "literal": lambda value, dtype: Value(repr(value), dtype, None, value),
        "extent": extent,
        "inf": float("inf"),
        "nan": float("nan"),
    }
    return names
