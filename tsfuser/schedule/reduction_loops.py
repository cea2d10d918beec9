"""The loops of the reduction schedule.

In: kept and reduced dims, `ReductionParams` and `Shape`. Out: the Schedule. Example, sums of columns: each
thread along x owns four columns; the eight threads along y take every eighth row each, and combine.
"""

from __future__ import annotations

from dataclasses import replace

from ..ir.size import Size
from .loops import Reduction, Schedule
from .machine import Machine
from .pointwise import with_grain
from .reduction_params import ReductionParams, Shape, Sides


def apply(
    sides: Sides, params: ReductionParams, shape: Shape, machine: Machine, partial: Size | None
) -> Schedule:
    """`partial`: elements between the partial results of two splits; None if the result is final."""
    schedule = Schedule.over(sides.space, params.threads, params.wide)
    kept, reduced = [d.name for d in sides.kept], [d.name for d in sides.reduced]
    build = _inner if params.inner else _outer
    schedule = build(schedule, kept, reduced, params, shape, machine, partial)
    return with_grain(replace(schedule, resident=params.resident), machine)


def combination(loops: tuple[str, ...], axis: str, partial: Size | None, machine: Machine) -> Reduction:
    """How results are combined. `partial` is that of `apply`."""
    leads = partial is not None and machine.overlaps_launches
    part = None if partial is None else ("part", partial)
    scope = "block" if partial is None else "grid"
    columns = "" if "lane" in loops else "lane"
    in_double = not machine.has_threads
    return Reduction(loops, axis, scope, part, side_by_side=columns, in_double=in_double, leads=leads)


def _lanes(machine: Machine) -> str:
    """The binding of the loop over lanes: one access, or a loop that the compiler vectorises."""
    return "simd" if machine.vectorises_loops else "vector"


def _fused(schedule: Schedule, names: list[str], into: str) -> tuple[Schedule, str]:
    return (schedule.fuse_all(names, into), into) if len(names) > 1 else (schedule, names[0])


def _outer(
    schedule: Schedule, kept, reduced, params: ReductionParams, shape: Shape, machine: Machine, partial
) -> Schedule:
    *rows, col = kept
    if rows and machine.has_threads:  # a vector never crosses from one row to the next
        schedule = schedule.reorder(*reduced, *kept).fuse_all(kept, "cell")
        rows, col = [], "cell"
    schedule = schedule.reorder(*rows, *reduced, col)
    schedule, walk = _fused(schedule, reduced, "walk")
    schedule, walk, parts = _parted(schedule, walk, shape, partial, False)
    schedule = schedule.split(col, shape.across * params.vector, ("col_block", "chunk"), whole=params.whole)
    schedule = schedule.split("chunk", params.vector, ("tx", "lane"), exact=True)
    schedule = schedule.split(
        walk, shape.down * params.unroll, ("r", "round"), exact=not machine.has_threads
    ).split("round", shape.down, ("u", "ty"), exact=True)
    schedule = schedule.reorder(*rows, *parts, "col_block", "ty", "tx", "r", "u", "lane")
    schedule = schedule.fuse_all([*rows, *parts, "col_block"], "block")
    schedule = schedule.bind(
        block="block", tx="thread_x", ty="thread_y", r="serial", u="unroll", lane=_lanes(machine)
    )
    return replace(schedule, reduction=combination(("r", "u"), "y", partial, machine))


def _parted(
    schedule: Schedule, walk: str, shape: Shape, partial, whole: bool
) -> tuple[Schedule, str, list[str]]:
    """Splits the reduced loop into one chunk per split, if there are several splits: (schedule, loop over a
    chunk, loops over chunks)."""
    if partial is None:
        return schedule, walk, []
    return schedule.split(walk, shape.chunk, ("part", "step"), whole=whole), "step", ["part"]


def _inner(
    schedule: Schedule, kept, reduced, params: ReductionParams, shape: Shape, machine: Machine, partial
) -> Schedule:
    *outer, col = reduced
    schedule = schedule.reorder(*kept, *outer, col)
    serial = ["r", "u", "lane"]
    bound = {"tx": "thread_x", "r": "serial", "u": "unroll", "lane": _lanes(machine), "block": "block"}
    blocks: list[str] = []
    if outer:
        schedule, walk = _fused(schedule, outer, "walk")
        if params.cut:
            schedule, walk, blocks = _parted(schedule, walk, shape, partial, False)
        if params.deep:
            schedule, walk = schedule.split(walk, params.unroll, ("w", "u")), "w"
        serial.insert(0, walk)
    step = col
    if not params.cut:
        schedule, step, blocks = _parted(schedule, col, shape, partial, params.whole)
    if params.deep:
        schedule = schedule.split(step, shape.across * params.vector, ("r", "chunk"), whole=params.whole)
    else:
        schedule = schedule.split(
            step, shape.across * (params.vector * params.unroll), ("r", "round"), whole=params.whole
        )
        schedule = schedule.split("round", shape.across * params.vector, ("u", "chunk"), exact=True)
    schedule = schedule.split("chunk", params.vector, ("tx", "lane"), exact=True)
    threads = ["tx"]
    if kept:
        schedule, row = _fused(schedule, kept, "row")
        schedule = schedule.split(row, shape.down, ("row_block", "ty"), exact=not machine.has_threads)
        blocks, threads, bound["ty"] = ["row_block", *blocks], ["ty", "tx"], "thread_y"
    schedule = schedule.reorder(*blocks, *threads, *serial)
    schedule = schedule.fuse_all(blocks, "block") if blocks else schedule.with_single("block")
    schedule = schedule.bind(**bound)
    return replace(schedule, reduction=combination(tuple(serial), "x", partial, machine))
