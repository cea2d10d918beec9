"""One call of a group as the planner sees it: argument descriptions, the leaf vector, and the decisions taken
on it.

In: what C++ knows of the arguments. Out: symbolic sizes with concrete values behind them. Whatever the
planner branches on goes through `decide`, which records the question with its answer; together these are the
*class* of the call, and C++ reuses the plan for every later call that answers all of them alike. Example:

    call = Call((TensorArg("float32", "cuda:0", (4, 8), (8, 1), 16),))
    call.decide(lt(call.size(0, 1), 128))   # True, and remembered
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Union

from . import size as sz
from .dtypes import DTYPES, DType
from .limits import Limit

#: Bytes; more is not told apart, here and in csrc_stubs/call/arguments.h.
MOST_ALIGNMENT = 64


@dataclass(frozen=True)
class TensorArg:
    """A tensor: dtype name, device (`cpu`, `cuda:0`), sizes and strides in elements, and `alignment`, the
    largest power of two up to `MOST_ALIGNMENT` that divides its address."""

    dtype: str
    device: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    alignment: int = MOST_ALIGNMENT

    def __str__(self) -> str:
        """`float32[4, 8] on cuda:0`, with the strides where they are not those of a dense tensor."""
        dense, step = True, 1
        for size, stride in zip(reversed(self.sizes), reversed(self.strides)):
            dense, step = dense and (size == 1 or stride == step), step * size
        strides = "" if dense else f" strides {list(self.strides)}"
        return f"{self.dtype}{list(self.sizes)}{strides} on {self.device}"

    @property
    def rank(self) -> int:
        return len(self.sizes)

    @property
    def element(self) -> DType:
        return DTYPES[self.dtype]


@dataclass(frozen=True)
class ScalarArg:
    """A Python number; `kind` is `bool`, `int`, `float` or `complex`. Only bools and ints have a value that a
    plan may depend on; `value` is None for the others."""

    kind: str
    value: bool | int | None = None

    def __str__(self) -> str:
        """`int 3`, `float`."""
        return self.kind if self.value is None else f"{self.kind} {self.value}"


@dataclass(frozen=True)
class ListArg:
    """A list of ints or bools (`kind` says which)."""

    kind: str
    values: tuple[int, ...]


@dataclass(frozen=True)
class OtherArg:
    """An argument, None or a string, whose whole value the plan depends on."""

    value: str | None


Arg = Union[TensorArg, ScalarArg, ListArg, OtherArg]


def leaves_of(arg: Arg) -> tuple[int, ...]:
    """The integers that an argument adds to the leaf vector, in the order that C++ gathers them: sizes,
    strides and alignment of a tensor; the value of a bool or int; the items of a list; nothing for others."""
    if isinstance(arg, TensorArg):
        return (*arg.sizes, *arg.strides, arg.alignment)
    if isinstance(arg, ScalarArg):
        return (int(arg.value),) if arg.kind in ("bool", "int") else ()
    if isinstance(arg, ListArg):
        return tuple(int(v) for v in arg.values)
    return ()


@dataclass
class Call:
    """Arguments, leaf vector, and the decisions so far (`Size` -> value, in order). `limits` are those of
    number arguments: (index of the argument, `Limit`), in order. Calls beyond them run unfused. `varies`:
    sizes were seen to differ from call to call, so that fewer and wider classes are better than kernels
    that fit one size exactly. `made_up`: so are the sizes, which need not fit one another."""

    args: tuple[Arg, ...]
    decisions: dict[sz.Size, int] = field(default_factory=dict)
    limits: dict[tuple[int, Limit], None] = field(default_factory=dict)
    varies: bool = False
    made_up: bool = False

    def __post_init__(self):
        self.leaves: list[int] = []
        self._first: list[int] = []
        self._results: dict[tuple, Any] = {}  # of functions that are `once_a_call`
        self._memo: dict[sz.Size, int] = {}
        for arg in self.args:
            self._first.append(len(self.leaves))
            self.leaves.extend(leaves_of(arg))

    def size(self, i: int, d: int) -> sz.Size:
        """Size of dim `d` of tensor argument `i`."""
        return sz.leaf(self._first[i] + d, f"size{i}_{d}")

    def stride(self, i: int, d: int) -> sz.Size:
        """Stride in elements of dim `d` of tensor argument `i`."""
        return sz.leaf(self._first[i] + self._rank(i) + d, f"stride{i}_{d}")

    def alignment(self, i: int) -> sz.Size:
        """Largest power of two up to `MOST_ALIGNMENT` that divides the address of tensor argument `i`, in
        bytes."""
        return sz.leaf(self._first[i] + 2 * self._rank(i), f"align{i}")

    def _rank(self, i: int) -> int:
        tensor = self.args[i]
        assert isinstance(tensor, TensorArg)
        return tensor.rank

    def item(self, i: int, k: int = 0) -> sz.Size:
        """Value of int or bool argument `i`, or item `k` of list argument `i`."""
        return sz.leaf(
            self._first[i] + k, f"int{i}" if isinstance(self.args[i], ScalarArg) else f"int{i}_{k}"
        )

    def value(self, size: sz.Size) -> int:
        """The value of `size` in this call, without making the class depend on it."""
        return sz.evaluate(size, self.leaves, self._memo)

    def decide(self, size: sz.Size | int) -> int:
        """The value of `size`, on which the plan depends from now on."""
        size = sz.as_size(size)
        value = self.value(size)
        if not size.is_const:
            self.decisions.setdefault(size, value)
        return value

    def remembered(self, function: Callable, arguments: tuple) -> Any:
        """`function(self, *arguments)`, computed once for equal arguments."""
        key = (function, arguments)
        found = self._results.get(key, self)  # one look-up: a Fusion of 1,000 ops takes time to hash
        if found is self:
            found = self._results[key] = function(self, *arguments)
        return found


def once_a_call(function: Callable) -> Callable:
    """A function of a call and of values that can be hashed, computed once for equal ones. It must depend on
    nothing else."""

    @wraps(function)
    def remembering(call: Call, *arguments):
        return call.remembered(function, arguments)

    return remembering
