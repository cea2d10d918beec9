"""Values that one sweep computes and the next ones read.

In: a draft whose schedule places values in registers or in scratch memory. Out: the statements of a sweep, in
which the first one that computes such a value saves it, and the others load it. Example, of softmax:

    vec<float, 4> exp_4_kept[2]
    for u, lane: { ...; exp_4 = exp(sub_3); exp_4_kept[u][lane] = exp_4; ... }
    for u, lane: { exp_4 = exp_4_kept[u][lane]; ... }
"""

from __future__ import annotations

from ..ir.fusion import Op
from .draft import Draft
from .index import Expr
from .loop_ir import Array, Compute, Load, Scratch, SetLane, Stmt, Store

WIDEST = 16  # bytes of the widest type, complex_t<double>


class SavedValues:
    """`arrays`: those that hold the values saved so far, by their names."""

    def __init__(self, draft: Draft):
        self.draft = draft
        self.in_registers = draft.schedule.values_in("register")
        self.in_scratch = draft.schedule.values_in("scratch")
        self.arrays: dict[str, str] = {}
        unrolled = [x for x in draft.loops if x.bind == "unroll"]
        self._vectors = unrolled[0].extent.a if unrolled else 1  # of a value
        self._vector = next((x.name for x in unrolled if x.extent.a > 1), "0")
        self._lane = draft.lane.name if draft.lane.extent.is_const and draft.lane.extent.a > 1 else "0"

    def sweep(self, number: int) -> tuple[list[Stmt], list[Stmt]]:
        """Arrays of registers to declare before sweep `number`, and statements for the values it needs along
        a row, in order."""
        draft = self.draft
        ops, wanted = draft.sweeps.needs(number, self.arrays)
        loads = [
            s
            for b in draft.segment.loads
            if b.value.name in wanted and draft.sweeps.varies(b.value)
            for s in draft.loads[b.value.name]
        ]
        saved = [self._loaded(name) for name in self.arrays if name in wanted]
        declared: list[Stmt] = []
        made: list[Stmt] = []
        for op in ops:
            made += draft.computed[op.output.name]
            if op.output.name in self.in_registers:
                declared.append(self._array(op))
                made.append(
                    SetLane(f"{self.arrays[op.output.name]}[{self._vector}]", self._lane, op.output.name)
                )
            elif op.output.name in self.in_scratch:
                made.append(self._stored(op))
        return declared, [*loads, *saved, *made]

    def scratch(self) -> list[Stmt]:
        """The arrays in scratch memory: each has room for a row of any type."""
        names = [name for name in self.arrays if name in self.in_scratch]
        if not names:
            return []
        dim = self.draft.schedule.domain.dims[-1]
        row = self.draft.params.size(dim.extent, f"{dim.name}_size")
        registers = self.draft.elements.registers
        return [Scratch(self.arrays[name], registers[name], row, WIDEST * k) for k, name in enumerate(names)]

    def _array(self, op: Op) -> Array:
        name = op.output.name
        array = self.arrays[name] = f"{name}_kept"
        register, lanes = self.draft.elements.registers[name], self.draft.lane.extent.a
        return Array(array, f"vec<{register}, {lanes}>", 1, self._vectors)

    def _stored(self, op: Op) -> Store:
        name = op.output.name
        array = self.arrays[name] = f"{name}_kept"
        register = self.draft.elements.registers[name]
        return Store(array, register, register, self._at_row(), name, self.draft.row_guard, shared=True)

    def _loaded(self, name: str) -> Stmt:
        array, register = self.arrays[name], self.draft.elements.registers[name]
        if name in self.in_scratch:
            return Load(name, register, array, self._at_row(), self.draft.row_guard, shared=True)
        place = f"{array}[{self._vector}]"
        return Compute(name, register, "copy", (place,), (place,), self._lane)

    def _at_row(self) -> Expr:
        """Index of an element in its row."""
        return self.draft.at.of[self.draft.schedule.domain.dims[-1].name]
