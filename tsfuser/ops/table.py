"""One row an op, and how rows are made.

In: an operator kind and overload name, `find("aten::add", "Tensor")`. Out: a `Row`, from which follow the
ops' parse (`build`), its support at partition time (`refusal`), result dtypes and ranks (`infer`), its docs
line and its test. Example of a row:

    unary("sinh", "sinh({0})", FLOAT)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from ..errors import Refusal
from ..ir.build import Builder
from ..ir.call import Arg, Call, ScalarArg, TensorArg
from ..ir.dtypes import DTYPES, FLOAT, DType
from ..ir.fusion import Empty, Value
from . import without_row


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


class _Unknown:
    """The type of `UNKNOWN`."""

    def __repr__(self) -> str:
        return "UNKNOWN"


UNKNOWN = _Unknown()  #: a `NodeArg.constant` that is only known at run time

_SCALAR_TYPES = {d.code: d for d in DTYPES.values()}


def scalar_type(code: int) -> DType:
    """The dtype that TorchScript writes as the integer `code` (c10::ScalarType). Raises Refusal for those
    that no kernel has."""
    if code not in _SCALAR_TYPES:
        raise Refusal(f"dtype number {code} is not supported")
    return _SCALAR_TYPES[code]


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


@dataclass(frozen=True)
class Row:
    """One op.

    `name` is the operator kind and `overloads` the overload names served. `dtypes` are accepted for its
    tensor operands. `evaluate(builder, **args)` gives its value or tuple of values; arguments come by their
    names in the torch schema: a tensor or a number as a `Value` (None if absent), a *structural* one
    (`structural` holds their names: those annotated in the function) as a plain Python value, and one in
    `symbolic` (ints and int lists whose values need not be part of the class) as `Size`s. `sizes` says what
    the result's sizes are, for several results one word each: `broadcast` of the tensor operands, those of
    the `first` or of the argument named, these as `reduced` by the arguments `dim` and `keepdim`, `squeezed`,
    `unsqueezed`, `permuted`, `viewed`, `flattened`, `padded` or `joined`, or `own`. `text` is its docs line.
    Arguments in `fixed` must be constants of the graph: most calls would be refused otherwise; those in
    `only` must be these. Those in `ignored` are tensors that other implementations look at; the function gets
    None for them. Those in `unguarded` are tensors of other dtypes and ranks in other calls. `writes` holds
    pairs: a tensor argument that the op changes in place though its schema does not say so, and the bool
    argument without which it does not. `rank_depends_on_sizes`: the rank of the result depends on which sizes
    are 1. A view that `reshapes` splits and merges dims. `table`: the arguments that are read at places which
    another one holds. They have to be in memory: they are no results of the op's own group. `places`: the
    argument that holds places, whose dtypes are int32 and int64. `picked`: the one dim of the first table
    whose places these are, a number or the name of an argument. If the places are few, a group may compute
    the elements of the table there (grouping/lookups.py). `along`: the argument, a dim, along which elements
    of the result depend on one another; along all others they do not. `not_empty`: the first operand must
    have elements. `left(device, *sizes)` gets the device, and the profiled sizes of the tensor operands and
    of the result: the reason to leave the op to torch, or None.

    Facts that graph passes and the extension ask for:
    `smooth`: each element of the result is a continuous function of elements of the operands, so that the
    backward may compute it again. `jumps`: each element of the result depends on the same
    elements of the operands, and jumps somewhere if an operand other than a gradient moves. `selects`:
    elements of the result may be elements of an operand, or their magnitudes, perhaps from other places.
    `keeps_dtype`: of one floating tensor and real numbers the result has that tensor's dtype. `dtype_rule`:
    how dtype and device of the result follow from those of tensor operands, whatever they are: "first" (those
    of the first one), "promoted" (what the first two promote to), or "".
    `dtype_from`: a tensor argument that is used only for its dtype, which the result has.
    `derivative`: eager's, where autodiff's formula differs from it in some corner; first the op, then those
    ops of that formula whose last operands are the numbers that the op takes.
    `gradient`: "strict" if its derivative in autodiff asks for a gradient of the result's dtype and saves a
    tensor of that dtype, "cast" if its derivative gives the operand's dtype, whatever it gets. `flat`: it
    passes no gradient on to its operands. `without_gradient`: the numbers of its results that have none, in
    eager. `asked`: a tensor argument of which it reads no elements, but only
    the sizes, dtype, device or layout.
    `identity`: by the kind of the dtype (`f`, `i`), the second operand that leaves the first as it is, bit
    for bit. `fresh`: the result never shares memory with a tensor that was there before, whatever the
    arguments. `secret_view`: it may return its operand itself, though its schema does not say so.
    `in_place_early`: its in-place form becomes functional before any dtype is known. `in_place_differs`: the
    in-place form leaves another layout than this op gives. `copies`: it does nothing but copy its first
    operand. `moves`: in all overloads its result has elements of its first operand, and besides these at
    most a constant: it has the dtype and the device of that operand. `needs_kernel`: outside of groups it is
    slow. `slow_on_gpu`: dtypes of its operand for which it is slow on a GPU. `autodiff_excludes`: a view that
    torch's autodiff differentiates, but keeps out of its graphs. `instead` continues the sentence
    "TorchScript's autodiff knows no derivative of ..." with what it does know.

    A fact that tests ask for: `error`, what the rounding error of the op's formula is relative to. It is the
    `result`, or the `operands` where the formula cancels, or `contracted` where it does and eager's kernel
    may fuse a product with a sum besides, so that only one of the two overflows in between.
    """

    name: str
    overloads: tuple[str, ...]
    dtypes: tuple[str, ...]
    evaluate: Callable = field(repr=False, compare=False)
    sizes: str | tuple[str, ...]
    family: str
    text: str
    structural: frozenset[str] = frozenset()
    symbolic: frozenset[str] = frozenset()
    fixed: frozenset[str] = frozenset()
    only: Mapping[str, Any] = field(default_factory=dict, compare=False)
    ignored: frozenset[str] = frozenset()
    unguarded: frozenset[str] = frozenset()
    writes: tuple[tuple[str, str], ...] = ()
    rank_depends_on_sizes: bool = False
    reshapes: bool = False
    table: str = ""
    places: str = ""
    picked: int | str = ""
    along: str = ""
    not_empty: bool = False
    left: Callable[..., str | None] | None = field(default=None, compare=False)
    smooth: bool = False
    jumps: bool = False
    selects: bool = False
    keeps_dtype: bool = False
    dtype_rule: str = ""
    dtype_from: str = ""
    derivative: tuple[str, ...] = ()
    gradient: str = ""
    flat: bool = False
    without_gradient: tuple[int, ...] = ()
    asked: str = ""
    identity: Mapping[str, float] = field(default_factory=dict, compare=False)
    fresh: bool = True
    secret_view: bool = False
    in_place_early: bool = False
    in_place_differs: bool = False
    copies: bool = False
    moves: bool = False
    needs_kernel: bool = False
    slow_on_gpu: tuple[str, ...] = ()
    autodiff_excludes: bool = False
    instead: str = ""
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
                    self._accept(name, arg.dtype.name)
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
        described = tuple(sorted((name, _frozen(arg)) for name, arg in args.items()))
        device = device or "cuda:0"
        alike = tuple((name, self._with_any_number(name, arg)) for name, arg in described)
        if alike != described:
            result, has_limits = _infer(self, alike, device, default, eager)
            if isinstance(result, tuple) and not has_limits:
                return result, not any(arg.is_usual for _, arg in alike)
        return _infer(self, described, device, default, eager)[0], not any(
            arg.is_usual for _, arg in described
        )

    def _with_any_number(self, name: str, arg: NodeArg) -> NodeArg:
        """The argument, of which nothing but the type is known where it is a float of usual size: a row that
        takes any number takes this one."""
        fixed = name in self.fixed or name in self.structural | self.symbolic
        return _ANY_FLOAT if arg.is_usual and not fixed else arg

    def _accept(self, name: str, dtype: str) -> None:
        if dtype not in (PLACES if name == self.places else self.dtypes):
            mask = name == self.places and dtype in MASKS
            why = ": the sizes of what a mask selects depend on its elements" if mask else ""
            raise Refusal(f"{self.name} with a {dtype} `{name}` is not supported{why}")


_ANY_FLOAT = NodeArg("number", "float")


def _frozen(arg: NodeArg) -> NodeArg:
    return replace(arg, constant=tuple(arg.constant)) if isinstance(arg.constant, list) else arg


#: cache: what trial builds of tsfuser's own rows have given, in this process or in one before it
#: (planning/stored_trials.py), by `_trial_key`.
OUTCOMES: dict[str, tuple] = {}
_MOST_OUTCOMES = 8192
_own: dict[int, Row] = {}  # registry: by id, the rows that tsfuser itself has made


def own_all() -> None:
    """Says that all rows that there are by now are tsfuser's own: its version tells what they do."""
    _own.update((id(row), row) for row in _rows.values())


