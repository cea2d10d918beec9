"""Tiles of shared memory, through which tensors go that are contiguous along another dim than the others.

In: a Schedule that places loads and results in tiles. Out: the tiles, the statements that fill those of
loads, and those that store what is in those of results. Example, of tiles of 64 rows by 256 threads:

    for k in 16 (unroll): x1_tile[(k * 4 + thread / 64) * 65 + thread % 64] = args.x1[...]
    for k in 16 (unroll): args.copy_1_out[...] = copy_1_tile[(k * 4 + thread / 64) * 65 + thread % 64]
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from ..schedule.domain import Access
from ..schedule.loops import Schedule, Split
from . import index as ix
from .elements import Elements
from .index import Expr, Var
from .indices import Indices, indices
from .kernel import Tile
from .loop_ir import Barrier, Compute, FillTile, For, Let, Load, Stmt, Store

_CACHE_LINE = 16  # elements of four bytes: rows of a tile of the host begin in different sets of its cache


def tile_name(value: str) -> str:
    return f"{value}_tile"


def tiles(schedule: Schedule) -> dict[str, Tile]:
    """By the name of the value that is loaded or stored; an access of padding a row avoids bank conflicts. A
    tile lies as the tensor does: one row of it is a column of the loops. On the host it lies as the results
    do."""
    tiling = schedule.tile
    placed = {*schedule.values_in("tile"), *schedule.values_in("store_tile")}
    found: dict[str, Tile] = {}
    offset = 0
    for access in schedule.domain.accesses:
        name, dtype = access.buffer.value.name, access.buffer.value.dtype
        if name in placed:
            lines, pitch = tiling.columns, tiling.rows + tiling.lanes
            if schedule.is_vectorised:
                lines, pitch = tiling.rows, tiling.columns + _CACHE_LINE
            tile = found[name] = Tile(tile_name(name), dtype.ctype, dtype.itemsize, lines, pitch, offset)
            offset += -(-tile.bytes // 16) * 16
    return found


def filled(elements: Elements, found: dict[str, Tile], guarded: bool) -> list[Stmt]:
    """Fills the tiles of loads, and waits until all of them are there; with bounds if `guarded`."""
    pairs = _pairs(found, elements.schedule.domain.loads)
    if not pairs:
        return []
    fill = _by_one_thread if elements.schedule.is_vectorised else _by_threads
    return [*fill(elements, pairs, guarded), Barrier()]


def emptied(elements: Elements, found: dict[str, Tile], guarded: bool) -> list[Stmt]:
    """Waits until the tiles of results are full, and stores them; with bounds if `guarded`."""
    pairs = _pairs(found, elements.schedule.domain.stores)
    if not pairs:
        return []
    walk = _walk(elements)
    at = walk.at if guarded else replace(walk.at, guards=())
    loads: list[Stmt] = []
    stores: list[Stmt] = []
    for tile, access in pairs:
        register = f"{access.buffer.value.name}_t"
        loads.append(Load(f"{register}_m", tile.ctype, tile.name, walk.place_in(tile), shared=True))
        loads.append(Compute(register, tile.ctype, "copy", (f"{register}_m",)))
        stores.append(replace(elements.store(access, at), register=tile.ctype, value=register))
    return [Barrier(), walk.loop([*loads, *stores])]


def _pairs(found: dict[str, Tile], accesses: Iterable[Access]) -> list[tuple[Tile, Access]]:
    """Those of `accesses` that have a tile, with it."""
    return [(found[name], a) for a in accesses if (name := a.buffer.value.name) in found]


class _Walk(NamedTuple):
    """How the threads go over a tile along the axis that is contiguous in its tensor: the threads and lanes
    run over rows, the loop `k` over columns. `at`: the indices of the element at (`along`, `column`)."""

    lets: list[Stmt]
    at: Indices
    along: Expr
    column: Expr
    lane: For
    columns: For

    def place_in(self, tile: Tile) -> Expr:
        """Where `tile` holds the element."""
        return ix.add(ix.mul(self.column, tile.pitch), self.along)

    def loop(self, body: list[Stmt]) -> For:
        """`body` for all elements of the tile."""
        lanes = replace(self.lane, body=(*self.lets, *self.at.lets, *body))
        return replace(self.columns, body=(lanes,))


def _walk(elements: Elements) -> _Walk:
    """How the threads of the schedule of `elements` go over its tiles."""
    schedule = elements.schedule
    tiling, bound = schedule.tile, {x.bind: x for x in schedule.loops}
    across, lane = tiling.rows // tiling.lanes, bound["vector"].name
    x, y = bound["thread.x"], bound["thread.y"]
    thread = ix.add(ix.mul(Var(y.name), x.extent.a), Var(x.name))
    first, line = (
        Let("along", elements.params.index, ix.mod(thread, across)),
        Let("line", elements.params.index, ix.div(thread, across)),
    )
    along = ix.add(ix.mul(Var("along"), tiling.lanes), Var(lane))
    step = schedule.threads // across
    column = ix.add(ix.mul(Var("k"), step), Var("line"))
    at = indices(schedule, elements.params, {tiling.row: along, tiling.col: column}, "_t")
    lanes = For(lane, ix.Const(tiling.lanes), "vector", ())
    columns = For("k", ix.Const(tiling.columns // step), "unroll", ())
    return _Walk([first, line], at, along, column, lanes, columns)


def _by_threads(elements: Elements, pairs: list[tuple[Tile, Access]], guarded: bool) -> list[Stmt]:
    """Reads each tile along the axis that is contiguous in its tensor."""
    walk = _walk(elements)
    at = walk.at
    body: list[Stmt] = []
    stores: list[Stmt] = []
    for tile, access in pairs:
        register = f"{access.buffer.value.name}_t"
        window, known = elements.window(access, at, "_t")
        guard = ix.both([*(ix.conjuncts(elements.guard(at, access)) if guarded else ()), *known])
        pointer, offset = elements.pointer(access, "const "), elements.offset(access, at)
        body += [*window, Load(f"{register}_m", tile.ctype, pointer, offset, guard)]
        body.append(Compute(register, tile.ctype, "copy", (f"{register}_m",)))
        stores.append(Store(tile.name, tile.ctype, tile.ctype, walk.place_in(tile), register, shared=True))
    return [walk.loop([*body, *stores])]


def _by_one_thread(elements: Elements, pairs: list[tuple[Tile, Access]], guarded: bool) -> list[Stmt]:
    """The same on the host, which leaves each tile as the loop over columns reads it."""
    schedule, tiling = elements.schedule, elements.schedule.tile
    at = indices(schedule, elements.params, {tiling.row: ix.Const(0), tiling.col: ix.Const(0)}, "_t")
    row, col = (
        {r.parent for r in schedule.relations if isinstance(r, Split) and r.inner == name}
        for name in (tiling.row, tiling.col)
    )
    counts = []
    for dims, side in ((row, tiling.rows), (col, tiling.columns)):
        bounds = [ix.sub(g.condition.b, g.condition.a) for g in at.guards if g.dims == dims]
        counts.append(ix.minimum(side, bounds[0]) if guarded and bounds else ix.Const(side))
    fills: list[Stmt] = []
    for tile, access in pairs:
        d = next(d for d, dim in enumerate(schedule.domain.dims) if dim.name in col)
        stride = elements.params.size(access.strides[d], f"{access.buffer.value.name}_stride{d}")
        pointer, offset = elements.pointer(access, "const "), elements.offset(access, at)
        fills.append(FillTile(tile.name, tile.pitch, pointer, offset, stride, *counts))
    return [*at.lets, *fills]
