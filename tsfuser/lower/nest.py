"""The first step of lowering: scalar loops with one load, compute and store statement for each that the
segment has.

In: Segment, Schedule. Out: a Kernel whose innermost loop holds the whole algorithm, guarded where a split
does not divide. Example, before any other pass:

    for lane in 4:
      { x0_m = x0[i0 + lane] if i0 + lane < n; x0 = x0_m; add_0 = x0 + 1; out0[i0 + lane] = add_0 if ... }
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..ir import size as sz
from ..ir.fusion import Lookup, Pointwise, Random, Reduce, Value
from ..ir.size import Size
from ..schedule.domain import Access
from ..schedule.loops import Schedule, Split
from ..segment import Segment
from . import index as ix
from .accumulate import accumulation, conversion
from .combine import COMBINATIONS, accumulator, total_of, totals
from .exchange import combined, exchanged
from .index import Expr, Var
from .kernel import Kernel, Param, Tile
from .literals import literal
from .loop_ir import Barrier, Compute, FillTile, For, If, Let, Load, Place, Stmt, Store, Uniform
from .traverse import used


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
            taken = {p.name for p in self.fields.values()}
            unique, k = name, 1
            while unique in taken:
                k += 1
                unique = f"{name}_{k}"
            self.fields[source] = Param(unique, ctype, source)
        return f"args.{self.fields[source].name}"

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


@dataclass(frozen=True)
class Guard:
    """`condition` must hold for the elements of domain dims `dims` to exist; `inside` says that it does for
    the whole tile."""

    condition: Expr
    dims: frozenset[str]
    inside: Expr


@dataclass(frozen=True)
class Indices:
    """The index of every domain dim, of loop variables: `lets` define names that the expressions `of` use."""

    lets: tuple[Let, ...]
    of: dict[str, Expr]
    guards: tuple[Guard, ...]


def nest(segment: Segment, schedule: Schedule, name: str) -> Kernel:
    """The scalar loop nest of `segment` under `schedule`."""
    params = Params(schedule)
    tiles = _tiles(schedule)
    at = indices(schedule, params)
    guarded = _body(segment, schedule, params, tiles, at)
    cut = at.guards if tiles else _lane_guards(schedule, at)
    if not cut:
        return kernel_of(name, segment, schedule, params, guarded, tiles)
    inside = ix.both(g.inside for g in cut)  # most tiles are whole, and do without bounds
    whole = _body(
        segment, schedule, params, tiles, replace(at, guards=tuple(g for g in at.guards if g not in cut))
    )
    body = [*needed(at.lets, ix.names(inside)), If(inside, tuple(whole), tuple(guarded))]
    return kernel_of(name, segment, schedule, params, body, tiles)


def _lane_guards(schedule: Schedule, at: Indices) -> tuple[Guard, ...]:
    """The bounds on the lanes of the host's outer reductions, which its compiler vectorises without them."""
    lane = next((x.name for x in schedule.loops if x.bind == "simd"), "")
    outer = schedule.reduction is not None and lane not in schedule.reduction.loops
    return tuple(g for g in at.guards if outer and lane in ix.names(g.condition))


def _body(segment: Segment, schedule: Schedule, params: Params, tiles: list[Tile], at: Indices) -> list[Stmt]:
    """The statements of a thread, with the bounds that `at` has."""
    registers: dict[str, str] = {}  # value name -> its C type in registers
    body: list[Stmt] = list(at.lets)
    for access in schedule.domain.loads:
        tile = next((t for t in tiles if t.name == f"{access.buffer.value.name}_tile"), None)
        body += load(access, at, params, schedule, registers, tile)
    for op in segment.ops:
        if isinstance(op, Pointwise):
            body.append(compute(op, params, registers))
        elif isinstance(op, Random):
            body += uniform(op, at, params, schedule, registers)
        elif isinstance(op, Lookup):
            body += lookup(op, at, params, schedule, registers)
    loops = [x for x in schedule.loops if x.bind in ("serial", "unroll", "vector", "simd")]
    reductions = {op.output.name: op for op in segment.reductions}
    body += [
        store(a, at, params, schedule)
        for a in schedule.domain.stores
        if a.buffer.value.name not in reductions
    ]
    if reductions:
        return _reduced(list(reductions.values()), body, loops, at, params, schedule, registers)
    fill = [*_fill_tiles(schedule, params, tiles, bool(at.guards)), Barrier()] if tiles else []
    return fill + looped(body, loops, params)


