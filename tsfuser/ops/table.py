"""One row an op, and how rows are made.

In: an operator kind and overload name, `find("aten::add", "Tensor")`. Out: a `Row`, from which follow the
ops' parse (`build`), its support at partition time (`refusal`), result dtypes and ranks (`infer`), its docs
line and its test. Example of a row:

    unary("sinh", "sinh({0})", FLOAT)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import Refusal
from ..ir.build import Builder
from ..ir.dtypes import DTYPES, FLOAT, DType
from ..ir.fusion import Value
from . import trials, without_row
from .trials import NodeArg


def _names(kind: str) -> tuple[str, ...]:
    """Those of a kind that torch computes in."""
    return tuple([d.name for d in DTYPES.values() if d.kind == kind and d.computes])


BOOLEAN, INTEGRAL, FLOATING, COMPLEX = map(_names, "bifc")
PLACES = ("int32", "int64")
MASKS = ("bool", "uint8")  # that `x[mask]` takes
NUMERIC = INTEGRAL + FLOATING
REAL = BOOLEAN + NUMERIC
ALL = REAL + COMPLEX
_STORED = tuple([d for d in DTYPES.values() if not d.computes])
CONVERTED = ALL + tuple([d.name for d in _STORED if d.converts])  #: those that torch copies, and casts
FLOAT8 = tuple([d.name for d in _STORED if d.kind == "f"])


_SCALAR_TYPES = {d.code: d for d in DTYPES.values()}


def scalar_type(code: int) -> DType:
    """The dtype that TorchScript writes as the integer `code` (c10::ScalarType). Raises Refusal for those
    that no kernel has."""
    if code not in _SCALAR_TYPES:
        raise Refusal(f"dtype number {code} is not supported")
    return _SCALAR_TYPES[code]


@dataclass(frozen=True)
class Row:
    """One op: how it is built, which calls of it are served, and the facts that graph passes, the extension
    and tests ask for."""

    # ---- what it is

    #: the operator kind, such as "aten::add"
    name: str
    #: the overload names that are served
    overloads: tuple[str, ...]
    #: those that its tensor operands may have
    dtypes: tuple[str, ...]
    #: `evaluate(builder, **args)` gives its value or tuple of values. Arguments come by their names in the
    #: torch schema: a tensor or a number as a `Value` (None if absent), one in `structural` as a plain Python
    #: value, one in `symbolic` as `Size`s.
    evaluate: Callable = field(repr=False, compare=False)
    #: the result's sizes, a word for each of several results: `broadcast` of the tensor operands, those of
    #: the `first` or of the argument named, these as `reduced` by the arguments `dim` and `keepdim`,
    #: `squeezed`, `unsqueezed`, `permuted`, `viewed`, `flattened`, `padded` or `joined`, or `own`
    sizes: str | tuple[str, ...]
    #: the file in tsfuser/ops that has the row
    family: str
    #: its line in docs/ops.md
    text: str

    # ---- its arguments, by name

    #: those that are part of the class of a call; they are annotated in the function
    structural: frozenset[str] = frozenset()
    #: ints and lists of ints whose values need not be part of the class
    symbolic: frozenset[str] = frozenset()
    #: those that must be constants of the graph: most calls would be refused otherwise
    fixed: frozenset[str] = frozenset()
    #: those that must have this value
    only: Mapping[str, Any] = field(default_factory=dict, compare=False)
    #: tensors that other implementations look at; the function gets None for them
    ignored: frozenset[str] = frozenset()
    #: tensors that may have another dtype and rank in another call
    unguarded: frozenset[str] = frozenset()
    #: pairs: a tensor that the op changes in place though its schema does not say so, and the bool argument
    #: that switches this on
    writes: tuple[tuple[str, str], ...] = ()
    #: the rank of the result depends on which sizes are 1
    rank_depends_on_sizes: bool = False
    #: a view that splits and merges dims
    reshapes: bool = False
    #: the argument that is read at indices. It must be in memory: no result of the op's own group.
    table: str = ""
    #: the argument that holds the indices, int32 or int64
    places: str = ""
    #: the one dim of `table` that is indexed: a number, or the name of the argument that says it. Where the
    #: indices are few, a group may compute the indexed elements of the table (grouping/lookups.py).
    picked: int | str = ""
    #: the dim along which elements of the result depend on one another; along all others they do not
    along: str = ""
    #: the first operand must have elements
    not_empty: bool = False
    #: `left(device, *sizes)` gets the profiled sizes of the tensor operands and of the result, and returns
    #: the reason to leave the op to torch, or None
    left: Callable[..., str | None] | None = field(default=None, compare=False)
    #: the same where sizes are not known, of the arguments by name
    left_unsized: Callable[[Mapping[str, NodeArg]], str | None] | None = field(default=None, compare=False)

    # ---- elements of the result

    #: each is a continuous function of elements of the operands, so that the backward may compute it again
    smooth: bool = False
    #: each depends on the same elements of the operands, and is discontinuous in an operand that is no
    #: gradient
    jumps: bool = False
    #: they may be elements of an operand, or their magnitudes, perhaps from other places
    selects: bool = False

    # ---- its dtype

    #: if the operands are one floating tensor and real numbers, the result has the dtype of the tensor
    keeps_dtype: bool = False
    #: how the dtype and the device follow from any tensor operands: "first" (those of the first one),
    #: "promoted" (from the first two), or ""
    dtype_rule: str = ""
    #: the tensor argument that is used only for its dtype, which the result has
    dtype_from: str = ""

    # ---- its derivative

    #: eager's, where autodiff's formula differs from it in some corner: first the op, then those ops of that
    #: formula whose last operands are the numbers that the op takes
    derivative: tuple[str, ...] = ()
    #: "strict" if autodiff's derivative asks for a gradient of the result's dtype and saves a tensor of that
    #: dtype, "cast" if it gives the operand's dtype whatever it gets
    gradient: str = ""
    #: no gradient passes on to its operands
    flat: bool = False
    #: the numbers of its results that have no gradient in eager
    without_gradient: tuple[int, ...] = ()
    #: the tensor argument that is used only for its sizes, dtype, device or layout
    asked: str = ""

    # ---- what rewrites rely on

    #: by the kind of the dtype (`f`, `i`), the second operand that leaves the first as it is, bit for bit
    identity: Mapping[str, float] = field(default_factory=dict, compare=False)
    #: the result never shares memory with a tensor that was there before, whatever the arguments
    fresh: bool = True
    #: it may return its operand itself, though its schema does not say so
    secret_view: bool = False
    #: its in-place form becomes functional before any dtype is known
    in_place_early: bool = False
    #: its in-place form leaves another layout than this op gives
    in_place_differs: bool = False
    #: it does nothing but copy its first operand
    copies: bool = False
    #: in all overloads the result has elements of the first operand and at most a constant besides, and that
    #: operand's dtype and device
    moves: bool = False
    #: it is slow outside of groups
    needs_kernel: bool = False
    #: the dtypes of its operand for which it is slow on a GPU
    slow_on_gpu: tuple[str, ...] = ()
    #: a view that torch's autodiff differentiates, but keeps out of its graphs
    autodiff_excludes: bool = False
    #: the end of the sentence "TorchScript's autodiff knows no derivative of ..."
    instead: str = ""

    # ---- for tests

    #: what the rounding error of its formula is relative to: the `result`, or the `operands` where the
    #: formula cancels, or `contracted` where it does and eager's kernel may fuse a product with a sum
    #: besides, so that only one of the two overflows in between
    error: str = "result"

    def __hash__(self) -> int:
        return hash((self.name, self.overloads))  # which are one row's

    @property
    def is_view(self) -> bool:
        """Whether eager's result shares the memory of the operand, so that it must not leave a group."""
        return self.family in ("views", "parts")

    @property
    def joins(self) -> bool:
        """Whether the op copies its operands into one tensor, and computes nothing."""
        return self.family == "joins"

    def build(self, builder: Builder, /, **args) -> Value | tuple[Value, ...]:
        """The op's value(s) in `builder`. Raises Refusal with the reason where it cannot be exactly what
        eager gives."""
        for name, given in args.items():
            for arg in given if isinstance(given, list) else [given]:
                if isinstance(arg, Value) and not arg.is_number:
                    self.accept(name, arg.dtype.name)
                elif isinstance(arg, Value) and arg.dtype.is_complex and COMPLEX[0] not in self.dtypes:
                    raise Refusal(f"{self.name} of a complex number is not supported")
        return self.evaluate(builder, **args)

    def refusal(
        self, args: dict[str, NodeArg], device: str = "cuda:0", eager: Callable | None = None
    ) -> str | None:
        """Why a node with these arguments cannot be fused; None if it can, or if too little is known to
        say. `eager` is that of a Builder."""
        result = self.infer(args, device, eager=eager)
        return result if isinstance(result, str) else None

    def infer(
        self,
        args: dict[str, NodeArg],
        device: str = "cuda:0",
        default: DType = FLOAT,
        eager: Callable | None = None,
    ) -> tuple[tuple[str, int | None], ...] | str | None:
        """Dtype name and rank (None: unknown) of each result: `(("float32", 2),)`, None for one that is no
        tensor; a string says why the node is refused; None: too little is known.

        A trial build of the row over a call with dims of size 2, so nothing is said twice.
        """
        return self.outcome(args, device, default, eager)[0]

    def outcome(
        self,
        args: dict[str, NodeArg],
        device: str = "cuda:0",
        default: DType = FLOAT,
        eager: Callable | None = None,
    ) -> tuple[tuple[tuple[str, int | None], ...] | str | None, bool]:
        """What `infer` says, and whether that holds with other floats of usual size, too."""
        described = tuple(sorted((name, trials.frozen(arg)) for name, arg in args.items()))
        device = device or "cuda:0"
        alike = tuple((name, self._with_any_number(name, arg)) for name, arg in described)
        if alike != described:
            result, has_limits = trials.infer(self, alike, device, default, eager)
            if isinstance(result, tuple) and not has_limits:
                return result, not any(arg.is_usual for _, arg in alike)
        return trials.infer(self, described, device, default, eager)[0], not any(
            arg.is_usual for _, arg in described
        )

    def _with_any_number(self, name: str, arg: NodeArg) -> NodeArg:
        """The argument; a float of usual size becomes one of unknown value, as a row that takes any number
        takes this one."""
        fixed = name in self.fixed or name in self.structural | self.symbolic
        return trials.ANY_FLOAT if arg.is_usual and not fixed else arg

    def accept(self, name: str, dtype: str) -> None:
        """Raises Refusal if the argument may not be a tensor of that dtype."""
        if dtype not in (PLACES if name == self.places else self.dtypes):
            mask = name == self.places and dtype in MASKS
            why = ": the size of a selection by a mask depends on the mask's elements" if mask else ""
            raise Refusal(f"{self.name} with a {dtype} `{name}` is not supported{why}")


