"""What the parts of a loop nest share while it is built.

In: Segment, Schedule. Out: a `Draft`: the statements of every load and op, and what has been said so far of
the row that a thread works on. Example: `Draft(segment, schedule, params, at).computed["add_0"]`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ..ir import size as sz
from ..ir.fusion import Reduce, Scan
from ..schedule.domain import Access
from ..schedule.loops import Loop, Schedule
from ..schedule.picks import Pick
from ..schedule.sweeps import sweeps_of
from ..segment import Segment
from . import index as ix
from .arguments import Params
from .elements import Elements
from .index import Expr, Var
from .indices import Indices
from .loop_ir import For, Load, Stmt
from .needs import needs
from .picked import picked, picked_in
from .scans import scanned
from .tiles import tiles


class Draft:
    """`loads` and `computed`: the statements of each value, by its name. `row_loop`: the loop over the `rows`
    rows, or columns, that a thread works on at the same time. `row_guard`: whether an element of the row
    exists. `row_values`: statements, so far, for values of which a row has one. `inlined`: those, so far,
    of scans that stand outside of loops because none has several iterations. `exchanged`: bytes of shared
    memory that threads exchange values through, so far; `words`: 4-byte words that blocks do.
    `online_softmax`: by the number of a sweep, the maximum and the sum that blocks combine at once."""

    def __init__(self, segment: Segment, schedule: Schedule, params: Params, at: Indices):
        self.segment, left = picked_in(segment, schedule)
        self.schedule, self.params, self.at = schedule, params, at
        self.how = schedule.reduction
        self.sweeps = sweeps_of(self.segment, schedule)
        self.loops = schedule.loops_of_a_thread
        self.lane = self.loops[-1] if self.loops else Loop("lane", sz.const(1))
        self.iteration = next((x for x in schedule.loops if x.bind == "rows"), None)
        self.cooperative = self.how.cooperative if self.how else None
        self.tiles = tiles(schedule)
        self.elements = Elements(schedule, params, needs(self.segment))
        self.row_dims = self.dims_of(self.sweeps.row)
        self.loads = {
            a.buffer.value.name: self._loaded(a) if a.buffer.value.name not in left else []
            for a in schedule.domain.loads
        }
        for op in self.sweeps.allreduced:
            self.elements.registers[op.output.name] = op.output.dtype.register.ctype
        self.computed = {
            op.output.name: picked(self.elements, op, at)
            if isinstance(op, Pick)
            else scanned(self.elements, op, at)
            if isinstance(op, Scan)
            else self.elements.computed(op, at)
            for op in self.segment.ops
            if not isinstance(op, Reduce)
        }
        # no loop is made where none has several iterations, and what is known of the row stays known
        looped = self.how is not None and any(x.extent != sz.const(1) for x in self.loops)
        self.row_loop = self.how.side_by_side if looped else ""
        self.rows = schedule.loop(self.row_loop).extent.a if self.row_loop else 1
        self.row_guard = self.guard_of(self.row_dims)
        self.online_softmax = self._pairs()
        self.row_values: list[Stmt] = []
        self.inlined: list[Stmt] = []
        self.exchanged = self.words = 0

    @property
    def across(self) -> int:
        """The threads of a row that combine along x; 0 where only the launch says how many, or there is one
        thread, on the host."""
        extent = self.bound("thread.x").extent
        return extent.a if self.how.axis == "x" and extent.is_const and extent.a > 1 else 0

    def _loaded(self, access: Access) -> list[Stmt]:
        """The statements of a load."""
        made = self.elements.load(access, self.at, self.tiles.get(access.buffer.value.name))
        others = [d for d, dim in enumerate(self.schedule.domain.dims) if dim.name not in self.row_dims]
        if not self.row_dims or any(map(access.moves, others)):
            return made
        return [replace(s, common=True) if isinstance(s, Load) else s for s in made]

    def _pairs(self) -> dict[int, tuple[Reduce, Reduce]]:
        """By the number of the sweep that finds the maximum: the reductions that blocks combine at once."""
        made = {op.output.name: op for op in self.sweeps.allreduced}
        names = self.cooperative.online_softmax if self.cooperative else ()
        pairs = [(made[largest], made[summed]) for largest, summed in names]
        return {self.sweeps.level[pair[0].operands[0].name]: pair for pair in pairs}

    def parts(self, number: int) -> dict[str, str]:
        """Other names for the maxima that sweep `number` finds or reads, and that are of one block only."""
        pairs = [self.online_softmax[n] for n in (number, number - 1) if n in self.online_softmax]
        return {largest.output.name: f"{largest.output.name}_part" for largest, _ in pairs}

    def dims_of(self, axes) -> set[str]:
        """Names of the dims of the domain that have some of `axes`."""
        return {d.name for d in self.schedule.domain.dims if set(d.axes) & set(axes)}

    def guard_of(self, dims: set[str]) -> Expr | None:
        """Whether an element is inside of `dims`."""
        return ix.both(g.condition for g in self.at.guards if g.dims & dims)

    def store_of(self, name: str) -> Access:
        """The store of value `name`."""
        return next(a for a in self.schedule.domain.stores if a.buffer.value.name == name)

    def bound(self, bind: str) -> Loop:
        """The loop that is bound to `bind`."""
        return next(x for x in self.schedule.loops if x.bind == bind)

    def looped(self, body: list[Stmt], loops: Iterable[Loop]) -> list[Stmt]:
        """`body` inside of `loops`, outermost first."""
        for loop in reversed(list(loops)):
            extent = self.params.size(loop.extent, f"{loop.name}_size")
            body = [For(loop.name, extent, loop.bind, tuple(body))]
        return body


def numbered(loops: Iterable[Loop], at: Expr = ix.Const(0)) -> Expr:
    """The number of an iteration of nested `loops`, counted through, inside of iteration `at`."""
    for loop in loops:
        at = ix.add(ix.mul(at, loop.extent.a), Var(loop.name))
    return at
