"""Index expressions of generated code: integers built from loop variables, kernel arguments and constants.

In: `Var`s and Python ints. Out: trees that fold as they are built and print as C. Example:
`add(mul(Var("row"), Var("cols")), Var("lane"))`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Union


@dataclass(frozen=True)
class Var:
    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Const:
    value: int

    def __str__(self) -> str:
        return str(self.value)


@dataclass(frozen=True)
class Bin:
    """`op` is `+`, `-`, `*`, `/`, `%`, `<`, `>`, `&&`, `min` or `quotient`; indices are not negative, so `/`
    and `%` are plain."""

    op: str
    a: Expr
    b: Expr

    def __str__(self) -> str:
        if self.op in _CALLED:
            return f"{_CALLED[self.op]}({self.a}, {self.b})"
        left, right = _wrap(self.a, self.op, False), _wrap(self.b, self.op, True)
        return f"{left} {self.op} {right}"


@dataclass(frozen=True)
class Select:
    condition: Expr
    yes: Expr
    no: Expr

    def __str__(self) -> str:
        return f"({self.condition} ? {self.yes} : {self.no})"


@dataclass(frozen=True)
class Passed:
    """How many of the `count` numbers of field `table`, which ascend, are at most `place`."""

    table: str
    count: int
    place: Expr

    def __str__(self) -> str:
        return f"passed<{self.count}>({self.table}, {self.place})"


@dataclass(frozen=True)
class Entry:
    """The element `at` of field `table`."""

    table: str
    at: Expr

    def __str__(self) -> str:
        return f"{self.table}[{self.at}]"


Expr = Union[Var, Const, Bin, Select, Passed, Entry]

_CALLED = {"min": "smaller", "quotient": "quotient"}  # op -> its function in codegen/runtime/index.h
_PRECEDENCE = {"*": 3, "/": 3, "%": 3, "+": 2, "-": 2, "<": 1, ">": 1, "&&": 0}


def _wrap(e: Expr, op: str, right: bool) -> str:
    if not isinstance(e, Bin) or e.op in _CALLED:
        return str(e)
    inner, outer = _PRECEDENCE[e.op], _PRECEDENCE[op]
    plain = inner > outer or (inner == outer and not right and op in "+*&&-")
    return str(e) if plain else f"({e})"


def as_expr(x: Expr | int | str) -> Expr:
    if isinstance(x, int):
        return Const(x)
    return Var(x) if isinstance(x, str) else x


def add(a, b) -> Expr:
    a, b = as_expr(a), as_expr(b)
    if isinstance(a, Const) and isinstance(b, Const):
        return Const(a.value + b.value)
    if a == Const(0):
        return b
    return a if b == Const(0) else Bin("+", a, b)


def sub(a, b) -> Expr:
    a, b = as_expr(a), as_expr(b)
    return a if b == Const(0) else Bin("-", a, b)


def mul(a, b) -> Expr:
    a, b = as_expr(a), as_expr(b)
    if isinstance(a, Const) and isinstance(b, Const):
        return Const(a.value * b.value)
    if Const(0) in (a, b):
        return Const(0)
    if a == Const(1):
        return b
    return a if b == Const(1) else Bin("*", a, b)


def div(a, b) -> Expr:
    a, b = as_expr(a), as_expr(b)
    return a if b == Const(1) else Bin("/", a, b)


def quotient(a, b) -> Expr:
    """`a / b` of indices that are surely not negative, by fewer instructions."""
    a, b = as_expr(a), as_expr(b)
    return a if b == Const(1) else Bin("quotient", a, b)


def mod(a, b) -> Expr:
    a, b = as_expr(a), as_expr(b)
    return Const(0) if b == Const(1) else Bin("%", a, b)


def less(a, b) -> Bin:
    return Bin("<", as_expr(a), as_expr(b))


def minimum(a, b) -> Expr:
    return Bin("min", as_expr(a), as_expr(b))


def both(conditions) -> Expr | None:
    """The conjunction of `conditions`, None for no condition."""
    result = None
    for c in conditions:
        result = c if result is None else Bin("&&", result, c)
    return result


def names(e: Expr | None) -> frozenset[str]:
    """Variables that occur in `e`."""
    if e is None or isinstance(e, Const):
        return frozenset()
    if isinstance(e, Var):
        return frozenset((e.name,))
    return frozenset().union(*map(names, _parts(e)))


def _parts(e: Expr) -> tuple[Expr, ...]:
    """The expressions that `e` is made of."""
    if isinstance(e, Bin):
        return e.a, e.b
    if isinstance(e, Select):
        return e.condition, e.yes, e.no
    if isinstance(e, Passed):
        return (e.place,)
    return (e.at,) if isinstance(e, Entry) else ()


def substitute(e: Expr | None, table: Mapping[str, Expr]) -> Expr | None:
    """`e` with variables replaced, folded again."""
    if e is None or isinstance(e, Const):
        return e
    if isinstance(e, Var):
        return table.get(e.name, e)
    if isinstance(e, Select):
        return Select(*(substitute(x, table) for x in (e.condition, e.yes, e.no)))
    if isinstance(e, Passed):
        return replace(e, place=substitute(e.place, table))
    if isinstance(e, Entry):
        return replace(e, at=substitute(e.at, table))
    a, b = substitute(e.a, table), substitute(e.b, table)
    fold = {"+": add, "-": sub, "*": mul, "/": div, "%": mod, "quotient": quotient}.get(e.op)
    return fold(a, b) if fold else Bin(e.op, a, b)


def coefficient(e: Expr, name: str) -> Expr | None:
    """The factor of variable `name` in `e`, which is linear in it; None if it is not."""
    if name not in names(e):
        return Const(0)
    if isinstance(e, Var):
        return Const(1)
    if isinstance(e, Bin) and e.op == "+":
        a, b = coefficient(e.a, name), coefficient(e.b, name)
        return None if a is None or b is None else add(a, b)
    if isinstance(e, Bin) and e.op == "*":
        if name not in names(e.b):
            a = coefficient(e.a, name)
            return None if a is None else mul(a, e.b)
        if name not in names(e.a):
            b = coefficient(e.b, name)
            return None if b is None else mul(e.a, b)
    return None


def conjuncts(e: Expr | None) -> list[Expr]:
    """The conditions whose conjunction is `e`."""
    if e is None:
        return []
    return conjuncts(e.a) + conjuncts(e.b) if isinstance(e, Bin) and e.op == "&&" else [e]


def bounds(e: Expr | None) -> list[Bin]:
    """Those of the conditions of `e` that say that an index is less than something."""
    return [c for c in conjuncts(e) if isinstance(c, Bin) and c.op == "<"]
