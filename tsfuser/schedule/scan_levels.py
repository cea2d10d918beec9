"""Which scans share a kernel: those along one dim and in one direction. Others read what a kernel has stored.

In: a Fusion. Out: the Fusion in which no value of one level depends on scans of two ways, and no
reduction on a scan of its own level. Where one would, what it reads is stored, and read again. Example:

    y = scan(x, a0);  z = scan(y, a1)      becomes      y = scan(x, a0);  z = scan(reshape(copy(y)), a1)
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeAlias

from ..ir.fusion import Axis, Fusion, Op, Pointwise, Reduce, Reshape, Scan, Value

Way: TypeAlias = tuple[tuple[Axis, ...], bool]  # the axes of a scan, and whether it goes backwards


def in_levels(fusion: Fusion) -> Fusion:
    """`fusion`, with what other scans and reductions read of a scan stored first; itself without scans."""
    if not any(isinstance(op, Scan) for op in fusion.ops):
        return fusion
    return replace(fusion, ops=tuple(_Levels().ops_of(fusion)))


class _Levels:
    """`ways`: by the name of a value the way of the scans that it depends on since memory; `stored`: what
    stands for a value that is stored on the way."""

    def __init__(self) -> None:
        self.ways: dict[str, Way] = {}
        self.stored: dict[str, Value] = {}
        self.ops: list[Op] = []

    def ops_of(self, fusion: Fusion) -> list[Op]:
        """The ops of `fusion`, and those between them that store."""
        for op in fusion.ops:
            if not isinstance(op, Reshape):  # which reads memory anyway
                op = self._with_stored_operands(op)
                self._note(op)
            self.ops.append(op)
        return self.ops

    def _with_stored_operands(self, op: Op) -> Op:
        """`op`, reading from memory what its own kernel cannot compute."""
        ways = {self.ways[v.name] for v in op.operands if v.name in self.ways}
        own = {(op.axes, op.backwards)} if isinstance(op, Scan) else set()
        if not ways or (not isinstance(op, Reduce) and len(ways | own) == 1):
            return op
        operands = tuple(self._from_memory(v) if v.name in self.ways else v for v in op.operands)
        return replace(op, operands=operands)

    def _note(self, op: Op) -> None:
        ways = [self.ways[v.name] for v in op.operands if v.name in self.ways]
        if isinstance(op, Scan):
            ways = [(op.axes, op.backwards)]
        if ways:
            self.ways[op.output.name] = ways[0]

    def _from_memory(self, value: Value) -> Value:
        if value.name not in self.stored:
            copy = replace(value, name=f"{value.name}_stored")
            read = replace(value, name=f"{value.name}_read")
            self.ops += [Pointwise("copy", "copy", (value,), None, copy), Reshape("reshape", (copy,), read)]
            self.stored[value.name] = read
            self.ways[copy.name] = self.ways[value.name]
        return self.stored[value.name]
