"""What a row says of a node before sizes are known: dtypes and ranks of its results, or why it is refused.

In: a row, and a node's arguments as the graph tells them: `{"self": NodeArg("tensor", "float32", 2)}`. Out:
`(("float32", 2),)`, from a build of the row over small tensors, whose outcome is kept.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from ..errors import Refusal
from ..ir.build import Builder
from ..ir.call import Arg, Call, ScalarArg, TensorArg
from ..ir.dtypes import DType
from ..ir.fusion import Empty, Value

Row = Any  # that of table.py, which imports this file


class _Unknown:
    """The type of `UNKNOWN`."""

    def __repr__(self) -> str:
        return "UNKNOWN"


UNKNOWN = _Unknown()  #: a `NodeArg.constant` that is only known at run time


@dataclass(frozen=True)
class NodeArg:
    """What is known of an operator's argument while the graph is partitioned.

    `kind` is `tensor`, `tensors` (a list of the `items`, tensors or None), `number` (bool, int, float or
    complex, also where it is structural), `list`, `none`, `string` or `other`. `dtype` is a dtype's name for
    a tensor and `bool`, `int`, `float` or `complex` for a number; None where unknown. `constant` is the value
    (lists as tuples), if it is known. The `rank` of a list says how many items it has.
    """

    kind: str
    dtype: str | None = None
    rank: int | None = None
    constant: Any = UNKNOWN
    items: tuple[NodeArg, ...] = ()

    @property
    def tensors(self) -> tuple[NodeArg, ...]:
        """The tensors that it is, or holds."""
        return (self,) if self.kind == "tensor" else tuple(x for x in self.items if x.kind == "tensor")

    @property
    def is_usual(self) -> bool:
        """Whether it is a known float of usual size. Most rows take all of these, so that thousands of
        constants are one trial (`Row.outcome`)."""
        return isinstance(self.constant, float) and self.kind == "number" and 1e-6 < abs(self.constant) < 1e6


ANY_FLOAT = NodeArg("number", "float")


def frozen(arg: NodeArg) -> NodeArg:
    return replace(arg, constant=tuple(arg.constant)) if isinstance(arg.constant, list) else arg


#: cache: the outcomes of trial builds of tsfuser's own rows, in this process or in one before it
#: (planning/stored_trials.py), by `_trial_key`.
OUTCOMES: dict[str, tuple] = {}
_MOST_OUTCOMES = 8192
_own: dict[int, Row] = {}  # registry: by id, the rows of tsfuser itself


def own(rows: Iterable[Row]) -> None:
    """Says that these rows are tsfuser's own: its version tells what they do."""
    _own.update((id(row), row) for row in rows)


def _trial_key(row: Row, args: tuple[tuple[str, NodeArg], ...], device: str, default: DType) -> str:
    """All that an outcome depends on, besides the code."""
    given = "; ".join(f"{name}: {_described(arg)}" for name, arg in args)
    return f"{row.name} {row.overloads} on {device}, {default.name}: {given}"


def _described(arg: NodeArg) -> str:
    items = ", ".join(map(_described, arg.items))
    return f"{arg.kind} {arg.dtype} {arg.rank} {arg.constant!r} [{items}]"


@lru_cache(maxsize=8192)
def infer(row: Row, args: tuple[tuple[str, NodeArg], ...], device: str, default: DType, eager):
    """The result of `Row.infer`, and whether numbers have limits there."""
    if eager is not None or _own.get(id(row)) is not row:
        return try_(row, args, device, default, eager)
    key = _trial_key(row, args, device, default)
    outcome = OUTCOMES.get(key)
    if outcome is None:
        outcome = try_(row, args, device, default, None)
        if len(OUTCOMES) < _MOST_OUTCOMES:
            OUTCOMES[key] = outcome
    return outcome


