"""The parameters of the row schedule, and what follows from them: threads, blocks and registers.

In: `RowParams`, which row_choice.py decides. Out: sizes of the launch, as formulas of the call's sizes, so
that one kernel serves many calls. Example: `block_shape` of rows of 1024 floats, with four float4 for each
thread, is 64 threads along a row.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..ir import size as sz
from ..ir.size import Size
from .machine import Machine
from .row_space import Rows

MAX_ROW_THREADS = 512  # threads of a row: with more, each would have too few registers
DATA_REGISTERS = 96  # registers of a thread for input and columns
PREFETCH_REGISTERS = 8  # more registers for columns, where shared memory holds the input
GPC = 16  # multiprocessors over which a cluster may extend, on any device that has clusters


@dataclass(frozen=True)
class RowParams:
    """Decisions of the row schedule."""

    vector: int  # elements per access
    unroll: int  # vectors of each tensor that a thread keeps, all of one row or (`multi_row`) one per row
    persistent: bool  # a row stays in registers from its first to its last use
    warp: int = 0  # threads of a short row, several of which share a block; 0 for longer rows
    multi_row: bool = False  # a thread works on several rows at the same time
    exact: bool = False  # the threads' vectors fill a row exactly, so that no bound is checked
    whole: bool = False  # every vector is all inside or all outside the row
    columns: int = 0  # how many reductions run over the other dims
    threads: int = 1  # of a block, at most
    across: int = 0  # of a row, where that is known; 0: as many as its length takes
    rows: int = 1  # of a block with columns, if a row has more than a warp
    cooperative: bool = False  # several blocks share a row; a thread has `rounds` * `unroll` vectors of it
    cluster: bool = False  # these blocks are a cluster
    pair: bool = False  # of two, for which any device has room on each pair of multiprocessors
    rounds: int = 1
    prefetched: bool = False  # shared memory fetches the next row while the threads work on one
    held: bool = False  # which the threads move to registers first, so that there is room for one row only
    resident: int = 0  # blocks that share a multiprocessor, if that matters
    wide: bool = False  # 64-bit indices
    in_float: bool = False  # a thread adds few elements per row, so float accumulation suffices

    @property
    def in_registers(self) -> bool:
        """Whether each cluster works on one row only, and keeps it in registers."""
        return self.cluster and not self.prefetched

    @property
    def goes_over_rows(self) -> bool:
        """Whether a block works on one row after the other."""
        return bool(self.columns) or self.held


def block_shape(extent: Size, params: RowParams, machine: Machine) -> tuple[Size, Size]:
    """Threads along a row, a power of two or a multiple of a warp, and rows of a block."""
    if not machine.has_threads:
        return sz.const(1), sz.const(1)
    vectors = sz.ceildiv(extent, params.vector)
    if params.cooperative or params.held:
        return sz.const(params.threads), sz.const(1)
    if params.warp:
        return sz.const(params.warp), sz.const(params.threads // params.warp)
    if params.across:
        return sz.const(params.across), sz.const(params.rows)
    across = sz.ceildiv(sz.ceildiv(vectors, 1 if params.multi_row else params.unroll), 32) * 32
    return sz.minimum(across, MAX_ROW_THREADS), sz.const(params.rows)


def blocks_per_row(rows: Rows, params: RowParams) -> Size:
    """Blocks that share a row."""
    return sz.ceildiv(rows.length, params.threads * params.vector * params.unroll * params.rounds)


def blocks_at_once(params: RowParams, machine: Machine) -> int:
    """Blocks that run at the same time."""
    return machine.multiprocessors * params.resident


def multiprocessors_of_cluster(machine: Machine) -> int:
    """Multiprocessors over which a cluster may extend."""
    return min(GPC, machine.multiprocessors)


def parts_of_all_rows(rows: Rows, params: RowParams, machine: Machine) -> Size:
    """Blocks (or sets of cooperative blocks) over which all rows are distributed: as many as run at the same
    time, if each gets at least two iterations. Where some rows have columns of their own, it is the number of
    blocks for the rows that are added up to one row of columns."""
    if rows.apart:
        _, down = block_shape(rows.length, params, machine)
        stripes = sz.ceildiv(rows.count_apart, down)
        side_by_side = sz.maximum(1, sz.binary("div", blocks_at_once(params, machine), stripes))
        return sz.minimum(sz.ceildiv(rows.count_added, 2), side_by_side)
    if params.cluster and not params.pair:
        own = multiprocessors_of_cluster(machine)
        clusters = sz.binary("div", own * params.resident, blocks_per_row(rows, params))
        return sz.minimum(rows.count, clusters * (machine.multiprocessors // own))
    if params.cooperative:
        return sz.minimum(
            rows.count, sz.binary("div", blocks_at_once(params, machine), blocks_per_row(rows, params))
        )
    if params.held:
        return sz.minimum(rows.count, blocks_at_once(params, machine))
    _, down = block_shape(rows.length, params, machine)
    each = down * params.unroll if params.multi_row else down
    return sz.minimum(sz.ceildiv(rows.count, each * 2), blocks_at_once(params, machine))


def fits(rows: Rows, params: RowParams) -> bool:
    """Whether registers and shared memory hold a row, and the sums of columns."""
    return params.persistent and (
        not params.columns
        or params.cooperative
        or registers_held(rows, params) <= DATA_REGISTERS + PREFETCH_REGISTERS * params.prefetched
    )


def registers_held(rows: Rows, params: RowParams) -> int:
    """Registers of a thread for its part of its rows and what it keeps of them, for the sums of columns, and
    for tensors that all rows share."""
    deep, along = (params.unroll, 1) if params.multi_row else (1, params.unroll)
    kept, common = 4 * rows.kept, 4 * params.columns + 4
    if params.prefetched:  # vectors are taken from shared memory one after the other
        return params.vector * (along * (kept + common) + rows.bytes) // 4
    return params.vector * along * (deep * (rows.bytes + kept) + common) // 4