_rows: dict[tuple[str, str], Row] = {}  # registry: (kind, overload) -> row


def find(kind: str, overload: str = "") -> Row | None:
    """The row of an operator, e.g. `find("aten::add", "Tensor")`."""
    return _rows.get((kind, overload))


def all_rows() -> Iterator[Row]:
    """Each row once, in the order of the files."""
    yield from dict.fromkeys(_rows.values())


def own_all() -> None:
    """Says that all rows that there are by now are tsfuser's own."""
    trials.own(_rows.values())


def kinds_with_sizes(rule: str) -> list[str]:
    """Ops whose first result, of whatever overload, has sizes by that rule."""
    rules: dict[str, set[str]] = {}
    for row in all_rows():
        rules.setdefault(row.name, set()).add(row.sizes if isinstance(row.sizes, str) else row.sizes[0])
    return [name for name, found in rules.items() if found == {rule}]


def kinds_with_known_rank() -> list[str]:
    """Ops whose first result has as many dims as follow from those of their operands alone."""
    rules = ("first", "broadcast", "permuted", "swapped", "unsqueezed", "padded", "sliced", "selected")
    pools = {row.name for row in all_rows() if row.family in ("pooling", "adaptive_pooling")}
    return sorted(pools.union(*map(kinds_with_sizes, rules)))