def looped(body: list[Stmt], loops, params: Params) -> list[Stmt]:
    for loop in reversed(loops):
        body = [For(loop.name, params.size(loop.extent, f"{loop.name}_size"), loop.bind, tuple(body))]
    return body


def kernel_of(
    name: str, segment: Segment, schedule: Schedule, params: Params, body: list[Stmt], tiles: list[Tile]
) -> Kernel:
    places = {"block": "blockIdx.x", "thread.x": "threadIdx.x", "thread.y": "threadIdx.y"}
    launch = [Let(x.name, params.index, Var(places[x.bind])) for x in schedule.loops if x.bind in places]
    extent = {x.bind: x.extent for x in schedule.loops}
    # signed, unlike CUDA's own
    launch += [
        Let(f"block_{axis}", params.index, Var(f"blockDim.{axis}"))
        for axis in "xy"
        if f"thread.{axis}" in extent and not extent[f"thread.{axis}"].is_const
    ]
    how = schedule.reduction
    shared = max((t.offset + t.bytes for t in tiles), default=0)
    shared = max(shared, exchanged(body))
    return Kernel(
        name,
        tuple(params.fields.values()),
        tuple(launch + body),
        params.index,
        extent["block"],
        extent.get("thread.x", sz.const(1)),
        extent.get("thread.y", sz.const(1)),
        schedule.threads,
        tuple(tiles),
        shared,
        schedule.grain,
        schedule.resident,
        bool(how and how.scope == "cooperative"),
        bool(how and how.leads),
        bool(how and how.combines_partials),
    )


def _reduced(
    ops: list[Reduce], body: list[Stmt], loops, at: Indices, params: Params, schedule: Schedule, registers
) -> list[Stmt]:
    """Accumulators, the loops of a thread around `body`, the combination over the block, and the stores of
    the results."""
    how = schedule.reduction
    reduced = {d.name for d in schedule.domain.dims if d.axes and d.axes[0] in ops[0].axes}
    guard = ix.both(g.condition for g in at.guards if g.dims & reduced)
    lane = next((x for x in loops if x.bind in ("vector", "simd")), None)
    fold = lane is not None and lane.name in how.loops  # else each lane is an output of its own
    # short chains round less
    many = next((x for x in loops if x.bind == "unroll" and x.name in how.loops), None)
    depth = many.extent.a if many is not None and not fold else 1
    width = lane.extent.a if lane else 1
    at_result: Expr = Var(lane.name) if lane and not fold else ix.Const(0)
    at_term: Expr = Var(lane.name) if lane else ix.Const(0)
    at_lane = at_term
    if depth > 1:  # what becomes one result lies side by side
        at_lane = ix.add(ix.mul(at_lane, depth), Var(many.name))
    results = 1 if fold else width
    done = indices(schedule, params, {x: ix.Const(0) for x in how.loops}, "_out")
    first = ix.less(Var(next(x.name for x in schedule.loops if x.bind == f"thread.{how.axis}")), 1)
    before: list[Stmt] = []
    packs: list[Stmt] = []
    after: list[Stmt] = []
    for name, op in totals(ops).items():
        wide = accumulator(op, how.in_double)
        # these share what a chain costs, and round little
        if COMBINATIONS[op.combine].part and (width > 1 or many is None):
            made = accumulation(name, op, registers, wide, width, at_term, guard)
        elif COMBINATIONS[op.combine].part:
            made = accumulation(name, op, registers, wide, many.extent.a, Var(many.name), guard, apart=True)
        else:
            made = accumulation(name, op, registers, wide, width * depth, at_lane, guard)
        before, body, packs = before + made.before, body + made.body, packs + made.after
    for op in ops:
        combination, name, register = (
            COMBINATIONS[op.combine],
            total_of(op, ops),
            op.output.dtype.register.ctype,
        )
        wide = accumulator(op, how.in_double)
        access = next(a for a in schedule.domain.stores if a.buffer.value.name == op.output.name)
        write = store(access, done, params, schedule, reduced)
        if how.scope == "grid":
            write = replace(
                write,
                offset=ix.add(
                    ix.mul(done.of[how.partial[0]], params.size(how.partial[1], "part_stride")), write.offset
                ),
            )
        write = replace(write, guard=ix.both([first, *([write.guard] if write.guard else [])]))
        after += [
            Compute(
                op.output.name,
                register,
                combination.result(wide.ctype, register),
                (name,),
                (name,),
                at_result,
            ),
            write,
        ]
    lets = needed(done.lets, frozenset().union(*map(used, after)))
    chains = fold or depth > 1 or (width == 1 and many is not None)
    combine = combined(ops, how, schedule.threads, results, results if chains else 0)
    return [
        *before,
        *looped(body, loops, params),
        *packs,
        *combine,
        *looped([*lets, *after], [lane] if lane and not fold else [], params),
    ]