def try_(
    row: Row, args: tuple[tuple[str, NodeArg], ...], device: str, default: DType, eager
) -> tuple[tuple[tuple[str, int | None] | None, ...] | str | None, bool]:
    """The same, by a trial build."""
    try:
        for name, arg in args:
            for tensor in arg.tensors if name not in row.ignored else ():
                if tensor.dtype is not None:
                    row.accept(name, tensor.dtype)
            if name in row.fixed and arg.kind != "none" and arg.constant is UNKNOWN:
                raise Refusal(f"`{name}` of {row.name} is not a constant")
            if name in row.only and arg.constant != row.only[name]:
                raise Refusal(f"{row.name} is fused with {name}={row.only[name]!r} only")
        if row.reshapes and "other" in dict(args):
            return _reshaped_as(dict(args)), False
        trial = _trial(row, args, device, default, eager)
        if trial is None:
            return None, False
        builder, values = trial
        results = row.build(builder, **values)
    except Refusal as refusal:
        return str(refusal), False
    results = results if isinstance(results, tuple) else (results,)
    kinds = tuple(_kind_of_result(result, row.rank_depends_on_sizes) for result in results)
    return kinds, bool(builder.call.limits)


def _reshaped_as(args: dict[str, NodeArg]) -> tuple[tuple[str, int], ...] | None:
    """What `view_as` gives: made-up sizes of its operands do not fit each other."""
    dtype, rank = args["self"].dtype, args["other"].rank
    return None if dtype is None or rank is None else ((dtype, rank),)


def _kind_of_result(
    result: Value | Empty | int | None, rank_depends_on_sizes: bool
) -> tuple[str, int | None] | None:
    if isinstance(result, Value):
        return result.dtype.name, None if rank_depends_on_sizes else len(result.dims)
    return (result.dtype.name, 1) if isinstance(result, Empty) else None


def _small(tensor: NodeArg, device: str, size: int) -> TensorArg:
    """A tensor of that dtype and rank with dims of that size."""
    strides = tuple(size**d for d in reversed(range(tensor.rank)))
    return TensorArg(tensor.dtype, device, (size,) * tensor.rank, strides)


#: Arguments that repeat sizes of the first operand.
_OWN_SIZES = ("normalized_shape",)
#: Arguments that a size of the first operand must reach.
_REACHED = ("k",)


def _trial(row: Row, args, device: str, default: DType, eager) -> tuple[Builder, dict[str, Any]] | None:
    """A builder and the row's arguments in it; None if something needed is unknown."""
    described: list[Arg] = []
    build_args: dict[str, Any] = {}
    size = max(
        [2, *(arg.constant for name, arg in args if name in _REACHED and isinstance(arg.constant, int))]
    )
    for name, arg in args:
        if name in row.ignored:
            build_args[name] = lambda b: None
        elif arg.kind in ("tensor", "tensors"):
            if any(tensor.dtype is None or tensor.rank is None for tensor in arg.tensors):
                return None
            first = len(described)
            described += [_small(tensor, device, size) for tensor in arg.tensors]
            if arg.kind == "tensor":
                build_args[name] = lambda b, i=first: b.tensor(i)
            else:
                numbers = iter(range(first, len(described)))
                at = [next(numbers) if item.kind == "tensor" else None for item in arg.items]
                build_args[name] = lambda b, at=at: [None if i is None else b.tensor(i) for i in at]
        elif arg.kind == "number" and name not in row.structural | row.symbolic:
            if arg.constant is not UNKNOWN:
                build_args[name] = lambda b, value=arg.constant: b.literal(value)
            elif arg.dtype is None:
                return None
            else:
                described.append(ScalarArg(arg.dtype, 0 if arg.dtype in ("bool", "int") else None))
                build_args[name] = lambda b, i=len(described) - 1: b.number(i)
        elif arg.kind == "none":
            build_args[name] = lambda b: None
        elif name not in row.structural and name not in row.symbolic:
            return None  # of a type that the graph leaves open
        elif name in row.symbolic and name in _OWN_SIZES and arg.rank is not None:
            build_args[name] = lambda b, count=arg.rank: [2] * count
        elif arg.constant is UNKNOWN or name in row.symbolic:
            return None
        else:
            build_args[name] = lambda b, value=arg.constant: value
    builder = Builder(Call(tuple(described), made_up=True), device, default, eager)
    return builder, {name: make(builder) for name, make in build_args.items()}