def _trial_key(row: Row, args: tuple[tuple[str, NodeArg], ...], device: str, default: DType) -> str:
    """All that an outcome depends on, besides the code."""
    given = "; ".join(f"{name}: {_described(arg)}" for name, arg in args)
    return f"{row.name} {row.overloads} on {device}, {default.name}: {given}"


def _described(arg: NodeArg) -> str:
    items = ", ".join(map(_described, arg.items))
    return f"{arg.kind} {arg.dtype} {arg.rank} {arg.constant!r} [{items}]"


@lru_cache(maxsize=8192)
def _infer(row: Row, args: tuple[tuple[str, NodeArg], ...], device: str, default: DType, eager):
    """The result of `Row.infer`, and whether numbers have limits there."""
    if eager is not None or _own.get(id(row)) is not row:
        return _tried(row, args, device, default, eager)
    key = _trial_key(row, args, device, default)
    outcome = OUTCOMES.get(key)
    if outcome is None:
        outcome = _tried(row, args, device, default, None)
        if len(OUTCOMES) < _MOST_OUTCOMES:
            OUTCOMES[key] = outcome
    return outcome


def _tried(
    row: Row, args: tuple[tuple[str, NodeArg], ...], device: str, default: DType, eager
) -> tuple[tuple[tuple[str, int | None] | None, ...] | str | None, bool]:
    """The same, by a trial."""
    try:
        for name, arg in args:
            for tensor in arg.tensors if name not in row.ignored else ():
                if tensor.dtype is not None:
                    row._accept(name, tensor.dtype)
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