def needed(lets, names: frozenset[str]) -> list[Let]:
    """Of `lets` those on which `names` depend."""
    kept: list[Let] = []
    for let in reversed(lets):
        if let.name in names:
            kept.insert(0, let)
            names |= used(let)
    return kept


def indices(
    schedule: Schedule, params: Params, override: dict[str, Expr] | None = None, suffix: str = ""
) -> Indices:
    """Domain indices from loop variables, by the schedule's relations backwards. `override` fixes the index
    of a loop that exists only between relations; `suffix` keeps names apart where indices are needed twice.
    """
    of: dict[str, Expr] = {x.name: Var(x.name) for x in schedule.loops}
    of.update(override or {})
    lanes = [x.name for x in schedule.loops if x.bind in ("vector", "simd")]
    covered = {x.name: frozenset() for x in schedule.loops} | {
        d.name: frozenset((d.name,)) for d in schedule.domain.dims
    }
    for relation in schedule.relations:  # forwards: which domain dims a loop covers
        if isinstance(relation, Split):
            covered[relation.inner] = covered[relation.parent]
            covered[relation.outer] = covered[relation.parent]
        else:
            covered[relation.into] = covered.get(relation.outer, frozenset()) | covered[relation.inner]
    lets: list[Let] = []
    guards: list[Guard] = []

    def name(loop: str, value: Expr) -> Expr:
        """A name for the part of an index that lanes share."""
        lane = next((x for x in lanes if x in ix.names(value)), None)
        base = value if lane is None else ix.substitute(value, {lane: ix.Const(0)})
        if not isinstance(base, (Var, ix.Const)):
            lets.append(Let(loop + suffix, params.index, base))
            base = Var(loop + suffix)
        return base if lane is None else ix.add(base, Var(lane))

    for relation in reversed(schedule.relations):
        if isinstance(relation, Split):
            if relation.parent in (override or {}):
                continue
            start = (
                ix.mul(of[relation.outer], params.size(relation.by, f"{relation.inner}_size"))
                if relation.outer
                else ix.Const(0)
            )
            of[relation.parent] = name(relation.parent, ix.add(start, of[relation.inner]))
            if not relation.exact:
                extent = params.size(relation.extent, f"{relation.parent}_size")
                end = ix.mul(
                    ix.add(of[relation.outer], 1), params.size(relation.by, f"{relation.inner}_size")
                )
                last = of[relation.parent]
                if relation.whole:
                    last = ix.substitute(last, {lane: ix.Const(0) for lane in lanes})
                guards.append(
                    Guard(ix.less(last, extent), covered[relation.parent], ix.less(end, ix.add(extent, 1)))
                )
        else:
            by = params.size(relation.by, f"{relation.inner}_size")
            # lanes never cross from one piece to the next
            start = ix.substitute(of[relation.into], {lane: ix.Const(0) for lane in lanes})
            outer = of[relation.outer] = name(relation.outer, ix.div(start, by))
            of[relation.inner] = name(relation.inner, ix.sub(of[relation.into], ix.mul(outer, by)))
    return Indices(tuple(lets), of, tuple(guards))


def _offset(access: Access, at: Indices, params: Params, schedule: Schedule) -> Expr:
    """Elements from the start of the buffer."""
    offset: Expr = ix.Const(0)
    for d, dim in enumerate(schedule.domain.dims):
        if access.moves(d):
            stride = params.size(access.strides[d], f"{access.buffer.value.name}_stride{d}")
            offset = ix.add(offset, ix.mul(at.of[dim.name], stride))
    return offset


def _guard(access: Access, at: Indices, schedule: Schedule) -> Expr | None:
    """The bounds of the dims in which `access` moves."""
    moving = {dim.name for d, dim in enumerate(schedule.domain.dims) if access.moves(d)}
    return ix.both(g.condition for g in at.guards if g.dims & moving)


