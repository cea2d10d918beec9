"""Size expressions: integers that are computed from the sizes, strides and pointers of one call.

In: leaves of a call. Out: `Size` trees, interned (equal trees that live are one object), evaluated by Python
while a plan is built and by C++ on every later call. Example: `ceildiv(leaf(0, "s0_0") * 4, 128)`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any
from weakref import WeakValueDictionary

_FAR = 1 << 62  # "divisible by everything": the alignment of the integer 0


def _pow2(x: int) -> int:
    return (x & -x) if x else _FAR


def _nextpow2(x: int) -> int:
    return 1 if x <= 1 else 1 << (x - 1).bit_length()


#: name -> meaning. C++ implements the same names; `/` and `%` see no negative operand; division by 0 gives 0.
OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a // b if b else 0,
    "mod": lambda a, b: a % b if b else 0,
    "ceildiv": lambda a, b: -(-a // b) if b else 0,
    "min": min,
    "max": max,
    "eq": lambda a, b: int(a == b),
    "lt": lambda a, b: int(a < b),
    "le": lambda a, b: int(a <= b),
    "pow2": lambda a, b: _pow2(a),  # largest power of two that divides a
    "nextpow2": lambda a, b: _nextpow2(a),  # smallest power of two not below a
}

#: those that Python writes between their operands
INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "//", "mod": "%"}


@dataclass(frozen=True, eq=False)
class Size:
    """A node: `op` is `const` (value in `a`), `leaf` (position in the call's leaf vector in `a`, name in `b`)
    or a key of `OPERATIONS` with `Size` operands. Build nodes with the functions below or with operators;
    never directly."""

    op: str
    a: Any
    b: Any = None
    # where it stands among the operands of a sum or product; the same in every process, as generated code is
    order: int = 0

    def __add__(self, other):
        return binary("add", self, other)

    def __radd__(self, other):
        return binary("add", other, self)

    def __sub__(self, other):
        return binary("sub", self, other)

    def __rsub__(self, other):
        return binary("sub", other, self)

    def __mul__(self, other):
        return binary("mul", self, other)

    __rmul__ = __mul__

    def __floordiv__(self, other):
        return binary("div", self, other)

    def __rfloordiv__(self, other):
        return binary("div", other, self)

    def __mod__(self, other):
        return binary("mod", self, other)

    def __rmod__(self, other):
        return binary("mod", other, self)

    @property
    def is_const(self) -> bool:
        return self.op == "const"

    def __str__(self) -> str:
        text = self.text()
        return text if len(text) <= 160 else f"{text[:157]}..."

    def text(self) -> str:
        """The whole expression, which `ir.text` can read; `str` cuts long ones."""
        if self.op == "const":
            return str(self.a)
        if self.op == "leaf":
            return self.b
        if self.op in INFIX:
            return f"({self.a.text()} {INFIX[self.op]} {self.b.text()})"
        operands = self.a.text() if self.op in ("pow2", "nextpow2") else f"{self.a.text()}, {self.b.text()}"
        return f"{self.op}({operands})"

    __repr__ = __str__


#: Cache: one object per tree, so `is` compares trees. A tree that nobody holds is dropped; the numbers in a
#: key stay those of its operands as long as the tree lives, since it holds them.
_interned: WeakValueDictionary[tuple, Size] = WeakValueDictionary()
_recent: deque[Size] = deque(maxlen=1 << 14)  # what one plan drops, the next one needs
_lock = threading.Lock()


def _node(op, a, b=None) -> Size:
    key = (op, a if op in ("const", "leaf") else id(a), b if op == "leaf" else id(b))
    node = _interned.get(key)
    if node is None:
        parts = [x.order if isinstance(x, Size) else x for x in (op, a, b)]
        order = int.from_bytes(blake2b(repr(parts).encode(), digest_size=8).digest(), "big")
        with _lock:
            node = _interned.setdefault(key, Size(op, a, b, order))
        _recent.append(node)
    return node


def const(value: int) -> Size:
    return _node("const", int(value))


def leaf(position: int, name: str) -> Size:
    """The integer at `position` of the call's leaf vector; `name` is for printing."""
    return _node("leaf", position, name)


def as_size(x: Size | int) -> Size:
    return x if isinstance(x, Size) else const(x)


def binary(op: str, a: Size | int, b: Size | int) -> Size:
    """`op(a, b)`, folded where both are constants or one is neutral; sums and products are ordered, so that
    `a * b` and `b * a` are one object."""
    a, b = as_size(a), as_size(b)
    if a.is_const and b.is_const:
        return const(OPERATIONS[op](a.a, b.a))
    if op in ("add", "mul", "min", "max", "eq") and (a.is_const or (not b.is_const and b.order < a.order)):
        a, b = b, a  # constants last
    if b.is_const:
        if (op in ("add", "sub") and b.a == 0) or (op in ("mul", "div", "ceildiv") and b.a == 1):
            return a
        if op == "mul" and b.a == 0:
            return b
        if op == "mod" and b.a == 1:
            return const(0)
    if a is b:
        if op in ("min", "max"):
            return a
        if op in ("eq", "le"):
            return const(1)
        if op == "lt":
            return const(0)
    return _node(op, a, b)


def ceildiv(a, b) -> Size:
    return binary("ceildiv", a, b)


def minimum(a, b) -> Size:
    return binary("min", a, b)


def maximum(a, b) -> Size:
    return binary("max", a, b)


def eq(a, b) -> Size:
    return binary("eq", a, b)


def lt(a, b) -> Size:
    return binary("lt", a, b)


def le(a, b) -> Size:
    return binary("le", a, b)


def both(a: Size, b: Size) -> Size:
    """Logical and of two 0/1 sizes."""
    return binary("mul", a, b)


def pow2(a) -> Size:
    """The largest power of two that divides `a`; 2**62 for 0."""
    a = as_size(a)
    return const(_pow2(a.a)) if a.is_const else _node("pow2", a, const(0))


def nextpow2(a) -> Size:
    a = as_size(a)
    return const(_nextpow2(a.a)) if a.is_const else _node("nextpow2", a, const(0))


def product(sizes: Sequence[Size | int]) -> Size:
    result = const(1)
    for s in sizes:
        result = result * s
    return result


def quotient(size: Size | int, by: Size | int) -> Size | None:
    """`size / by` where `by` is visibly a factor of `size`, else None."""
    size, by = as_size(size), as_size(by)
    if size is by:
        return const(1)
    if by.is_const and by.a == 1:
        return size
    if size.is_const and by.is_const and size.a % by.a == 0:
        return const(size.a // by.a)
    if size.op == "mul":
        for part, rest in ((size.a, size.b), (size.b, size.a)):
            q = quotient(part, by)
            if q is not None:
                return q * rest
        if by.op == "mul":
            first = quotient(size, by.a)
            return None if first is None else quotient(first, by.b)
    return None


def divided(size: Size | int, by: Size | int) -> Size:
    """`size / by`, which is known to be whole, as simply as it can be written."""
    found = quotient(size, by)
    return binary("div", size, by) if found is None else found


def evaluate(size: Size, leaves: Sequence[int], memo: dict[Size, int] | None = None) -> int:
    """The value of `size` for one call's leaf vector. `memo` may be shared between evaluations of one call.
    Iterative, since a size may be as deep as a program is long."""
    memo = {} if memo is None else memo
    stack = [size]
    while stack:
        node = stack[-1]
        if node in memo:
            stack.pop()
        elif node.op == "const":
            memo[node] = node.a
        elif node.op == "leaf":
            memo[node] = leaves[node.a]
        else:
            pending = [x for x in (node.a, node.b) if x not in memo]
            if pending:
                stack.extend(pending)
            else:
                memo[node] = OPERATIONS[node.op](memo[node.a], memo[node.b])
    return memo[size]
