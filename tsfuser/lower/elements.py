"""The statements of one element: load, compute, look up, draw a random number, store.

In: an op or an access of a segment, and the index of the element. Out: Loop IR. Example, of `relu(x0)` in
half:

    x0_m = args.x0[i0]; x0 = convert<float>(x0_m); relu_0 = relu(x0); args.relu_0_out[i0] = relu_0
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from dataclasses import replace

from ..ir import size as sz
from ..ir.fusion import Located, Lookup, Op, Pointwise, Position, Random, Value, Within
from ..ir.size import Size
from ..ir.symbols import ROUNDING
from ..ir.values import Window
from ..schedule.domain import Access
from ..schedule.loops import Schedule, Split
from ..segment import BufferKind
from . import index as ix
from .arguments import Params
from .combine import conversion
from .index import Bin, Expr
from .indices import Indices, covered
from .kernel import Tile
from .literals import literal
from .loop_ir import Compute, Let, Load, Place, Stmt, Store, Uniform


class Elements:
    """Makes the statements of a kernel's elements. `registers`: the C type of each value made so far, in
    registers. `needs`: where each load is needed (needs.py)."""

    def __init__(self, schedule: Schedule, params: Params, needs: dict[str, frozenset] | None = None):
        self.schedule, self.params = schedule, params
        self.needs = needs or {}
        self.registers: dict[str, str] = {}
        #: values whose registers hold numbers of their own dtype, also if that has 16 bits or less
        self._rounded: set[str] = set()

    def load(self, access: Access, at: Indices, tile: Tile | None = None) -> list[Stmt]:
        """From memory, or from `tile`, where the schedule has placed it there."""
        value = access.buffer.value
        memory = f"{value.name}_m"
        register = self.registers[value.name] = value.dtype.register.ctype
        convert = conversion(value.dtype.ctype, register)
        self._rounded.add(value.name)
        if access.buffer.by_value:
            field = self.params.field(value.name, value.dtype.ctype, ("element", access.buffer.index))
            return [Compute(value.name, register, convert, (), arguments=(field,))]
        if tile is None:
            if access.part_of:
                return self._part(access, at)
            window, known = self.window(access, at)
            read = self.read(access, at)
            guard = ix.both([*ix.conjuncts(read.guard), *known])
            return [*window, replace(read, guard=guard), Compute(value.name, register, convert, (memory,))]
        else:
            read = Load(memory, value.dtype.ctype, tile.name, self._place_in(tile, at), shared=True)
        return [read, Compute(value.name, register, convert, (memory,))]

    def _place_in(self, tile: Tile, at: Indices) -> Expr:
        """Where `tile` holds the element."""
        row, col = (at.of[x] for x in (self.schedule.tile.row, self.schedule.tile.col))
        line, column = (row, col) if self.schedule.is_vectorised else (col, row)
        return ix.add(ix.mul(line, tile.pitch), column)

    def _part(self, access: Access, at: Indices) -> list[Stmt]:
        """An element of a vector that several loads share."""
        domain, value = self.schedule.domain, access.buffer.value
        first = next(a for a in domain.loads if a.buffer.value.name == access.part_of)
        whole = replace(first, strides=(*first.strides[:-1], sz.const(1)))
        read = replace(self.read(whole, at), name=f"{access.part_of}_all")
        group = next(x.name for x in self.schedule.loops if x.bind == "group")
        lane = ix.add(ix.mul(ix.Var(group), domain.dims[-1].extent.a), access.place)
        convert = conversion(value.dtype.ctype, self.registers[value.name])
        return [read, Compute(value.name, self.registers[value.name], convert, (read.name,), lane=lane)]

    def window(self, access: Access, at: Indices, suffix: str = "") -> tuple[list[Stmt], list[Expr]]:
        """The statement that tells whether an element is in all windows of `access`, and needed, and the
        condition that it has made; `suffix` keeps names apart."""
        value, windows = access.buffer.value, access.buffer.windows
        conditions = [c for w in windows for c in self._bounds(w, at, value.name, self._lanes())]
        inside = ix.both(conditions if windows else self._needed(access, at))
        if inside is None:
            return [], []
        return [Let(f"{value.name}_in{suffix}", "bool", inside)], [ix.Var(f"{value.name}_in{suffix}")]

    def _needed(self, access: Access, at: Indices) -> list[Expr]:
        """The conditions under which a load is needed, as far as they are the same for all elements of one
        access, and of a tile where the value goes through one; and for all iterations of a thread's loops
        where the load is the same for all."""
        name, schedule = access.buffer.value.name, self.schedule
        conditions: list[Expr] = []
        if schedule.is_vectorised:  # a branch would cost its compiler's vectors more
            return []
        varying = self._tiled() if name in schedule.values_in("tile") else set()
        varying |= {len(schedule.domain.dims) - 1} if self._lanes_differ() else set()
        looped = self._looped()
        varying |= set() if any(map(access.moves, looped)) else looped
        varying |= {d for d in self._reduced() if not access.moves(d)}  # what is loaded once a row
        for op, inside in sorted(self.needs.get(name, ()), key=lambda need: need[0].output.name):
            steps, _ = schedule.domain.numbered(op.window)
            bounds = self._bounds(op.window, at, op.output.name, self._lanes())
            if all(steps[d] is sz.const(0) for d in varying) and (inside or len(bounds) == 1):
                conditions += bounds if inside else [ix.less(c.b, ix.add(c.a, 1)) for c in bounds]
        return conditions

    def _tiled(self) -> set[int]:
        """The dims of tiles."""
        tiling, schedule = self.schedule.tile, self.schedule
        splits = [
            r for r in schedule.relations if isinstance(r, Split) and r.inner in (tiling.row, tiling.col)
        ]
        names = {r.parent for r in splits}
        return {d for d, dim in enumerate(schedule.domain.dims) if dim.name in names}

    def _looped(self) -> set[int]:
        """The dims along which a thread loops, but for the lanes of an access."""
        loops = [x for x in self.schedule.loops if x.bind in ("rows", "serial", "unroll")]
        return self._dims_of(x.name for x in loops if x.extent is not sz.const(1))

    def _reduced(self) -> set[int]:
        """The dims over which threads accumulate."""
        return self._dims_of(self.schedule.reduction.loops) if self.schedule.reduction else set()

    def _dims_of(self, loops: Iterable[str]) -> set[int]:
        of = covered(self.schedule)
        names = frozenset().union(*(of[name] for name in loops))
        return {d for d, dim in enumerate(self.schedule.domain.dims) if dim.name in names}

    def _lanes_differ(self) -> bool:
        """Whether a window may contain a part of a vector, as of one that is a row."""
        row = self.schedule.domain.dims[-1].extent
        return any(x.bind == "vector" and x.extent is row for x in self.schedule.loops)

    def _lanes(self, *binds: str) -> dict[str, Expr]:
        """What stands for the lane where all lanes of an access are in a window, or none."""
        wanted = binds or ("group", "vector")
        return {x.name: ix.Const(0) for x in self.schedule.loops if x.bind in wanted}

    def _bounds(self, window: Window, at: Indices, name: str, lanes: dict[str, Expr]) -> list[Bin]:
        """The conditions under which an element is in `window`; `lanes`: what stands for a lane."""
        place, scale = self.place(window, at, name, lanes)
        conditions = []
        if window.start is not sz.const(0):
            start = self.params.size(window.start * scale, f"{name}_start")
            conditions.append(ix.less(start, ix.add(place, 1)))
        if window.stop is not None:
            conditions.append(ix.less(place, self.params.size(window.stop * scale, f"{name}_stop")))
        return conditions

    def place(
        self, window: Window, at: Indices, name: str, lanes: dict[str, Expr] | None = None
    ) -> tuple[Expr, Size]:
        """The number of an element along the dim of `window`, times a scale, and the scale. `lanes`: as of
        `_bounds`; the first of them where they are not given."""
        domain, lanes = self.schedule.domain, self._lanes() if lanes is None else lanes
        steps, scale = domain.numbered(window)
        place: Expr = ix.Const(0)
        for dim, step in zip(domain.dims, steps):
            index = ix.substitute(at.of[dim.name], lanes)
            place = ix.add(place, ix.mul(index, self.params.size(step, f"{name}_step")))
        return place, scale

    def _within(self, op: Within, at: Indices) -> Let:
        """Whether the element is in the window of `op`, which may cut through a vector that is a row."""
        name, ctype = op.output.name, op.output.dtype.ctype
        self.registers[name] = ctype
        lanes = self._lanes("group") if self._lanes_differ() else self._lanes()
        conditions = self._bounds(op.window, at, name, lanes)
        return Let(name, ctype, ix.both(conditions) or ix.Const(1))

    def _position(self, op: Position, at: Indices) -> Let:
        """The number of the element, which may be another one for each lane of a vector."""
        name, ctype = op.output.name, op.output.dtype.ctype
        self.registers[name] = ctype
        place, scale = self.place(op.window, at, name, lanes={})
        return Let(name, ctype, ix.div(place, self.params.size(scale, f"{name}_step")))

    def read(self, access: Access, at: Indices) -> Load:
        """The load from memory alone."""
        value = access.buffer.value
        pointer, offset = self.pointer(access, "const "), self.offset(access, at)
        return Load(f"{value.name}_m", value.dtype.ctype, pointer, offset, self.guard(at, access))

    def store(
        self, access: Access, at: Indices, reduced: AbstractSet[str] = frozenset(), tile: Tile | None = None
    ) -> Store:
        """A store by one of the iterations that share the element: the first along each dim that the tensor
        lacks. Dims in `reduced` are gone. If the schedule has placed the value in `tile`, it is stored there,
        also where it is out of bounds."""
        value = access.buffer.value
        ctype, register = value.dtype.ctype, value.dtype.register.ctype
        # only where a compiler's vectors round: a GPU has an instruction for it
        exact = self.schedule.is_vectorised and value.name in self._rounded
        if tile is not None:
            cell = self._place_in(tile, at)
            return Store(tile.name, ctype, register, cell, value.name, shared=True, exact=exact)
        pointer, offset = self.pointer(access, ""), self.offset(access, at)
        if access.buffer.at:  # every iteration adds
            guards = [g.condition for g in at.guards]
            for place in access.buffer.at:
                offset = ix.add(offset, ix.Var(place.name))
                guards.append(ix.less(-1, ix.Var(place.name)))
            return Store(pointer, ctype, register, offset, value.name, ix.both(guards), adds=True)
        first = self.first(access, at, reduced)
        guard = ix.both([g.condition for g in at.guards if not g.dims <= reduced] + first)
        return Store(pointer, ctype, register, offset, value.name, guard, exact=exact)

    def first(self, access: Access, at: Indices, reduced: AbstractSet[str] = frozenset()) -> list[Expr]:
        """Whether this is the first iteration along each dim that the tensor lacks. Dims in `reduced` are
        gone."""
        return [
            ix.less(at.of[dim.name], 1)
            for d, dim in enumerate(self.schedule.domain.dims)
            if not access.moves(d)
            and not (dim.extent.is_const and dim.extent.a == 1)
            and dim.name not in reduced
        ]

    def computed(self, op: Op, at: Indices) -> list[Stmt]:
        """The value of an op that is no reduction."""
        if isinstance(op, Random):
            return self._uniform(op, at)
        if isinstance(op, Lookup):
            return self._lookup(op, at)
        if isinstance(op, Located):
            return [self._located(op, at)]
        if isinstance(op, Within):
            return [self._within(op, at)]
        if isinstance(op, Position):
            return [self._position(op, at)]
        assert isinstance(op, Pointwise)
        return [self._pointwise(op)]

    def _uniform(self, op: Random, at: Indices) -> list[Stmt]:
        """A random number: like a load whose offset alone is used."""
        name, ctype = op.output.name, op.output.dtype.ctype
        access = next(a for a in self.schedule.domain.randoms if a.buffer.value.name == name)
        self.registers[name] = ctype
        source = ("random",) if op.seed is None else ("seeded", op.seed)
        state = self.params.field(source[0], "random_state", source)
        if op.saved is not None:
            self.params.field("seed", "int64_t*", ("seed", op.saved, op.stream))
        walk = (op.walk.counter, op.walk.threads, op.walk.width) if op.walk else ()
        offset, counts = self.offset(access, at), tuple(map(self.params.count, walk))
        drawn = Uniform(f"{name}_m", ctype, state, op.stream, offset, 1, op.name, counts)
        return [drawn, Compute(name, ctype, "copy", (drawn.name,))]

    def _lookup(self, op: Lookup, at: Indices) -> list[Stmt]:
        """An element at the places that the op's operands say: a load whose offset depends on them."""
        name, ctype, params, dims = (
            op.output.name,
            op.output.dtype.ctype,
            self.params,
            self.schedule.domain.dims,
        )
        access = next(a for a in self.schedule.domain.lookups if a.buffer.value.name == name)
        register = self.registers[name] = op.output.dtype.register.ctype
        indexed = {dims[d].name for d in access.indexed}
        given = ix.both(g.condition for g in at.guards if g.dims & indexed)
        flag = params.field("flag", "int32_t*", ("flag",))
        places = []
        for k, (index, step, extent) in enumerate(zip(op.operands, op.steps, op.extents)):
            end = f"{k}" if k else ""
            by, count = params.size(step, f"{name}_step{end}"), params.count(extent)
            missing = 0 if op.has_elements else -1
            place = Place(f"{name}_at{end}", params.index, index.name, by, count, flag, given, missing)
            places.append(place)
        table = params.field(f"x{op.table}", f"const {ctype}*", ("input", op.table))
        offset, guard = self.offset(access, at), self.guard(at, access)
        for place in places:
            offset = ix.add(offset, place.name)
        if not op.has_elements:
            guard = ix.both([*ix.conjuncts(guard), *(ix.less(-1, place.name) for place in places)])
        read = Load(f"{name}_m", ctype, table, offset, guard)
        return [*places, read, Compute(name, register, conversion(ctype, register), (read.name,))]

    def _located(self, op: Located, at: Indices) -> Place:
        """How far away the element is to which a value is added."""
        [index] = op.operands
        name, dims = op.output.name, self.schedule.domain.dims
        self.registers[name] = self.params.index
        varying = {dim.name for dim in dims if not set(index.axes).isdisjoint(dim.axes)}
        given = ix.both(g.condition for g in at.guards if g.dims & varying)
        flag = self.params.field("flag", "int32_t*", ("flag",))
        step, count = self.params.size(op.step, f"{name}_step"), self.params.count(op.extent)
        return Place(name, self.params.index, index.name, step, count, flag, given)

    def _pointwise(self, op: Pointwise) -> Compute:
        arguments: list[str] = []
        names: list[str] = []
        for operand in op.operands:
            text = self._operand(operand, op)
            if not operand.is_number:
                text = text.replace(operand.name, f"{{{len(names)}}}")
                names.append(operand.name)
            arguments.append(text)
        dtype = op.output.dtype
        register = self.registers[op.output.name] = dtype.register.ctype
        if op.symbol in (f"round_to_{dtype}", f"{ROUNDING}{dtype}") or (
            op.symbol == "copy" and all(x.name in self._rounded and x.dtype is dtype for x in op.operands)
        ):
            self._rounded.add(op.output.name)
        kind = op.compute.kind if op.compute else "f"
        return Compute(
            op.output.name, register, op.symbol, tuple(names), arguments=tuple(arguments), kind=kind
        )

    def _operand(self, value: Value, op: Pointwise) -> str:
        """C text of an operand, converted to the op's compute type."""
        wanted = (op.compute or value.dtype).register
        if value.literal is not None:
            return literal(value.literal, wanted)
        if value.size is not None:
            return f"convert<{wanted.ctype}>({self.params.count(value.size)})"
        if value.is_number:
            source = ("number", int(value.name[1:]), value.dtype.name)
            text, own = self.params.field(value.name, value.dtype.ctype, source), value.dtype.ctype
        else:
            text, own = value.name, self.registers[value.name]
        return text if own == wanted.ctype else f"convert<{wanted.ctype}>({text})"

    def offset(self, access: Access, at: Indices) -> Expr:
        """Elements from the start of the buffer."""
        offset: Expr = self.params.size(access.buffer.offset, f"{access.buffer.value.name}_offset")
        for d, dim in enumerate(self.schedule.domain.dims):
            if access.moves(d):
                stride = self.params.size(access.strides[d], f"{access.buffer.value.name}_stride{d}")
                offset = ix.add(offset, ix.mul(at.of[dim.name], stride))
        return offset

    def guard(self, at: Indices, *accesses: Access) -> Expr | None:
        """The bounds of the dims in which `access` moves, or one of those of which it is one."""
        moving = {
            dim.name for d, dim in enumerate(self.schedule.domain.dims) if any(a.moves(d) for a in accesses)
        }
        return ix.both(g.condition for g in at.guards if g.dims & moving)

    def pointer(self, access: Access, qualifier: str) -> str:
        """The C expression of the buffer; `qualifier` is `const ` for those that are read."""
        b = access.buffer
        name = b.value.name
        if b.kind is not BufferKind.INPUT and qualifier == "":
            name = f"{name}_out"
        return self.params.field(name, f"{qualifier}{b.value.dtype.ctype}*", (b.kind.value, b.index))