def kinds_with_dtype_rule(rule: str) -> list[str]:
    """Ops with that `dtype_rule`."""
    return sorted({row.name for row in all_rows() if row.dtype_rule == rule})


def kinds_with_gradient(fact: str) -> frozenset[str]:
    """Ops with that `gradient`."""
    return frozenset(row.name for row in all_rows() if row.gradient == fact)


def derivatives() -> dict[str, tuple[str, ...]]:
    """Op -> eager's derivative and whose numbers it takes, of those that autodiff has another formula of."""
    return {row.name: row.derivative for row in all_rows() if row.derivative}


def flat_kinds() -> list[str]:
    """Ops that pass no gradient on to their operands."""
    return [*{row.name: None for row in all_rows() if row.flat}, *sorted(without_row.FLAT)]


def asked_arguments() -> dict[str, str]:
    """Op -> the tensor argument of which it reads no elements."""
    names = {row.name: row.dtype_from or row.asked for row in all_rows() if row.dtype_from or row.asked}
    return names | dict.fromkeys(without_row.LIKE_SELF, "self")


def register(row: Row) -> None:
    """Adds a row; raises ValueError if an overload is taken."""
    for overload in row.overloads:
        if (row.name, overload) in _rows:
            raise ValueError(f"{row.name}.{overload} has two rows")
        _rows[row.name, overload] = row


def composite(
    name: str,
    *overloads: str,
    dtypes: Sequence[str] = REAL,
    sizes: str | tuple[str, ...] = "broadcast",
    **facts,
):
    """Makes the decorated function the row of `name`: `f(builder, **arguments by schema name)`. Annotate
    structural arguments; the first paragraph of the docstring becomes the docs line. `facts` are further
    fields of the `Row`. `composite` may be used several times on one function."""
    for several in ("symbolic", "fixed", "ignored", "unguarded"):
        facts[several] = frozenset(facts.get(several, ()))

    def decorate(function):
        parameters = list(inspect.signature(function).parameters.values())[1:]
        structural = {p.name for p in parameters if p.annotation is not p.empty} - facts["symbolic"]
        text = " ".join((inspect.getdoc(function) or "").partition("\n\n")[0].split())
        register(
            Row(
                name,
                overloads or ("",),
                tuple(dtypes),
                function,
                sizes,
                function.__module__.rpartition(".")[2],
                text,
                frozenset(structural),
                **facts,
            )
        )
        return function

    return decorate