def _small(tensor: NodeArg, device: str) -> TensorArg:
    """A tensor of that dtype and rank with dims of size 2."""
    strides = tuple(2**d for d in reversed(range(tensor.rank)))
    return TensorArg(tensor.dtype, device, (2,) * tensor.rank, strides)


#: Arguments that repeat sizes of the first operand.
_OWN_SIZES = ("normalized_shape",)


def _trial(row: Row, args, device: str, default: DType, eager) -> tuple[Builder, dict[str, Any]] | None:
    """A builder and the row's arguments in it; None if something needed is unknown."""
    described: list[Arg] = []
    build_args: dict[str, Any] = {}
    for name, arg in args:
        if name in row.ignored:
            build_args[name] = lambda b: None
        elif arg.kind in ("tensor", "tensors"):
            if any(tensor.dtype is None or tensor.rank is None for tensor in arg.tensors):
                return None
            first = len(described)
            described += [_small(tensor, device) for tensor in arg.tensors]
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
    builder = Builder(Call(tuple(described)), device, default, eager)
    return builder, {name: make(builder) for name, make in build_args.items()}


_rows: dict[tuple[str, str], Row] = {}  # registry: (kind, overload) -> row


def find(kind: str, overload: str = "") -> Row | None:
    """The row of an operator, e.g. `find("aten::add", "Tensor")`."""
    return _rows.get((kind, overload))


def all_rows() -> Iterator[Row]:
    """Each row once, in the order of the files."""
    yield from dict.fromkeys(_rows.values())


def kinds_with_sizes(rule: str) -> list[str]:
    """Ops whose first result, of whatever overload, has sizes by that rule."""
    rules: dict[str, set[str]] = {}
    for row in all_rows():
        rules.setdefault(row.name, set()).add(row.sizes if isinstance(row.sizes, str) else row.sizes[0])
    return [name for name, found in rules.items() if found == {rule}]


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
