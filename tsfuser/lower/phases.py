"""The loop nest of a row schedule: reduce, give the result to all threads of the row, go over the row again.

In: a segment in which results depend on reductions. Out: a Kernel with one loop a *phase*; each phase
computes what it needs from the loads, and later passes keep in registers what phases share. Example, softmax:

    for u, lane: { x0 = ...; max[lane] = max(max[lane], x0) };  combine
    for u, lane: { x0; e = exp(x0 - max); sum[lane] += e };  combine
    for u, lane: { x0; e; y = e / sum; store }
"""

from __future__ import annotations

import math
from dataclasses import replace

from ..ir import size as sz
from ..ir.fusion import Lookup, Op, Pointwise, Random, Reduce, Value
from ..schedule.domain import Access
from ..schedule.loops import Fuse, Schedule
from ..schedule.rows import is_costly
from ..segment import Segment
from . import index as ix
from .accumulate import accumulation, conversion
from .combine import COMBINATIONS, accumulator, total_of, totals
from .exchange import SLOTS, combined, combined_over_blocks, exchanged
from .index import Expr, Var
from .kernel import Kernel, Tile
from .loop_ir import (
    Accumulator,
    Array,
    BlockReduce,
    Compute,
    CooperativeSlots,
    Fetch,
    FetchGroup,
    For,
    Load,
    Scratch,
    SetLane,
    Stmt,
    Store,
    Total,
)
from .nest import Params, compute, indices, kernel_of, load, lookup, looped, needed, store, uniform
from .passes import rename
from .traverse import used

_WIDEST = 16  # bytes of the widest type, complex_t<double>


