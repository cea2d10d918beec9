"""What the symbols of pointwise ops mean: `Pointwise("exp", ...)`.

In: definitions, which stand beside the rows that use them (ops/), and those below that passes use themselves.
Out: for emission the C expression of a symbol, for schedules whether it is cheap. Nothing else looks at C
text. Example:

    define("lerp", "lerp({0}, {1}, {2})")
    find("lerp").template("f")   # -> "lerp({0}, {1}, {2})"
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .dtypes import BFLOAT16, HALF, DType

KINDS = {"boolean": "b", "integer": "i", "complex": "c"}  #: keyword of `define` -> kind of a dtype


@dataclass(frozen=True)
class Symbol:
    """`templates` by the kind of the dtype that is computed in (`f b i c`); `f` serves kinds that are absent.
    `{0}`, `{1}`... stand for the operands, `{ctype}` for the C type of the result. `cheap`: an instruction or
    two, less than it costs to keep the result where it is needed again."""

    name: str
    templates: Mapping[str, str]
    cheap: bool = False

    def template(self, kind: str = "f") -> str:
        return self.templates.get(kind, self.templates["f"])


_symbols: dict[str, Symbol] = {}  # registry: name -> symbol


def define(name: str, template: str, cheap: bool = False, **by_kind: str) -> str:
    """Adds a symbol; `by_kind` gives other templates: `boolean=`, `integer=`, `complex=`. Returns its name.
    Raises ValueError where the name means something else already."""
    if set(by_kind) - set(KINDS):
        raise TypeError(f"unknown kinds {set(by_kind) - set(KINDS)}")
    symbol = Symbol(name, {"f": template, **{KINDS[kind]: text for kind, text in by_kind.items()}}, cheap)
    if _symbols.setdefault(name, symbol) != symbol:
        raise ValueError(f"the symbol {name} is defined twice")
    return name


def filled(template: str, operands: Sequence[str]) -> str:
    """`template` with its operands: `filled("({0} + {1})", ("x", "y")) == "(x + y)"`."""
    return re.sub(r"\{(\d+)\}", lambda hole: operands[int(hole[1])], template)


def find(name: str) -> Symbol:
    """The symbol of that name. Raises KeyError where there is none."""
    return _symbols[name]


def all_symbols() -> tuple[Symbol, ...]:
    """In the order of their definitions."""
    return tuple(_symbols.values())


def rounded(template: str, dtype: DType) -> str:
    """`template`, whose result is rounded to `dtype`: registers keep 16-bit floats as float."""
    return template if dtype.register is dtype else f"convert<float>(convert<{dtype.ctype}>({template}))"


# Those that passes use themselves.
define("copy", "{0}", cheap=True)
define("convert", "convert<{ctype}>({0})", cheap=True)
for _dtype in (HALF, BFLOAT16):
    define(f"round_to_{_dtype}", rounded("{0}", _dtype), cheap=True)
define("zero_or_nan", "({0} - {0})", cheap=True)
define("without_minus_zero", "({0} + 0)", cheap=True)