def load(
    access: Access, at: Indices, params: Params, schedule: Schedule, registers, tile: Tile | None
) -> list[Stmt]:
    value = access.buffer.value
    memory = f"{value.name}_m"
    register = registers[value.name] = value.dtype.register.ctype
    convert = conversion(value.dtype.ctype, register)
    if access.buffer.by_value:
        field = params.field(value.name, value.dtype.ctype, ("element", access.buffer.index))
        return [Compute(value.name, register, convert, (), arguments=(field,))]
    if tile is not None:
        row, col = (at.of[x] for x in schedule.tile)
        line, column = (row, col) if schedule.is_vectorised else (col, row)
        read = Load(
            memory, value.dtype.ctype, tile.name, ix.add(ix.mul(line, tile.pitch), column), shared=True
        )
    else:
        pointer, offset = _pointer(access, params, "const "), _offset(access, at, params, schedule)
        read = Load(memory, value.dtype.ctype, pointer, offset, _guard(access, at, schedule))
    return [read, Compute(value.name, register, convert, (memory,))]


def _pointer(access: Access, params: Params, qualifier: str) -> str:
    b = access.buffer
    name = b.value.name if b.kind == "input" else f"{b.value.name}_out" if qualifier == "" else b.value.name
    return params.field(name, f"{qualifier}{b.value.dtype.ctype}*", (b.kind, b.index))


def uniform(
    op: Random, at: Indices, params: Params, schedule: Schedule, registers: dict[str, str]
) -> list[Stmt]:
    """The random number of an element: like a load, of which only the offset is used."""
    name, ctype = op.output.name, op.output.dtype.ctype
    access = next(a for a in schedule.domain.randoms if a.buffer.value.name == name)
    registers[name] = ctype
    state = params.field("random", "random_state", ("random",))
    walk = (op.walk.counter, op.walk.threads, op.walk.width) if op.walk else ()
    drawn = Uniform(
        f"{name}_m",
        ctype,
        state,
        op.stream,
        _offset(access, at, params, schedule),
        1,
        op.name,
        tuple(map(params.count, walk)),
    )
    return [drawn, Compute(name, ctype, "copy", (drawn.name,))]


def lookup(
    op: Lookup, at: Indices, params: Params, schedule: Schedule, registers: dict[str, str]
) -> list[Stmt]:
    """An element at the place that the op's operand says: a load, with a place where there is an operand."""
    name, ctype, [index] = op.output.name, op.output.dtype.ctype, op.operands
    access = next(a for a in schedule.domain.lookups if a.buffer.value.name == name)
    register = registers[name] = op.output.dtype.register.ctype
    indexed = {schedule.domain.dims[d].name for d in access.indexed}
    given = ix.both(g.condition for g in at.guards if g.dims & indexed)
    step, flag = params.size(op.step, f"{name}_step"), params.field("flag", "int32_t*", ("flag",))
    place = Place(f"{name}_at", params.index, index.name, step, params.count(op.extent), flag, given)
    table = params.field(f"x{op.table}", f"const {ctype}*", ("input", op.table))
    offset, guard = _offset(access, at, params, schedule), _guard(access, at, schedule)
    inside = ix.both([*([] if guard is None else [guard]), ix.less(-1, place.name)])
    read = Load(f"{name}_m", ctype, table, ix.add(offset, place.name), inside)
    return [place, read, Compute(name, register, conversion(ctype, register), (read.name,))]


def compute(op: Pointwise, params: Params, registers: dict[str, str]) -> Compute:
    """The statement that computes the op of one element."""
    arguments, names = [], []
    for operand in op.operands:
        text = _operand(operand, op, params, registers)
        if not operand.is_number:
            text = text.replace(operand.name, f"{{{len(names)}}}")
            names.append(operand.name)
        arguments.append(text)
    register = registers[op.output.name] = op.output.dtype.register.ctype
    kind = op.compute.kind if op.compute else "f"
    return Compute(op.output.name, register, op.symbol, tuple(names), arguments=tuple(arguments), kind=kind)


def _operand(value: Value, op: Pointwise, params: Params, registers: dict[str, str]) -> str:
    """C text of an operand, converted to the op's compute type."""
    wanted = (op.compute or value.dtype).register
    if value.literal is not None:
        return literal(value.literal, wanted)
    if value.size is not None:
        return f"convert<{wanted.ctype}>({params.count(value.size)})"
    if value.is_number:
        text, own = (
            params.field(value.name, value.dtype.ctype, ("number", int(value.name[1:]), value.dtype.name)),
            value.dtype.ctype,
        )
    else:
        text, own = value.name, registers[value.name]
    return text if own == wanted.ctype else f"convert<{wanted.ctype}>({text})"