class _Rows:
    """What the phases share while they are built."""

    def __init__(self, segment: Segment, schedule: Schedule):
        self.segment, self.schedule = segment, schedule
        self.params = Params(schedule)
        self.at = indices(schedule, self.params)
        inner = set(schedule.domain.dims[-1].axes)
        self.along = [
            op for op in segment.reductions if bool(set(op.axes) & inner) == (schedule.reduction.axis == "x")
        ]
        self.axes = set(self.along[0].axes)
        self.columns = [op for op in segment.reductions if op not in self.along]
        self.reduced = {d.name for d in schedule.domain.dims if set(d.axes) & self.axes}
        self.registers: dict[str, str] = {}
        self.loops = [x for x in schedule.loops if x.bind in ("serial", "unroll", "vector", "simd")]
        self.lane = self.loops[-1]
        self.row = schedule.domain.dims[-1].extent
        # of an element of the row
        self.guard = ix.both(g.condition for g in self.at.guards if g.dims & self.reduced)
        # 4-byte words through which blocks have met so far
        how = schedule.reduction
        self.cooperative, self.words = how.cooperative if how.scope == "cooperative" else None, 0
        self.iteration = next((x for x in schedule.loops if x.bind == "rows"), None)
        self.prefetched = [
            a
            for a in schedule.domain.loads
            if a.buffer.value.name in schedule.reduction.prefetched and not a.buffer.by_value
        ]
        self.loads: dict[str, list[Stmt]] = {}
        for access in schedule.domain.loads:
            made = load(access, self.at, self.params, schedule, self.registers, None)
            if access in self.prefetched:  # zeros lie there where there is no element
                made = [
                    replace(
                        made[0],
                        buffer=_prefetched_name(access),
                        offset=self.place(Var(self.iteration.name)),
                        guard=None,
                        shared=True,
                        own=True,
                    ),
                    *made[1:],
                ]
            self.loads[access.buffer.value.name] = made
        self.statements = {
            op.output.name: self._statements(op) for op in self._typed() if not isinstance(op, Reduce)
        }
        self.phase = self._phases()
        self.memory = schedule.reduction.keep == "memory"
        self.peaks = self._peaks() if self.cooperative else {}
        self.keep = self.keepable() - {
            op.output.name
            for _, summed in self.peaks.values()
            for op in self.ops_for({summed.operands[0].name})
        }
        self.kept: dict[str, str] = {}  # of these, those that have been computed -> their array
        self.arrays: list[Stmt] = []  # arrays to be declared
        # no loop is made, in which what is known would have to be known again
        alone = all(x.extent == sz.const(1) for x in self.loops)
        self.each = "" if alone else schedule.reduction.each  # a loop of its own, or that over lanes
        # rows that a thread works on at the same time
        self.count = schedule.loop(self.each).extent.a if self.each else 1
        self.known: list[Stmt] = []  # what a row has one of, computed so far
        # bytes of shared memory in which threads have met so far; nobody has to wait to use others
        self.exchanged = 0

    def _typed(self) -> list[Op]:
        """The ops, after noting in which C type each reduction's result is held, which later ops convert
        from."""
        for op in self.along:
            self.registers[op.output.name] = op.output.dtype.register.ctype
        return list(self.segment.ops)

    def _statements(self, op: Op) -> list[Stmt]:
        if isinstance(op, Random):
            return uniform(op, self.at, self.params, self.schedule, self.registers)
        if isinstance(op, Lookup):
            return lookup(op, self.at, self.params, self.schedule, self.registers)
        return [compute(op, self.params, self.registers)]

    def _phases(self) -> dict[str, int]:
        """For each value the number of reductions that must be done before it."""
        phase = dict.fromkeys(self.loads, 0)
        for op in self.segment.ops:
            phase[op.output.name] = max((phase.get(v.name, 0) for v in op.operands), default=0) + (
                op in self.along
            )
        return phase

    def _peaks(self) -> dict[int, tuple[Reduce, Reduce]]:
        """For a phase that does nothing but look for the largest x, if the next does nothing but add up exp(x
        - largest): both. Blocks that meet after the second only find out less than the largest of their own
        part in between."""
        found = {}
        made = {op.output.name: op for op in self.segment.ops}
        for phase in range(max(self.phase.values())):
            (reductions, _), (sums, stores) = self.goals(phase), self.goals(phase + 1)
            if (
                len(reductions) != 1
                or len(sums) != 1
                or stores
                or not {*reductions, *sums} <= set(self.along)
            ):
                continue
            if reductions[0].combine != "max" or sums[0].combine != "sum":
                continue
            if any(
                self.phase[op.output.name] == phase + 1 and not self.varies(op.output)
                for op in self.segment.ops
                if op not in reductions
            ):
                continue
            late = [
                op
                for op in self.ops_for({sums[0].operands[0].name})
                if self.phase[op.output.name] == phase + 1
            ]
            symbols = [op.symbol if isinstance(op, Pointwise) else "" for op in late]
            if len(late) != 2 or symbols[0] != "sub" or symbols[1] not in ("exp", "exp_16bit"):
                continue
            if (
                made.get(late[0].operands[1].name) is not reductions[0]
                or late[1].operands[0] is not late[0].output
            ):
                continue
            if self.phase[late[0].operands[0].name] <= phase and reductions[0].output.dtype.is_floating:
                found[phase] = reductions[0], sums[0]
        return found

    def at_column(self) -> Expr:
        """Index of the accumulator of a column among those of a thread."""
        at: Expr = ix.Const(0)
        for loop in self.loops:
            if loop.name != self.each and loop.extent.a > 1:
                at = ix.add(ix.mul(at, loop.extent.a), Var(loop.name))
        return at

    def place(self, iteration: Expr) -> Expr:
        """Index in shared memory of the element that a thread works on in `iteration`; two of them fit there,
        and a thread's vectors lie a block apart."""
        at: Expr = ix.mod(iteration, 2)
        for loop in self.loops[:-1]:
            at = ix.add(ix.mul(at, loop.extent.a), Var(loop.name))
        x, y = (next(x for x in self.schedule.loops if x.bind == bind) for bind in ("thread.x", "thread.y"))
        thread = (
            ix.add(ix.mul(Var(y.name), self.params.size(x.extent, "across")), Var(x.name))
            if y.extent != sz.const(1)
            else Var(x.name)
        )
        at = ix.add(ix.mul(at, self.schedule.threads), thread)
        return ix.add(ix.mul(at, self.lane.extent.a), Var(self.lane.name))

    def fetched(self, iteration: Expr, suffix: str) -> list[Stmt]:
        """Statements that fetch what `iteration` needs, as one group."""
        at = indices(
            self.schedule, self.params, {self.iteration.name: iteration, self.lane.name: ix.Const(0)}, suffix
        )
        place = ix.substitute(self.place(iteration), {self.lane.name: ix.Const(0)})
        more = ix.less(iteration, self.params.size(self.iteration.extent, "iterations"))
        made: list[Stmt] = list(at.lets)
        for access in self.prefetched:
            [read, *_] = load(access, at, self.params, self.schedule, {}, None)
            guard = ix.both([more, *([read.guard] if read.guard is not None else [])])
            made.append(
                Fetch(_prefetched_name(access), place, read.buffer, read.offset, self.lane.extent.a, guard)
            )
        return [*looped(made, self.loops[:-1], self.params), FetchGroup()]

    def tiles(self, start: int) -> list[Tile]:
        """Where shared memory keeps what is fetched, from byte `start` on."""
        each = math.prod(x.extent.a for x in self.loops) * self.schedule.threads
        tiles = []
        for access in self.prefetched:
            dtype = access.buffer.value.dtype
            tiles.append(Tile(_prefetched_name(access), dtype.ctype, dtype.itemsize, 2, each, start))
            start += -(-tiles[-1].bytes // 16) * 16
        return tiles

    def varies(self, value: Value) -> bool:
        """Whether the value differs along a row."""
        return bool(set(value.axes) & self.axes)

    def ops_for(self, names: set[str], known=frozenset()) -> list[Op]:
        """The ops along a row between loads, or values in `known`, and `names`, in order."""
        wanted, ops = set(names), []
        for op in reversed(self.segment.ops):
            if (
                op.output.name in wanted
                and op.output.name not in known
                and not isinstance(op, Reduce)
                and self.varies(op.output)
            ):
                ops.insert(0, op)
                wanted |= {v.name for v in op.operands}
        return ops

    def goals(self, phase: int) -> tuple[list[Reduce], list[Access]]:
        """The reductions that can be accumulated, over rows or columns, and the results along a row that can
        be stored in `phase`."""
        reductions = [op for op in self.segment.reductions if self.phase[op.operands[0].name] == phase]
        columns = {op.output.name for op in self.columns}
        stores = [
            a
            for a in self.schedule.domain.stores
            if a.buffer.value.name not in columns and self.varies(a.buffer.value)
        ]
        return reductions, [a for a in stores if self.phase[a.buffer.value.name] == phase]

    def keepable(self) -> set[str]:
        """Names of the values that cost much to compute and are needed in several phases, which registers
        keep where the row is in registers anyway, and memory where `memory` is."""
        long = [x for x in self.loops if not (x.extent.is_const and x.extent.a == 1)]
        # without loops, what is known stays known
        if not self.memory and (not long or any(x.bind == "serial" for x in long)):
            return set()
        seen: set[str] = set()
        found: set[str] = set()
        for phase in range(max(self.phase.values()) + 1):
            reductions, stores = self.goals(phase)
            ops = self.ops_for(
                {op.operands[0].name for op in reductions} | {a.buffer.value.name for a in stores}, found
            )
            computed = {op.output.name for op in ops if is_costly(op)}
            costly = computed | {
                op.output.name
                for op in ops
                if self.memory and isinstance(op, Random) or isinstance(op, Lookup)
            }
            found |= costly & seen
            seen |= costly
        return found

    def slice_of(self, names: set[str]) -> list[Stmt]:
        """Statements for what `names` need along a row, in order; those that registers are to keep are
        written there."""
        operations = self.ops_for(names, self.kept)
        wanted = names | {v.name for op in operations for v in op.operands}
        index = next((x.name for x in self.loops if x.bind == "unroll" and x.extent.a > 1), "0")
        lane = self.lane.name if self.lane.extent.a > 1 else "0"
        ops: list[Stmt] = []
        for name in [n for n in self.kept if n in wanted]:
            if self.memory:
                ops.append(
                    Load(name, self.registers[name], self.kept[name], self.at_row(), self.guard, shared=True)
                )
                continue
            place = f"{self.kept[name]}[{index}]"
            ops.append(Compute(name, self.registers[name], "copy", (place,), (place,), lane))
        for op in operations:
            ops += self.statements[op.output.name]
            if op.output.name in self.keep:
                array = self.kept[op.output.name] = f"{op.output.name}_kept"
                if self.memory:
                    register = self.registers[op.output.name]
                    ops.append(
                        Store(
                            array, register, register, self.at_row(), op.output.name, self.guard, shared=True
                        )
                    )
                    continue
                extent = next((x.extent.a for x in self.loops if x.bind == "unroll"), 1)
                self.arrays.append(
                    Array(array, f"vec<{self.registers[op.output.name]}, {self.lane.extent.a}>", 1, extent)
                )
                ops.append(SetLane(f"{array}[{index}]", lane, op.output.name))
        read = [
            a.buffer.value
            for a in self.schedule.domain.loads
            if a.buffer.value.name in wanted and self.varies(a.buffer.value)
        ]
        return [s for value in read for s in self.loads[value.name]] + ops

    def at_row(self) -> Expr:
        """Index of an element in its row."""
        return self.at.of[self.schedule.domain.dims[-1].name]

    def scratch(self) -> list[Stmt]:
        """The arrays in memory for what is kept: each has room for a row of any type."""
        if not (self.memory and self.kept):
            return []
        row = self.params.size(self.row, f"{self.schedule.domain.dims[-1].name}_size")
        return [
            Scratch(array, self.registers[name], row, _WIDEST * k)
            for k, (name, array) in enumerate(self.kept.items())
        ]

    def row_values(self, phase: int) -> list[Stmt]:
        """Loads (before the first phase) and ops of which a row has one value, that can be computed before
        `phase`."""
        found: list[Stmt] = []
        if phase == 0:
            for access in self.schedule.domain.loads:
                if not self.varies(access.buffer.value):
                    found += self.loads[access.buffer.value.name]
        for op in self.segment.ops:
            if (
                not isinstance(op, Reduce)
                and not self.varies(op.output)
                and self.phase[op.output.name] == phase
            ):
                found += self.statements[op.output.name]
        if self.each:
            return found
        return [*needed(self.at.lets, frozenset().union(*map(used, found))), *found] if found else []


def _prefetched_name(access: Access) -> str:
    return f"{access.buffer.value.name}_prefetched"


def nest_rows(segment: Segment, schedule: Schedule, name: str) -> Kernel:
    """The loop nest of `segment`, phase by phase."""
    rows = _Rows(segment, schedule)
    body: list[Stmt] = []
    for phase in range(max(rows.phase.values()) + 1):
        rows.known += rows.row_values(phase)
        if not rows.each:  # else every loop over the rows begins with what is known of its row
            body, rows.known = body + rows.known, []
        body += _phase(rows, phase)
    body += _row_stores(rows)
    if rows.cooperative:
        slots = _slots(rows)
        body = [*slots, *(s for s in body if s not in slots)]
    if rows.prefetched:
        body = [*rows.fetched(ix.add(Var(rows.iteration.name), 1), "_next"), FetchGroup(wait=True), *body]
    if rows.iteration is not None:
        body = _iterations(rows, body)
    if rows.prefetched:
        body = [*rows.fetched(ix.Const(0), "_first"), *body]
    scratch, tiles = rows.scratch(), rows.tiles(-(-exchanged(body) // 128) * 128)
    kernel = kernel_of(name, segment, schedule, rows.params, [*scratch, *body], tiles)
    return replace(kernel, shared=rows.row * (_WIDEST * len(scratch))) if scratch else kernel


def _phase(rows: _Rows, phase: int) -> list[Stmt]:
    """The loops that accumulate the reductions of this phase and store what is ready, and the combination
    over the row."""
    reductions, stores = rows.goals(phase)
    if not reductions and not stores:
        return []
    guard = rows.guard
    wanted = {op.operands[0].name for op in reductions} | {a.buffer.value.name for a in stores}
    part = {
        largest.output.name: f"{largest.output.name}_part"
        for largest, _ in filter(None, [rows.peaks.get(phase), rows.peaks.get(phase - 1)])
    }
    body: list[Stmt] = [*rows.at.lets, *rows.known, *(rename(s, part) for s in rows.slice_of(wanted))]
    before: list[Stmt] = []
    packs: list[Stmt] = []
    lanes, count, multi_row = rows.lane.extent.a, rows.count, rows.each not in ("", rows.lane.name)
    at = ix.add(ix.mul(Var(rows.each), lanes), Var(rows.lane.name)) if multi_row else Var(rows.lane.name)
    along = [op for op in reductions if op in rows.along]
    after = (
        combined(along, rows.schedule.reduction, rows.schedule.threads, count, count, rows.exchanged)
        if along
        else []
    )
    if rows.cooperative and after and phase not in rows.peaks:
        pair = _online_softmax(*rows.peaks[phase - 1]) if phase - 1 in rows.peaks else []
        together = pair[1:] or [t for s in after if isinstance(s, BlockReduce) for t in s.totals]
        meeting, rows.words = combined_over_blocks(
            together, exchanged(after), rows.words, rows.schedule.threads
        )
        after += [*pair[:1], *meeting]
    rows.exchanged = max(rows.exchanged, exchanged(after))
    in_double = rows.schedule.reduction.in_double
    for op in (op for op in reductions if op in rows.columns):
        outside = ix.both(g.condition for g in rows.at.guards if not g.dims <= rows.reduced)
        body += accumulation(
            f"{op.output.name}_total",
            op,
            rows.registers,
            accumulator(op, in_double),
            0,
            rows.at_column(),
            outside,
        ).body
    for name, op in totals(along).items():
        made = accumulation(
            name,
            op,
            rows.registers,
            accumulator(op, in_double),
            lanes * count if multi_row else lanes,
            at,
            guard,
            multi_row,
            not rows.schedule.is_vectorised,
        )
        before, body, packs = before + made.before, body + made.body, packs + made.after
    for op in along:
        result = COMBINATIONS[op.combine].result(
            accumulator(op, in_double).ctype, op.output.dtype.register.ctype
        )
        name = total_of(op, along)
        if phase - 1 in rows.peaks:
            largest, name = rows.peaks[phase - 1][0], f"{op.output.name}_online_softmax"
            rows.known.append(
                Compute(
                    largest.output.name,
                    rows.registers[largest.output.name],
                    "largest_of",
                    (name,),
                    (name,),
                    "0",
                )
            )
            result = {"copy": "sum_of", "convert": "sum_of_converted"}[result]
        output = part.get(op.output.name, op.output.name)
        rows.known.append(
            Compute(output, op.output.dtype.register.ctype, result, (name,), (name,), rows.each or "0")
        )
    body += [store(a, rows.at, rows.params, rows.schedule) for a in stores]
    arrays, rows.arrays = rows.arrays, []
    return [*arrays, *before, *looped(body, rows.loops, rows.params), *packs, *after]


def _online_softmax(largest: Reduce, summed: Reduce) -> list[Accumulator | Total]:
    """The accumulator that a block makes of its largest x and its sum of exp(x - largest), and what blocks
    exchange of it."""
    number, name = summed.output.dtype.register, f"{summed.output.name}_online_softmax"
    ctype = f"online_softmax<{number.ctype}>"
    made = Accumulator(
        name,
        ctype,
        1,
        f"online_softmax_of<{number.ctype}>({largest.output.name}_total[0], {summed.output.name}_total[0])",
    )
    return [
        made,
        Total(
            name,
            "OnlineSoftmax",
            f"online_softmax_of<{number.ctype}>(-infinity<{number.ctype}>(), 0)",
            0,
            32 * 2 * number.itemsize,
        ),
    ]


def _row_stores(rows: _Rows) -> list[Stmt]:
    """Stores of results of which a row has one, by its first thread."""
    loops = [x for x in rows.loops if x.name == rows.each]
    gone = {x: ix.Const(0) for x in rows.schedule.reduction.loops if x != rows.each}
    done = indices(rows.schedule, rows.params, gone, "_out")
    thread = Var(
        next(x.name for x in rows.schedule.loops if x.bind == f"thread.{rows.schedule.reduction.axis}")
    )
    first = ix.both(
        ix.less(x, 1) for x in [thread, *([done.of[rows.cooperative.part]] if rows.cooperative else [])]
    )
    stores = []
    for access in rows.schedule.domain.stores:
        if not rows.varies(access.buffer.value):
            made = store(access, done, rows.params, rows.schedule, rows.reduced)
            stores.append(
                replace(made, guard=ix.both([first, *([made.guard] if made.guard is not None else [])]))
            )
    if not stores:
        return []
    lets = needed(done.lets, frozenset().union(*map(used, stores)))
    if not rows.each:
        return [*rows.known, *lets, *stores]
    return looped(
        [*needed(rows.at.lets, frozenset().union(*map(used, rows.known))), *rows.known, *lets, *stores],
        loops,
        rows.params,
    )


def _slots(rows: _Rows) -> list[Stmt]:
    """The slots in which the cooperative blocks of a row combine in this iteration."""
    cooperative = rows.cooperative
    parts = next(r.by for r in rows.schedule.relations if isinstance(r, Fuse) and r.inner == cooperative.part)
    memory = rows.params.field(SLOTS, "uint64_t*", ("cleared", cooperative.slots))
    at = [
        rows.at.of[cooperative.block_set],
        rows.params.size(parts, "parts"),
        rows.at.of[cooperative.part],
        Var(rows.iteration.name),
    ]
    made = CooperativeSlots(SLOTS, memory, *at, cooperative.words)
    return [*needed(rows.at.lets, used(made)), made]


def _iterations(rows: _Rows, body: list[Stmt]) -> list[Stmt]:
    """`body`, which does one row, for all rows of the block, and the stores of what has been added up over
    them."""
    how, schedule, threads = rows.schedule.reduction, rows.schedule, rows.schedule.threads
    iteration = rows.iteration
    rounds = rows.params.size(iteration.extent, "iterations")
    if not rows.columns:
        return [For(iteration.name, rounds, "rows", tuple(body))]
    body = [
        replace(s, iteration=iteration.name, half=rows.exchanged) if isinstance(s, BlockReduce) else s
        for s in body
    ]
    loops = [x for x in rows.loops if x.name != rows.each]
    lanes = math.prod(x.extent.a for x in loops)
    across = {d.name for d in schedule.domain.dims} - rows.reduced
    fixed = {
        x.name: ix.Const(0) for x in schedule.loops if x.bind in ("rows", "thread.y") or x.name == rows.each
    }
    done = indices(schedule, rows.params, fixed, "_out")
    first = ix.less(Var(next(x.name for x in schedule.loops if x.bind == "thread.y")), 1)
    before: list[Stmt] = []
    after: list[Stmt] = []
    for op in rows.columns:
        name, wide, register = (
            f"{op.output.name}_total",
            accumulator(op, how.in_double),
            op.output.dtype.register.ctype,
        )
        before.append(Accumulator(name, wide.ctype, lanes, COMBINATIONS[op.combine].start(wide)))
        access = next(a for a in schedule.domain.stores if a.buffer.value.name == op.output.name)
        write = store(access, done, rows.params, schedule, across)
        offset = ix.add(
            ix.mul(done.of[how.partial[0]], rows.params.size(how.partial[1], "part_stride")), write.offset
        )
        write = replace(
            write, offset=offset, guard=ix.both([first, *([write.guard] if write.guard is not None else [])])
        )
        after += [
            Compute(
                op.output.name, register, conversion(wide.ctype, register), (name,), (name,), rows.at_column()
            ),
            write,
        ]
    lets = needed(done.lets, frozenset().union(*map(used, after)))
    alone = next(x.extent for x in schedule.loops if x.bind == "thread.y") == sz.const(1)
    meet = (
        []
        if alone
        else combined(
            rows.columns, replace(how, axis="y", scope="block"), threads, lanes, 0, 2 * rows.exchanged
        )
    )
    return [
        *before,
        For(iteration.name, rounds, "rows", tuple(body)),
        *meet,
        *looped([*lets, *after], loops, rows.params),
    ]
