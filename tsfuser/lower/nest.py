"""The first step of lowering: the loop nest of a segment.

In: Segment, Schedule. Out: a Kernel of sweeps over the data, guarded where a split does not divide. A
pointwise segment is one sweep that stores. A reduction is one sweep that accumulates; then threads combine,
and the first ones store. Where other results depend on a reduction, all threads get it, and sweep again.
Later passes move loads and stores. Examples, before any other pass, of `x + 1` and of softmax:

    for lane in 4: { x0 = args.x0[i0 + lane]; add_0 = x0 + 1; args.add_0_out[i0 + lane] = add_0 if ... }

    for u, lane: { x0 = ...; max[lane] = max(max[lane], x0) };  combine
    for u, lane: { x0; e = exp(x0 - max); sum[lane] += e };  combine
    for u, lane: { x0; e; y = e / sum; store }
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..ir import size as sz
from ..ir.fusion import Reduce
from ..ir.layout import Room
from ..ir.size import Size
from ..schedule.domain import Access
from ..schedule.loops import Schedule
from ..segment import Segment
from . import cooperative, prefetch, row_ahead, row_reductions, scan_parts, scans
from . import index as ix
from .accumulate import Accumulation
from .arguments import Params
from .draft import Draft
from .exchange import exchanged
from .final_reductions import FinalReductions
from .index import Expr, Var
from .indices import Guard, Indices, covered, indices
from .kernel import Kernel
from .loop_ir import Barrier, BlockReduce, ClusterReduce, For, If, Let, Stmt
from .saved_values import WIDEST, SavedValues
from .tiles import emptied, filled
from .traverse import once, read_by, rename, rewrite_indices


def nest(segment: Segment, schedule: Schedule, name: str) -> Kernel:
    """The loop nest of `segment` under `schedule`."""
    params = Params(schedule)
    at = indices(schedule, params, scans.backwards(schedule, params))
    draft = Draft(segment, schedule, params, at)
    body = _body(draft)
    cut = at.guards if draft.tiles else _lane_guards(schedule, at)
    if cut:
        inside = ix.both(g.inside for g in cut)  # most tiles are whole, and do without bounds
        rest = replace(at, guards=tuple(g for g in at.guards if g not in cut))
        whole = _body(Draft(segment, schedule, params, rest))
        body = _one_of(at.lets_of(ix.names(inside)), inside, whole, body)
    return _kernel(name, draft, body)


def _one_of(lets: Sequence[Stmt], inside: Expr, whole: list[Stmt], cut: list[Stmt]) -> list[Stmt]:
    """`whole` if `inside` holds, else `cut`. If they are loops over tiles, each iteration chooses."""
    loops = [k for k, s in enumerate(cut) if isinstance(s, For) and s.bind == "rows"]
    if not loops:
        return [*lets, If(inside, tuple(whole), tuple(cut))]
    [k] = loops
    loop, other = cut[k], whole[k]
    assert isinstance(loop, For) and isinstance(other, For)
    body = (*lets, If(inside, other.body, loop.body))
    return [*cut[:k], replace(loop, body=body), *cut[k + 1 :]]


def _lane_guards(schedule: Schedule, at: Indices) -> tuple[Guard, ...]:
    """The bounds on the lanes of the host's outer reductions, which its compiler vectorises without them."""
    lane = next((x.name for x in schedule.loops if x.bind == "simd"), "")
    outer = schedule.reduction is not None and lane not in schedule.reduction.loops
    return tuple(g for g in at.guards if outer and lane in ix.names(g.condition))


def _body(draft: Draft) -> list[Stmt]:
    """The statements of a thread."""
    saved = SavedValues(draft)
    prefetch.use(draft)
    ahead = row_ahead.use(draft)
    body: list[Stmt] = []
    for number in draft.sweeps.numbers:
        draft.row_values += row_reductions.row_values(draft, number)
        if not draft.row_loop:  # else every loop over the rows begins with the known values of its row
            body += _of_only_iteration(draft)
            draft.row_values = []
        body += _sweep(draft, saved, number)
    body += row_reductions.stores(draft)
    if draft.cooperative and draft.how.scope == "cooperative":
        body = cooperative.with_slots(draft, body)
    if draft.iteration is not None and not draft.tiles:
        body = _over_rows(draft, body, ahead)
    if draft.how is not None and draft.how.scope == "cluster":
        body = cooperative.with_cluster(body)
    if draft.iteration is None:
        body = _with_tiles(draft, body)
    return [*saved.scratch(), *body]


