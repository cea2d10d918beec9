"""The arguments of a kernel, while its statements are made.

In: what a statement asks for: a pointer, a size, a number. Out: the C expression that reads it, and the
fields of the kernel's argument struct. Example: `Params(schedule).size(leaf(0, "n"), "n") == Var("args.n")`.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..ir.size import Size
from ..schedule.loops import Schedule
from . import index as ix
from .index import Expr, Var
from .kernel import Param


class Params:
    """The argument struct as it grows: asking twice for a thing gives one field."""

    def __init__(self, schedule: Schedule):
        self.fields: dict[tuple, Param] = {}
        self.index = "int64_t" if schedule.wide else "int32_t"
        self._launch: dict[Size, Expr] = {}
        for loop in schedule.loops:
            if loop.bind in ("thread.x", "thread.y") and not loop.extent.is_const:
                self._launch[loop.extent] = Var(f"block_{loop.bind[-1]}")

    def field(self, name: str, ctype: str, source: tuple) -> str:
        """The C expression that reads the field; `name` is a wish."""
        if source not in self.fields:
            self.fields[source] = Param(self._unused(name), ctype, source)
        return f"args.{self.fields[source].name}"

    def table(self, name: str, ctype: str, sources: Sequence[tuple]) -> str:
        """The C expression of an array with a field for each of `sources`; `name` is a wish."""
        keys = [("table", name, k, source) for k, source in enumerate(sources)]
        if keys[0] not in self.fields:
            unique = self._unused(name)
            self.fields |= {key: Param(f"{unique}[{key[2]}]", ctype, key[3]) for key in keys}
        return f"args.{self.fields[keys[0]].array}"

    def _unused(self, name: str) -> str:
        """`name`, or with a number behind it the first that is no field yet."""
        taken = {p.array or p.name for p in self.fields.values()}
        unique, k = name, 1
        while unique in taken:
            k += 1
            unique = f"{name}_{k}"
        return unique

    def size(self, size: Size, name: str) -> Expr:
        """A size as a constant, as a launch dimension, or as a field called `name`."""
        if size.is_const:
            return ix.Const(size.a)
        if size in self._launch:
            return self._launch[size]
        if size.op == "mul" and (size.b.is_const or self._launches(size)):
            return ix.mul(self.size(size.a, name), self.size(size.b, name))
        return Var(self.field(name, self.index, ("size", size)))

    def count(self, size: Size) -> str:
        """A size as an operand: it need not fit the kernel's indices."""
        if size.is_const:
            return str(size.a)
        known = self.fields.get(("size", size))
        return f"args.{known.name}" if known else self.field("count", "int64_t", ("size", size, "count"))

    def _launches(self, size: Size) -> bool:
        """Whether a launch dimension is a factor of `size`."""
        return size in self._launch or (
            size.op == "mul" and (self._launches(size.a) or self._launches(size.b))
        )
