"""The loops of the row schedule.

In: rows, and `RowParams`. Out: the Schedule. Example, short rows: a row is split over the threads of a warp,
and a block has as many rows as it has warps.
"""

from __future__ import annotations

from dataclasses import replace

from ..ir import size as sz
from ..ir.size import Size
from .loops import Reduction, Schedule
from .machine import Machine
from .pointwise import with_grain
from .row_params import RowParams, block_shape, blocks_per_row, parts_of_all_rows
from .row_space import Rows


def apply(rows: Rows, params: RowParams, machine: Machine) -> Schedule:
    """The loops over `rows`, without placements."""
    schedule = Schedule.over(rows.space, params.threads, params.wide)
    outer, along = [x.name for x in schedule.loops if x.name not in rows.along], list(rows.along)
    if len(along) > 1:  # a vector never crosses from one piece of a row to the next
        schedule, along = schedule.reorder(*outer, *along).fuse_all(along, "col"), ["col"]
    across, down = block_shape(rows.length, params, machine)
    schedule, loops = _along_a_row(schedule, along[0], rows, params, across * params.vector)
    schedule = _over_rows(schedule, outer, loops, rows, params, down, machine)
    schedule = schedule.bind(
        tx="thread_x",
        ty="thread_y",
        u="unroll",
        lane="simd" if machine.vectorises_loops else "vector",
        block="block",
        iteration="rows",
    )
    how = Reduction(
        tuple(loops),
        "x",
        "cluster"
        if params.cluster
        else "cooperative"
        if params.cooperative
        else "warp"
        if params.warp
        else "block",
        allreduce=True,
        warp=params.warp,
        side_by_side="u" if params.multi_row else "",
        in_double=not machine.has_threads and not params.in_float,
    )
    return with_grain(replace(schedule, resident=params.resident, reduction=how), machine)


def _along_a_row(
    schedule: Schedule, col: str, rows: Rows, params: RowParams, step: Size
) -> tuple[Schedule, list[str]]:
    """Splits `col` over blocks, threads and vectors, and returns also the loops over which a thread
    accumulates. `step`: the elements of one vector of each thread together."""
    bounds = {"exact": params.exact, "whole": params.whole}
    if params.cooperative:
        each = step * (params.unroll * params.rounds)
        schedule = schedule.split(col, each, ("part", "share"), times=blocks_per_row(rows, params), **bounds)
        if params.in_registers or params.held:
            schedule, loops = schedule.split("share", step, ("u", "chunk"), exact=True), ["u"]
        else:
            schedule = schedule.split("share", step * params.unroll, ("r", "round"), exact=True)
            loops = ["r", "u"]
    elif params.persistent:
        times = 1 if params.multi_row else params.unroll
        loops = ["u" if times > 1 else "once"]
        schedule = schedule.split(col, step, (loops[0], "chunk"), times=times, **bounds)
    else:
        each = step * params.unroll
        rounds = sz.ceildiv(schedule.loop(col).extent, each)
        schedule = schedule.split(col, each, ("r", "round"), times=rounds, **bounds)
        loops = ["r", "u"]
    if "r" in loops:
        schedule = schedule.split("round", step, ("u", "chunk"), exact=True)
    return schedule.split("chunk", params.vector, ("tx", "lane"), exact=True), [*loops, "lane"]


def _over_rows(
    schedule: Schedule,
    outer: list[str],
    loops: list[str],
    rows: Rows,
    params: RowParams,
    down: Size,
    machine: Machine,
) -> Schedule:
    """Splits the loops `outer` over blocks, and over iterations if a block has many rows. `loops` are those
    of a thread along its row."""
    if params.cooperative:
        block_sets = None if params.in_registers else parts_of_all_rows(rows, params, machine)
        schedule = _block_sets(schedule, outer, block_sets)
        iterations = [] if params.in_registers else ["iteration"]
        schedule = schedule.reorder("block_set", "part", *iterations, "ty", "tx", *loops)
        return schedule.fuse("block_set", "part", "block")
    if not outer:
        return schedule.reorder("tx", *loops).with_single("block")
    if rows.apart:
        parts = parts_of_all_rows(rows, params, machine)
        return _over_rows_apart(schedule, outer, loops, rows.apart, down, parts)
    schedule, row = schedule.reorder(*outer, "tx", *loops), outer[0]
    if len(outer) > 1:
        schedule, row = schedule.fuse_all(outer, "row"), "row"
    each, own = (down * params.unroll, "rows") if params.multi_row else (down, "ty")
    blocks = ["block"]
    if params.goes_over_rows:
        parts = parts_of_all_rows(rows, params, machine)
        schedule = schedule.split(row, parts * each, ("iteration", "group"))
        schedule = schedule.split("group", each, ("block", own), exact=True)
        blocks.append("iteration")
    else:
        one_each = each.is_const and each.a == 1
        schedule = schedule.split(row, each, ("block", own), exact=one_each or not machine.has_threads)
    if params.multi_row:
        schedule = schedule.split("rows", down, ("u", "ty"), exact=True)
        loops = ["u", *loops]
    return schedule.reorder(*blocks, "ty", "tx", *loops)


def _over_rows_apart(
    schedule: Schedule, outer: list[str], loops: list[str], apart: tuple[str, ...], down: Size, parts: Size
) -> Schedule:
    """`_over_rows` where rows along the loops `apart` have columns of their own: a block has `down` of those
    rows, and goes over one of the `parts` parts of the rows that are added up to their columns."""
    added = [x for x in outer if x not in apart]
    schedule = schedule.reorder(*apart, *added, "tx", *loops)
    own, row = apart[0], added[0]
    if len(apart) > 1:
        schedule, own = schedule.fuse_all(list(apart), "own"), "own"
    if len(added) > 1:
        schedule, row = schedule.fuse_all(added, "row"), "row"
    schedule = schedule.split(row, parts, ("iteration", "part"))
    schedule = schedule.split(own, down, ("stripe", "ty"))
    schedule = schedule.reorder("part", "stripe", "iteration", "ty", "tx", *loops)
    return schedule.fuse("part", "stripe", "block")


def _block_sets(schedule: Schedule, outer: list[str], block_sets: Size | None) -> Schedule:
    """`schedule` with loops `iteration`, `block_set` and `ty` over the rows. If each row has blocks of its
    own, there are no iterations."""
    if not outer:
        schedule = schedule.with_single("ty").with_single("block_set")
        return schedule if block_sets is None else schedule.with_single("iteration")
    rest = [x.name for x in schedule.loops if x.name not in outer]
    schedule = schedule.reorder(*outer, *rest).fuse_all(outer, "row")
    row = "row"
    if block_sets is not None:
        schedule, row = schedule.split("row", block_sets, ("iteration", "group")), "group"
    return schedule.split(row, 1, ("block_set", "ty"), exact=True)