def _with_tiles(draft: Draft, body: list[Stmt]) -> list[Stmt]:
    """`body` between what fills the tiles of loads and what stores the tiles of results."""
    guarded = bool(draft.at.guards)
    fill = filled(draft.elements, draft.tiles, guarded)
    return [*fill, *body, *emptied(draft.elements, draft.tiles, guarded)]


def _of_only_iteration(draft: Draft) -> list[Stmt]:
    """The row values, for where they stand: before loops of one iteration."""
    only = {x.name: ix.Const(0) for x in draft.loops if x.extent == sz.const(1)}
    return [rewrite_indices(s, only) for s in draft.row_values]


def _sweep(draft: Draft, saved: SavedValues, number: int) -> list[Stmt]:
    """The loops of sweep `number`, which accumulate reductions and store what is ready, and the combinations
    after them."""
    if not draft.sweeps.goals(number):
        return []
    reductions, known_before = draft.sweeps.reductions(number), frozenset(saved.arrays)
    arrays, needed = saved.sweep(number)
    parts = draft.parts(number)
    needed = [rename(s, parts) for s in needed]
    known = list(draft.row_values)
    *earlier, row = row_reductions.reduced(
        draft, number, [op for op in reductions if op in draft.sweeps.allreduced], known_before
    )
    final = FinalReductions(draft)
    once_stored = [name for name in draft.sweeps.stores(number) if _of_all_rows(draft, name)]
    if len(once_stored) == len(draft.sweeps.stores(number)):
        once_stored = []
    stores = [
        draft.elements.store(draft.store_of(name), draft.at, tile=draft.tiles.get(name))
        for name in draft.sweeps.stores(number)
        if name not in once_stored
    ]
    if draft.sweeps.allreduced:
        before, after = row.before, row.after
        body = [*final.body(reductions), *row.body, *stores]
    else:  # there is one sweep, which ends with the results of all reductions
        before, after = final.before, final.results()
        body = [*stores, *final.body(reductions)]
    if draft.row_loop:
        known = read_by([*needed, *body, *_along_rows(draft)], known)
    late = _stored_once(draft, once_stored, needed)
    if once_stored:  # threads that pass on what they have put their terms into an array
        terms = {op.output.name: f"{op.output.name}_term" for op in draft.segment.scans}
        needed = read_by(body, needed, terms)
    values, body = scan_parts.looped(draft, number, [*once([*draft.at.lets, *known, *needed]), *body])
    before = [*values, *before]
    if draft.iteration is not None and draft.tiles:
        body = _over_tiles(draft, body)
    return [*arrays, *_earlier_passes(draft, earlier, needed), *before, *body, *after, *late]


def _earlier_passes(draft: Draft, passes: Sequence[Accumulation], needed: Sequence[Stmt]) -> list[Stmt]:
    """The loops of a sweep's passes over its row but for the last one; `needed` computes its terms."""
    made: list[Stmt] = []
    for each in passes:
        body = [*once([*draft.at.lets, *read_by(each.body, needed)]), *each.body]
        made += [*each.before, *draft.looped(body, draft.loops), *each.after]
    return made


def _of_all_rows(draft: Draft, name: str) -> bool:
    """Whether all rows of a pointwise kernel share the result `name`, which the first one stores."""
    if draft.how is not None or draft.tiles or draft.lane.bind != "vector":
        return False
    if draft.store_of(name).buffer.at:
        return False
    access, (*rows, inner) = draft.store_of(name), draft.schedule.domain.dims
    loops = covered(draft.schedule)
    return (
        access.moves(len(rows))
        and not any(map(access.moves, range(len(rows))))
        and bool(draft.elements.first(access, draft.at))
        and not any(inner.name in loops[x.name] for x in draft.loops[:-1])
    )


def _stored_once(draft: Draft, names: list[str], needed: list[Stmt]) -> list[Stmt]:
    """The stores of values that all rows share, behind the loops over rows: the statements `needed` only by
    them, which may be a division, are run by the threads of the first row alone."""
    if not names:
        return []
    *rows, lane = draft.loops
    gone = {x.name: ix.Const(0) for x in rows}
    done = indices(draft.schedule, draft.params, gone, "_out")
    stores: list[Stmt] = [draft.elements.store(draft.store_of(name), done) for name in names]
    own = [rewrite_indices(s, gone) for s in read_by(stores, needed)]
    lets = [*(rewrite_indices(s, gone) for s in draft.at.lets_for(own)), *done.lets_for(stores)]
    first = ix.both(draft.elements.first(draft.store_of(names[0]), done))
    inside = draft.looped([*once(lets), *own, *stores], [lane])
    return [*done.lets_of(ix.names(first)), If(first, tuple(inside), ())]


