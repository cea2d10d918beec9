"""The Plan: all that C++ knows of a class of calls.

In: sizes as expressions, kernels, results. Out: a `Plan` of plain tuples, whose sizes are positions in one
*values* array: the call's leaves first, then one result an instruction. `str(plan)` shows allocations, grids,
blocks and arguments; `repr(plan)` is code: `read(repr(plan)) == plan`. Example of a program: `("mul", 0, 1),
("ceildiv", 6, 7)`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from .. import _C
from ..ir import statements
from ..ir.call import Call
from ..ir.limits import Limit
from ..ir.size import Size, as_size

MOST_DEAD_INPUTS: int = _C.most_dead_inputs  # of a group, that can give their memory to results


@dataclass(frozen=True)
class Launch:
    """One kernel launch: positions of its launch sizes, and how to fill its `args_bytes` of arguments:
    (offset, kind, index). `cluster`: the position of the number of blocks of a cluster, -1 where there are no
    clusters. `batch_capacity`: how many such launches one
    batched launch of its kernel replaces at most, 0 if its kernel is not batched."""

    kind: str
    function: int
    name: str
    grid: int
    block_x: int
    block_y: int
    shared: int
    grain: int
    args_bytes: int
    args: tuple[tuple[int, str, int], ...]
    cluster: int = -1
    batch_capacity: int = 0


@dataclass(frozen=True)
class Plan:
    """`checks`: (k, position, expected): after k instructions the value must be as expected, or the plan does
    not serve the call. A plan with a `refusal` sends its calls to the fallback. `random`: how many random ops
    each call makes, 0 for none; where their numbers are to be eager's, `drawn` is the position of the Philox
    blocks that they take, else -1. `updates`: the arguments whose memory kernels write, and whether their
    version counts it. `limits`: the arguments that have to be within a limit; calls beyond run unfused.
    `rooms`: the allocations with zeros behind a dim (`Room` in ir/layout.py), the position of the number of
    elements of their memory, and that dim. `reuses`: an allocation, the argument in whose memory it may lie,
    and the positions that `schedule.Reuse` calls `alike`. `sources`: digests of the kernels' sources, launch
    by launch."""

    leaf_count: int
    instructions: tuple[tuple[str, int, int], ...] = ()
    checks: tuple[tuple[int, int, int], ...] = ()
    allocations: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...] = ()
    launches: tuple[Launch, ...] = ()
    results: tuple[tuple[str, int], ...] = ()
    refusal: str = ""
    random: int = 0
    updates: tuple[tuple[int, bool], ...] = ()
    drawn: int = -1
    limits: tuple[tuple[int, Limit], ...] = ()
    reuses: tuple[tuple[int, int, tuple[tuple[int, int, int], ...]], ...] = ()
    rooms: tuple[tuple[int, int, int], ...] = ()
    keepalive: object = field(default=None, repr=False, compare=False)
    sources: tuple[str, ...] = field(default=(), repr=False, compare=False)
    describe: Callable[[], str] | None = field(default=None, repr=False, compare=False)

    def __str__(self) -> str:
        if self.describe:
            return self.describe()
        return f"refused: {self.refusal}" if self.refusal else repr(self)


def read(text: str) -> Plan:
    """The Plan that `repr` has printed, without its kernels' memory. Raises SyntaxError, with the line and
    the reason, where it is not such code."""
    names = {"Plan": Plan, "Launch": Launch, "Limit": Limit, "inf": float("inf")}
    return statements.record(f"plan = {text}", Plan, names)


def verify(plan: Plan) -> str | None:
    """None if `plan` is well-formed: every position, argument and allocation that it names is there. C++ asks
    the same before it takes a plan."""
    try:
        native(plan)
    except ValueError as error:
        return str(error)
    except TypeError:  # pybind11 names no field
        return "one of its numbers is too large, or negative where it cannot be"
    return None


def native(plan: Plan) -> _C.Plan:
    """The plan as C++ takes it."""
    launches = [
        _C.Launch(
            x.kind,
            x.function,
            x.name,
            x.grid,
            x.block_x,
            x.block_y,
            x.shared,
            x.grain,
            x.args_bytes,
            list(x.args),
            x.cluster,
            x.batch_capacity,
        )
        for x in plan.launches
    ]
    limits = [(index, (x.low, x.high), (x.least, x.most), x.nan, x.infinite) for index, x in plan.limits]
    return _C.Plan(plan.leaf_count, list(plan.instructions), list(plan.checks), list(plan.allocations),
                   launches, list(plan.results), plan.refusal,
                   plan.keepalive, plan.random, list(plan.updates), plan.drawn, limits,
                   list(plan.reuses), list(plan.rooms))  # fmt: skip


class Program:
    """Instructions as they are collected; the same expression is computed once."""

    def __init__(self, call: Call):
        self.call = call
        self.instructions: list[tuple[str, int, int]] = []
        self.checks: list[tuple[int, int, int]] = []
        self._positions: dict[Size, int] = {}

    def check_decisions(self) -> None:
        """Adds every decision of the call as a check, in the order they were taken."""
        for size, value in self.call.decisions.items():
            if size.op == "eq" and value == 1 and size.b.is_const:  # x == 4 holds: look at x itself
                size, value = size.a, size.b.a
            position = self.position(size)
            self.checks.append((len(self.instructions), position, value))

    def position(self, size: Size | int) -> int:
        """Where the value of `size` is found, adding instructions as needed. Iterative: expressions may be
        deep."""
        size = as_size(size)
        stack = [size]
        while stack:
            node = stack[-1]
            if node in self._positions:
                stack.pop()
            elif node.op == "leaf":
                self._positions[node] = node.a
            elif node.op == "const":
                self._add(node, ("const", node.a, 0))
            else:
                pending = [x for x in (node.a, node.b) if x not in self._positions]
                if pending:
                    stack.extend(pending)
                else:
                    self._add(node, (node.op, self._positions[node.a], self._positions[node.b]))
        return self._positions[size]

    def _add(self, node: Size, instruction: tuple[str, int, int]) -> None:
        self._positions[node] = len(self.call.leaves) + len(self.instructions)
        self.instructions.append(instruction)


def refused(call: Call, reason: str) -> Plan:
    """The plan of a class of calls that runs unfused; the class is what had been decided when the reason
    turned up."""
    program = Program(call)
    program.check_decisions()
    return Plan(len(call.leaves), tuple(program.instructions), tuple(program.checks), refusal=reason)
