"""Records as code that builds them: what every level from the segment on prints.

In: a frozen dataclass over sizes, dtypes, axes, values and other such records. Out: Python text, which `read`
runs: `read(code(x), type(x), ...) == x`. Each leaf, axis and value is defined once, and so is each size that
occurs more than once. Example, of a loop over rows:

    size0_0 = leaf(0, 'size0_0')
    size0_1 = leaf(1, 'size0_1')
    row_size = size0_0 * size0_1
    schedule = Schedule(..., loops=(Loop('row', row_size, 'block'), ...))
"""

from __future__ import annotations

import keyword
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

from . import statements, text
from .dtypes import DType
from .fusion import (
    PLACES,
    Axis,
    Located,
    Lookup,
    Pointwise,
    Random,
    Reduce,
    Reshape,
    Scan,
    Value,
    Walk,
    tuple_text,
)
from .size import INFIX, Size
from .values import Window

_WIDTH = 100  # characters of a line
_LONG = 60  # characters of a formula that gets a name even where it occurs once
#: spelled as a Fusion prints them
_OPS = (Pointwise, Reduce, Scan, Random, Reshape, Lookup, Located, Walk, Window, *PLACES)


class SizeNames:
    """Names for sizes. `lines` defines them, one a line; `of` writes a size by them. `wishes`: sizes, each
    with the name that it should have if it gets one, or "". All formulas have names if `all_formulas` (but
    for wishes of ""), else those that occur twice or are long. `taken`: names that mean something else."""

    def __init__(
        self, wishes: Iterable[tuple[str, Size]], taken: Iterable[str] = (), all_formulas: bool = False
    ):
        wishes = list(wishes)
        self.lines: list[str] = []
        self.named: dict[Size, str] = {}
        self._text: dict[Size, str] = {}
        self._taken = set(taken)
        order = _in_order([size for _, size in wishes])
        wished: dict[Size, str] = {}
        for name, size in wishes:
            if name:
                wished.setdefault(size, name)
        uses = Counter(size for _, size in wishes)
        uses.update(part for size in order for part in _parts(size))
        for size in sorted((s for s in order if s.op == "leaf"), key=lambda leaf: leaf.a):
            self._define(size, size.b, f"leaf({size.a}, {size.b!r})")
        for size in order:
            if size.op in ("const", "leaf"):
                continue
            formula = self._formula(size)
            self._text[size] = f"({formula})" if size.op in INFIX else formula
            if uses[size] > 1 or len(formula) > _LONG or (all_formulas and size in wished):
                self._define(size, wished.get(size, "n"), formula)

    def of(self, size: Size) -> str:
        """`const(4)`, a name, or a formula of names."""
        return f"const({size.a})" if size.is_const else self._text[size]

    def unused(self, wish: str) -> str:
        """`wish` as an identifier that means nothing yet, which from now on is taken."""
        name, k = wish, 1
        while name in self._taken or keyword.iskeyword(name):
            k += 1
            name = f"{wish}_{k}"
        self._taken.add(name)
        return name

    def _define(self, size: Size, wish: str, formula: str) -> None:
        name = self._text[size] = self.named[size] = self.unused(wish)
        self.lines.append(f"{name} = {formula}")

    def _formula(self, size: Size) -> str:
        parts = [str(x.a) if x.is_const else self._text[x] for x in _parts(size)]
        if size.op not in INFIX:
            return f"{size.op}({', '.join(parts)})"
        return f"{parts[0]} {INFIX[size.op]} {parts[1]}"


def _parts(size: Size) -> tuple[Size, ...]:
    """The operands of a node."""
    if size.op in ("const", "leaf"):
        return ()
    return (size.a,) if size.op in ("pow2", "nextpow2") else (size.a, size.b)


def _in_order(roots: list[Size]) -> list[Size]:
    """All nodes below `roots`, operands first. Iterative, since a size may be as deep as a program is
    long."""
    found: dict[Size, None] = {}
    stack = list(reversed(roots))
    while stack:
        pending = [x for x in _parts(stack[-1]) if x not in found]
        if pending:
            stack.extend(pending)
        else:
            found.setdefault(stack.pop())
    return list(found)