def _along_rows(draft: Draft) -> list[Stmt]:
    """The ops along a row of all sweeps. What these read is loaded before the first one, so that no later
    sweep begins with a wait; what only the stores at the end read is loaded there, as one thread needs it."""
    return [
        s
        for op in draft.segment.ops
        if not isinstance(op, Reduce) and draft.sweeps.varies(op.output)
        for s in draft.computed[op.output.name]
    ]


def _over_tiles(draft: Draft, body: list[Stmt]) -> list[Stmt]:
    """`body`, which uses one tile of each tensor that is in tiles, for all tiles of the block."""
    loop = draft.iteration
    count = draft.params.size(loop.extent, f"{loop.name}_size")
    return [For(loop.name, count, "rows", (*_with_tiles(draft, body), Barrier()))]


def _over_rows(draft: Draft, body: list[Stmt], ahead: list[Access]) -> list[Stmt]:
    """`body`, which does one row, for all rows of the block, and the results of the sums over them. `ahead`:
    the loads of values that a row has one of, an iteration ahead."""
    loop = draft.iteration
    body = [*row_ahead.before_a_row(draft, ahead), *prefetch.before_a_row(draft), *body]
    count = draft.params.size(loop.extent, "iterations")
    # where blocks meet in memory, a barrier of the block stands between two rows
    met = draft.how.scope == "cooperative" and not draft.sweeps.final
    halved = () if met else (BlockReduce, ClusterReduce)
    if loop.extent != sz.const(1):  # else `flatten` leaves no loop whose variable could be named
        body = [
            replace(s, iteration=loop.name, half=draft.exchanged) if isinstance(s, halved) else s
            for s in body
        ]
    final = FinalReductions(draft)
    loops = [*final.before, For(loop.name, count, "rows", tuple(body)), *final.results()]
    return [*row_ahead.before_the_rows(draft, ahead), *prefetch.before_the_rows(draft), *loops]


def _kernel(name: str, draft: Draft, body: list[Stmt]) -> Kernel:
    """`body` with its arguments, its launch and its shared memory."""
    schedule, params, how = draft.schedule, draft.params, draft.how
    places = {"block": "blockIdx.x", "thread.x": "threadIdx.x", "thread.y": "threadIdx.y"}
    launch = [Let(x.name, params.index, Var(places[x.bind])) for x in schedule.loops if x.bind in places]
    extent = {x.bind: x.extent for x in schedule.loops}
    # signed, unlike CUDA's own
    launch += [
        Let(f"block_{axis}", params.index, Var(f"blockDim.{axis}"))
        for axis in "xy"
        if f"thread.{axis}" in extent and not extent[f"thread.{axis}"].is_const
    ]
    met = exchanged(body)
    tiles = [*draft.tiles.values(), *prefetch.tiles(draft, -(-met // 128) * 128)]
    scratch = len(draft.schedule.values_in("scratch"))
    row = schedule.domain.dims[-1].extent
    rooms = _rooms(draft)
    cluster = cooperative.parts(draft) if how is not None and how.scope == "cluster" else 0
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
        row * (WIDEST * scratch) if scratch else max([met, *(t.offset + t.bytes for t in tiles)]),
        schedule.grain,
        schedule.resident,
        bool(how and how.scope == "cooperative"),
        cluster,
        str(params.size(cluster, "parts")) if isinstance(cluster, Size) else "",
        bool(how and how.leads),
        bool(how and how.combines_partials),
        rooms=rooms,
    )


def _rooms(draft: Draft) -> tuple[str, ...]:
    """Where the kernel stores zeros behind parts of its results."""
    stored = [a for a in draft.schedule.domain.stores if a.buffer.room is not None]
    return tuple(
        ", ".join([draft.elements.pointer(a, ""), *map(str, _sizes_of_room(draft, a.buffer.room))])
        for a in stored
    )


def _sizes_of_room(draft: Draft, room: Room) -> list[Expr]:
    sizes = (
        (room.parts, "parts"),
        (room.length, "part_length"),
        (room.pitch, "part_pitch"),
        (room.behind, "behind"),
    )
    return [draft.params.size(size, name) for size, name in sizes]