def store(
    access: Access, at: Indices, params: Params, schedule: Schedule, reduced: set[str] = frozenset()
) -> Store:
    """A store by one of the iterations that share the element: the first along each dim that the tensor
    lacks. Dims in `reduced` are gone."""
    first = [
        ix.less(at.of[dim.name], 1)
        for d, dim in enumerate(schedule.domain.dims)
        if not access.moves(d) and not (dim.extent.is_const and dim.extent.a == 1) and dim.name not in reduced
    ]
    guard = ix.both([g.condition for g in at.guards if not g.dims <= reduced] + first)
    value = access.buffer.value
    pointer, offset = _pointer(access, params, ""), _offset(access, at, params, schedule)
    return Store(pointer, value.dtype.ctype, value.dtype.register.ctype, offset, value.name, guard)


_CACHE_LINE = 16  # elements of four bytes: rows of a tile of the host begin in different sets of its cache


def _tiles(schedule: Schedule) -> list[Tile]:
    """Shared-memory tiles of the loads that the schedule places there, a vector of padding a row against bank
    conflicts."""
    lanes = next((x.extent.a for x in schedule.loops if x.bind == "vector"), _CACHE_LINE)
    tiles, offset = [], 0
    for access in schedule.domain.loads:
        if access.buffer.value.name in schedule.shared:
            dtype = access.buffer.value.dtype
            tile = Tile(
                f"{access.buffer.value.name}_tile",
                dtype.ctype,
                dtype.itemsize,
                schedule.tile_size,
                schedule.tile_size + lanes,
                offset,
            )
            tiles.append(tile)
            offset += -(-tile.bytes // 16) * 16
    return tiles


def _fill_tiles(schedule: Schedule, params: Params, tiles: list[Tile], guarded: bool) -> list[Stmt]:
    """Reads each tile along the axis that is contiguous in its tensor: the threads and lanes run over rows,
    the loop over columns."""
    row, col = schedule.tile
    if schedule.is_vectorised:
        return _fill_host_tiles(schedule, params, tiles, guarded)
    step = next(x.extent for x in schedule.loops if x.bind == "thread.y").a
    thread_x, thread_y = (
        next(x.name for x in schedule.loops if x.bind == b) for b in ("thread.x", "thread.y")
    )
    lane = next(x for x in schedule.loops if x.bind == "vector")
    along = ix.add(ix.mul(Var(thread_x), lane.extent.a), Var(lane.name))
    column = ix.add(ix.mul(Var("k"), step), Var(thread_y))
    at = indices(schedule, params, {row: along, col: column}, "_t")
    body: list[Stmt] = list(at.lets)
    stores: list[Stmt] = []
    for tile in tiles:
        access = next(a for a in schedule.domain.loads if f"{a.buffer.value.name}_tile" == tile.name)
        register = f"{access.buffer.value.name}_t"
        guard = _guard(access, at, schedule) if guarded else None
        body.append(
            Load(
                f"{register}_m",
                tile.ctype,
                _pointer(access, params, "const "),
                _offset(access, at, params, schedule),
                guard,
            )
        )
        body.append(Compute(register, tile.ctype, "copy", (f"{register}_m",)))
        stores.append(
            Store(
                tile.name,
                tile.ctype,
                tile.ctype,
                ix.add(ix.mul(column, tile.pitch), along),
                register,
                shared=True,
            )
        )
    inner = For(lane.name, ix.Const(lane.extent.a), "vector", tuple(body + stores))
    return [For("k", ix.Const(schedule.tile_size // step), "unroll", (inner,))]


def _fill_host_tiles(schedule: Schedule, params: Params, tiles: list[Tile], guarded: bool) -> list[Stmt]:
    """The same by one thread, which leaves each tile as the loop over columns reads it."""
    at = indices(schedule, params, {name: ix.Const(0) for name in schedule.tile}, "_t")
    row, col = (
        {r.parent for r in schedule.relations if isinstance(r, Split) and r.inner == name}
        for name in schedule.tile
    )
    counts = []
    for dims in (row, col):
        bounds = (
            [ix.sub(g.condition.b, g.condition.a) for g in at.guards if g.dims == dims] if guarded else []
        )
        counts.append(ix.minimum(schedule.tile_size, bounds[0]) if bounds else ix.Const(schedule.tile_size))
    fills: list[Stmt] = []
    for tile in tiles:
        access = next(a for a in schedule.domain.loads if f"{a.buffer.value.name}_tile" == tile.name)
        d = next(d for d, dim in enumerate(schedule.domain.dims) if dim.name in col)
        stride = params.size(access.strides[d], f"{access.buffer.value.name}_stride{d}")
        fills.append(
            FillTile(
                tile.name,
                tile.pitch,
                _pointer(access, params, "const "),
                _offset(access, at, params, schedule),
                stride,
                *counts,
            )
        )
    return [*at.lets, *fills]
