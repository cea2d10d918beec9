"""Loop IR as text to read.

In: a body. Out: indented pseudo-C, one line a statement. Example:

    for i in args.n (serial):
      x = args.x0[i]
"""

from __future__ import annotations

from collections.abc import Sequence

from ..ir.symbols import filled
from .loop_ir import (
    Accumulate,
    Accumulator,
    Array,
    AwaitCluster,
    Barrier,
    BlockReduce,
    BlockScan,
    ClusterReduce,
    ColumnReduce,
    Compute,
    CooperativeReduce,
    CooperativeSlots,
    Draw,
    Fetch,
    FetchGroup,
    FillTile,
    For,
    Hide,
    If,
    Let,
    Load,
    Pack,
    Place,
    Scratch,
    SetLane,
    Stmt,
    Store,
    Uniform,
)  # fmt: skip


def lines(body: tuple[Stmt, ...], depth: int) -> list[str]:
    """The lines of `body`, indented `depth` times."""
    result = []
    for s in body:
        result.append("  " * depth + _line(s))
        if isinstance(s, For):
            result += lines(s.body, depth + 1)
        elif isinstance(s, If):
            result += lines(s.yes, depth + 1)
            result += ["  " * depth + "else:", *lines(s.no, depth + 1)] if s.no else []
    return result


_MET = {
    BlockReduce: "threads {0.axis}",
    ColumnReduce: "threads y of {0.columns} columns",
    CooperativeReduce: "blocks at {0.slots}",
    ClusterReduce: "blocks of the cluster",
}


def _call(symbol: str, operands: Sequence[str]) -> str:
    return ", ".join(operands) if symbol == "copy" else f"{symbol}({', '.join(operands)})"


def _line(s: Stmt) -> str:
    if isinstance(s, Let):
        return f"{s.name} = {s.value}"
    if isinstance(s, (Load, Store)):
        place = f"{s.buffer}[{s.offset}{f' .. +{s.lanes}' if s.lanes > 1 else ''}]"
        when = "".join(f" {word} {e}" for word, e in (("if", s.guard), ("first", s.count)) if e is not None)
        return (
            f"{s.name} = {place}{when}" if isinstance(s, Load) else f"{place} {'+' * s.adds}= {s.value}{when}"
        )
    if isinstance(s, Place):
        return (
            f"{s.name} = {s.index} * {s.step} if "
            f"{'' if s.guard is None else f'{s.guard} and '}{s.index} in {s.extent} else {s.missing}"
        )
    if isinstance(s, Uniform):
        return (
            f"{s.name} = {s.law} {', '.join(s.walk) or s.stream} at "
            f"{s.offset}{f' .. +{s.lanes}' if s.lanes > 1 else ''}"
        )
    if isinstance(s, Draw):
        return f"{s.name}[] = {s.count} of uniform {s.stream} at {s.offset}"
    if isinstance(s, Compute):
        return f"{s.name} = {_call(s.symbol, [filled(a, s.operands) for a in s.arguments] or s.operands)}"
    if isinstance(s, For):
        return f"for {s.var} in {s.extent} ({s.bind}):"
    if isinstance(s, If):
        return f"if {s.condition}:"
    if isinstance(s, (Pack, Array)):
        return f"{s.ctype} {s.name}[{getattr(s, 'extent', s.lanes)}]"
    if isinstance(s, Scratch):
        return f"{s.ctype} {s.name}[] at {s.elements} * {s.bytes}"
    if isinstance(s, SetLane):
        return f"{s.name}[{s.lane}] = {s.value}"
    if isinstance(s, Barrier):
        return "barrier"
    if isinstance(s, AwaitCluster):
        return "wait until the blocks of the cluster have begun"
    if isinstance(s, FillTile):
        return f"{s.tile} = {s.columns} lines of {s.rows} at {s.buffer}[{s.offset}], {s.stride} apart"
    if isinstance(s, Accumulator):
        return f"{s.name}[{s.lanes}] := {s.identity}"
    if isinstance(s, Accumulate):
        now = f"{s.name}[{s.lane}]"
        return f"{now} := {_call(s.combine, (now, s.value, *s.others))}" + (
            f" if {s.guard}" if s.guard is not None else ""
        )
    if isinstance(s, Fetch):
        when = f" if {s.guard}" if s.guard is not None else ""
        return f"fetch {s.prefetched}[{s.place}] = {s.buffer}[{s.offset} .. +{s.lanes}]{when}"
    if isinstance(s, Hide):
        return f"forget what was computed from {s.name}"
    if isinstance(s, FetchGroup):
        return "wait for all but the last group" if s.wait else "end of a group"
    if isinstance(s, CooperativeSlots):
        return (
            f"{s.name} = {s.words} words of {s.memory} for part {s.part} of {s.parts}, "
            f"block set {s.block_set}, iteration {s.iteration}"
        )
    if isinstance(s, BlockScan):
        return f"{s.name} := {s.combine} up to each element, from {s.carry} on"
    if isinstance(s, tuple(_MET)):
        over = _MET[type(s)].format(s)
        return ", ".join(f"{t.name} := {t.combine}" for t in s.totals) + f" over {over}"
    raise TypeError(s)