def code(record: Any) -> str:
    """The statements that build `record`; the last one assigns it to its type's name in lower case."""
    return _Code(record).text()


def read(code_text: str, *records: type) -> Any:
    """What `code` has printed of a record of the first type of `records`, which are all types that occur in
    it. Raises SyntaxError, with the line and the reason, where it is not such code."""
    names = {**text.vocabulary(), **{kind.__name__: kind for kind in records}}
    return statements.record(code_text, records[0], names)


class _Code:
    """A record while it is written."""

    def __init__(self, record: Any):
        self.record = record
        kinds = {type(x).__name__ for x in _records(record)}
        self.sizes = SizeNames(_wishes(record), {*text.vocabulary(), *kinds, type(record).__name__.lower()})
        self.names: dict[Axis | Value, str] = {}
        self.lines = list(self.sizes.lines)
        found = dict.fromkeys(_records(record))
        for axis in (x for x in found if isinstance(x, Axis)):
            self._define(axis, f"axis({axis.name!r}, {self.sizes.of(axis.extent)})")
        for value in (x for x in found if isinstance(x, Value)):
            if not value.is_number:
                dims = tuple_text(["None" if a is None else self.names[a] for a in value.dims])
                self._define(value, f"tensor({value.name!r}, {value.dtype}, {dims})")
            elif value.literal is None and value.size is None:
                self._define(value, f"number({value.name!r}, {value.dtype})")

    def _define(self, what: Axis | Value, made: str) -> None:
        name = self.names[what] = self.sizes.unused(what.name)
        self.lines.append(f"{name} = {made}")

    def text(self) -> str:
        record = self.record
        return "\n".join([*self.lines, f"{type(record).__name__.lower()} = {self.written(record, 0)}"])

    def written(self, x: Any, indent: int) -> str:
        """`x` as an expression, broken into lines where it would be too long."""
        if isinstance(x, Size):
            return self.sizes.of(x)
        if isinstance(x, (Axis, Value)) and x in self.names:
            return self.names[x]
        if isinstance(x, Value):
            if x.size is not None:
                return f"extent({self.sizes.of(x.size)})"
            return f"literal({x.literal!r}, {x.dtype})"
        if isinstance(x, DType) or not (isinstance(x, tuple) or is_dataclass(x)):
            return repr(x)
        head = "" if isinstance(x, tuple) else _spelled(type(x))
        items = [(key, self.written(item, indent + 4)) for key, item in _items(x)]
        words = [f"{key}={item}" if key else item for key, item in items]
        line = f"{head}{tuple_text(words) if isinstance(x, tuple) else '(' + ', '.join(words) + ')'}"
        if "\n" not in line and len(line) + indent <= _WIDTH:
            return line
        inner = "".join(f"{' ' * (indent + 4)}{word},\n" for word in words)
        return f"{head}(\n{inner}{' ' * indent})"


def _spelled(kind: type) -> str:
    return kind.__name__.lower() if kind in _OPS else kind.__name__


def _items(x: Any) -> Iterator[tuple[str, Any]]:
    """(keyword, "" for a positional one; value) for each item of a tuple or field of a record; defaults are
    left out."""
    if isinstance(x, tuple):
        yield from (("", item) for item in x)
        return
    for f in fields(x):
        value = getattr(x, f.name)
        if f.compare and (f.default is MISSING or value != f.default):
            yield "" if f.default is MISSING else f.name, value


def _records(x: Any) -> Iterator[Any]:
    """All records in `x`, those inside of others first."""
    if isinstance(x, tuple):
        for item in x:
            yield from _records(item)
    elif is_dataclass(x) and not isinstance(x, (Size, DType)):
        for _, item in _items(x):
            yield from _records(item)
        yield x


def _wishes(record: Any) -> Iterator[tuple[str, Size]]:
    """All sizes in `record`, each with a name that would say what it is, or ""."""
    for x in dict.fromkeys(_records(record)):
        name = getattr(x, "name", None)
        for key, item in _items(x):
            for size in item if isinstance(item, tuple) else (item,):
                if isinstance(size, Size):
                    yield f"{name}_size" if isinstance(name, str) and key in ("", "extent") else "", size
