"""What the symbols of pointwise ops mean: `Pointwise("exp", ...)`.

In: definitions, which stand beside the rows that use them (ops/), and those below that passes use themselves.
Out: for emission the C expression of a symbol, for schedules whether it is cheap, for budgets
(`ir.budgets`) its fast form and how far that is off. Nothing else looks at C text. Example:

    define("lerp", "lerp({0}, {1}, {2})")
    find("lerp").template("f")   # -> "lerp({0}, {1}, {2})"
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from .dtypes import NARROW, DType

KINDS = {"boolean": "b", "integer": "i", "complex": "c"}  #: keyword of `define` -> kind of a dtype
COSTLY = 30  #: instructions an element: more than a kernel that reads 2 bytes and stores 2 has to spare
CANCELS = float("inf")  #: in `Symbol.grows`: the result may be far smaller than the operand


@dataclass(frozen=True)
class Fast:
    """A form of a symbol in float32 that takes fewer instructions of a GPU (codegen/runtime/fast.h).

    `error`: how far it is off at most, relative to the result; or to `of`, a template, where the formula
    cancels. `exact`: how far the exact form is off in float32, relative to the same, or to `exact_of`.
    tests/headers/test_fast.py holds both against double. `algebraic`: results are often numbers that 16 bits
    hold, so that where they cancel nothing at all may be left."""

    template: str
    error: float
    exact: float
    of: str = ""
    exact_of: str = ""
    algebraic: bool = False


@dataclass(frozen=True)
class Symbol:
    """`templates` by the kind of the dtype that is computed in (`f b i c`); `f` serves kinds that are absent.
    `{0}`, `{1}`... stand for the operands, `{ctype}` for the C type of the result. `cheap`: an instruction or
    two, less than it costs to keep the result where it is needed again. `cost`: about how many instructions a
    GPU takes for an element in float32.

    What errors do: `fast`: the fast form, if there is one. `grows`: for each operand, at most how many times
    as large its relative error is in the result; `CANCELS` where there is no such bound, but the result moves
    no more than operands do; empty where it may jump, or nobody has said. `positive`: never below 0.
    `exact`: the symbol that this one is the fast form of, else its own name."""

    name: str
    templates: Mapping[str, str]
    cheap: bool = False
    fast: Fast | None = None
    grows: tuple[float, ...] = ()
    positive: bool = False
    exact: str = ""
    cost: int = 10

    def template(self, kind: str = "f") -> str:
        return self.templates.get(kind, self.templates["f"])


#: How the names of symbols begin that round to a dtype of 16 bits.
ROUNDING = "stored_as_"

_symbols: dict[str, Symbol] = {}  # registry: name -> symbol


def define(
    name: str,
    template: str,
    cheap: bool = False,
    fast: Fast | None = None,
    grows: tuple[float, ...] = (),
    positive: bool = False,
    cost: int = 10,
    **by_kind: str,
) -> str:
    """Adds a symbol, and `fast_of(name)` where it has a fast form; `by_kind` gives other templates:
    `boolean=`, `integer=`, `complex=`; the rest: see `Symbol`; the `cost` of a `cheap` one is 1. Returns its
    name. Raises ValueError where the name means something else already."""
    if set(by_kind) - set(KINDS):
        raise TypeError(f"unknown kinds {set(by_kind) - set(KINDS)}")
    templates = {"f": template, **{KINDS[kind]: text for kind, text in by_kind.items()}}
    cost = 1 if cheap else cost
    _add(Symbol(name, templates, cheap, fast, grows, positive, name, cost))
    if fast is not None:
        _add(Symbol(fast_of(name), {"f": fast.template}, cheap, None, grows, positive, name))
    return name


def _add(symbol: Symbol) -> None:
    if _symbols.setdefault(symbol.name, symbol) != symbol:
        raise ValueError(f"the symbol {symbol.name} is defined twice")


def fast_of(name: str) -> str:
    """The name of the fast form of symbol `name`."""
    return f"fast_{name}"


def filled(template: str, operands: Sequence[str]) -> str:
    """`template` with its operands: `filled("({0} + {1})", ("x", "y")) == "(x + y)"`."""
    if "{" not in template:
        return template
    return "".join([part if isinstance(part, str) else operands[part] for part in _parts(template)])


@lru_cache(maxsize=1024)
def _parts(template: str) -> list[str | int]:
    """The text between the holes of a template, and the numbers of these, in order."""
    parts = re.split(r"\{(\d+)\}", template)
    return [int(part) if k % 2 else part for k, part in enumerate(parts)]


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
define("copy", "{0}", cheap=True, grows=(1,))
define("convert", "convert<{ctype}>({0})", cheap=True, grows=(1,))
for _dtype in NARROW:
    define(f"round_to_{_dtype}", rounded("{0}", _dtype), cheap=True, grows=(1,))
define("zero_or_nan", "({0} - {0})", cheap=True)
define("without_minus_zero", "({0} + 0)", cheap=True, grows=(1,))
