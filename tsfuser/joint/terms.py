"""Graph values that are written like tensors, so that a derivative reads like its formula.

In: the values of a `torch._C.Graph`. Out: new nodes before one place of it, with types. torch chooses the
overload, and what is not given has the schema's default. Example: with `x = Term(writer, value)`,

    x.sin() * 2    writes    %1 : Tensor = aten::sin(%x);  %2 : Tensor = aten::mul(%1, %two)
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch._C import FunctionSchema

from ..graph.rows import Knowledge
from ..graph.types import infer
from ..graph.wrapper import Facts, Graph, Node, Value, constant_before, facts, is_tensor, outputs, refine
from ..ir.dtypes import DTYPES
from ..ops.table import FLOATING

#: The numbers by which TorchScript names dtypes that have gradients.
DTYPE_NUMBERS = {name: DTYPES[name].code for name in FLOATING}


class Term:
    """A value: a tensor, a number, or a list. Methods and operators are those of torch.Tensor that are ATen
    ops, and write nodes; a comparison is a tensor, never a bool."""

    __slots__ = ("value", "writer")
    __hash__ = None

    def __init__(self, writer: Writer, value: Value):
        self.writer, self.value = writer, value

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **keywords: self.writer(f"aten::{name}", self, *args, **keywords)

    @property
    def facts(self) -> Facts:
        """Its dtype, device and rank, where known."""
        return facts(self.value.type())

    @property
    def is_tensor(self) -> bool:
        """Whether it is one; else it is a number or a list."""
        return is_tensor(self.value)

    @property
    def sizes(self) -> Term:
        """Its sizes, a list of ints."""
        return self.writer("aten::size", self)

    def __neg__(self) -> Term:
        return self.writer("aten::neg", self)

    # No overload takes a number and then a tensor.
    def _is_number_before(self, other) -> bool:
        return isinstance(other, Term) and other.is_tensor and not self.is_tensor

    def __add__(self, other) -> Term:
        return other + self if self._is_number_before(other) else self.writer("aten::add", self, other)

    def __sub__(self, other) -> Term:
        return (
            other.__rsub__(self) if self._is_number_before(other) else self.writer("aten::sub", self, other)
        )

    def __mul__(self, other) -> Term:
        return other * self if self._is_number_before(other) else self.writer("aten::mul", self, other)

    def __truediv__(self, other) -> Term:
        if self._is_number_before(other):
            return other.__rtruediv__(self)
        return self.writer("aten::div", self, other)

    def __rsub__(self, other) -> Term:
        if not self.is_tensor:
            return self.writer("aten::sub", other, self)
        return self.writer("aten::rsub", self, other)

    def __rtruediv__(self, other) -> Term:
        if not self.is_tensor:
            return self.writer("aten::div", other, self)
        return self.reciprocal() * other

    __radd__, __rmul__ = __add__, __mul__

    def __pow__(self, other) -> Term:
        return self.writer("aten::pow", self, other)

    def __eq__(self, other) -> Term:  # type: ignore[override]
        return self.writer("aten::eq", self, other)

    def __ne__(self, other) -> Term:  # type: ignore[override]
        return self.writer("aten::ne", self, other)

    def __lt__(self, other) -> Term:
        return self.writer("aten::lt", self, other)

    def __le__(self, other) -> Term:
        return self.writer("aten::le", self, other)

    def __gt__(self, other) -> Term:
        return self.writer("aten::gt", self, other)

    def __ge__(self, other) -> Term:
        return self.writer("aten::ge", self, other)

    # Of bools; `logical_and` has its first operand's device, also where that is a number on the CPU.
    def __and__(self, other) -> Term:
        return self.writer("aten::bitwise_and", self, other)

    def __or__(self, other) -> Term:
        return self.writer("aten::bitwise_or", self, other)

    def __invert__(self) -> Term:
        return self.writer("aten::logical_not", self)


class Writer:
    """Writes nodes before `place`, with the source lines of `lines`."""

    def __init__(self, graph: Graph, knowledge: Knowledge | None = None):
        self.graph = graph
        self.knowledge = knowledge or Knowledge()
        self.place: Node = graph.return_node()
        self.lines: Node | None = None
        self._constants: dict[tuple, Value] = {}

    def __call__(self, kind: str, *args, **keywords) -> Any:
        """The result of the op: a Term, a tuple of them for several results, None for none.

        Arguments are Terms, or Python values. Raises RuntimeError where no overload takes them."""
        named = tuple((name, _sample(given)) for name, given in keywords.items())
        schema = overload(kind, tuple(map(_sample, args)), named)
        given = dict(zip((a.name for a in schema.arguments), args)) | keywords
        values = [self._value(given.get(a.name, a.default_value)) for a in schema.arguments]
        node = self.graph.create(kind, values, len(schema.returns))
        if self.lines is not None:
            node.copyMetadata(self.lines)
        node.insertBefore(self.place)
        for value, result in zip(outputs(node), schema.returns):
            value.setType(result.type)
        infer(node, self.knowledge)
        made = tuple(Term(self, v) for v in outputs(node))
        return made[0] if len(made) == 1 else made or None

    def known_as(self, term: Term, like: Value) -> Term:
        """`term`, whose type gets the dtype, the device and the rank of `like` where it lacks them."""
        return self.known(term, facts(like.type()))

    def known(self, term: Term, found: Facts) -> Term:
        """`term`, whose type gets those facts where it lacks them."""
        term.value.setType(refine(term.value.type(), found))
        self.knowledge.forget(term.value)
        return term

    def dtype_of(self, term: Term) -> Term | int:
        """The dtype of a tensor, as ops take it: a number."""
        known = term.facts.dtype
        return self("prim::dtype", term) if known is None else DTYPES[known].code

    def items(self, terms: Sequence) -> Term:
        """A list of ints or tensors, of which some are values of the graph. An empty one is of ints."""
        values = [self._value(term) for term in terms]
        type_ = torch._C.TensorType.get() if values and is_tensor(values[0]) else torch._C.IntType.get()
        node = self.graph.create("prim::ListConstruct", values, 1)
        node.insertBefore(self.place)
        node.output().setType(torch._C.ListType(type_))
        return Term(self, node.output())

    def _value(self, given: Any) -> Value:
        if isinstance(given, Term):
            return given.value
        if isinstance(given, (list, tuple)) and (not given or any(isinstance(i, Term) for i in given)):
            return self.items(given).value
        return self._constant(list(given) if isinstance(given, tuple) else given)

    def _constant(self, given: Any) -> Value:
        """At the front of the graph, each once."""
        key = type(given), repr(given)
        if key not in self._constants:
            front = next(iter(self.graph.nodes()), self.graph.return_node())
            self._constants[key] = constant_before(self.graph, front, given)
        return self._constants[key]


def _sample(given: Any) -> Any:
    """What tells the type of an argument: the class torch.Tensor for a tensor, a number for a number."""
    if isinstance(given, Term):
        type_, listed = given.value.type(), given.value.type().kind() == "ListType"
        while type_.kind() in ("ListType", "OptionalType"):
            type_ = type_.getElementType()
        return (_SAMPLES[type_.kind()],) if listed else _SAMPLES[type_.kind()]
    return tuple(map(_sample, given)) if isinstance(given, (list, tuple)) else given


_SAMPLES = {
    "TensorType": torch.Tensor,
    "IntType": 1,
    "FloatType": 0.5,
    "BoolType": True,
    "NumberType": 0.5,
    "ComplexType": 1j,
}
#: The Python types that an argument of a TorchScript type takes, for the choice among overloads.
_TAKES: dict[str, tuple[type, ...]] = {
    "NumberType": (int, float, complex),
    "IntType": (int,),
    "FloatType": (int, float),
    "BoolType": (bool,),
    "ComplexType": (complex,),
    "StringType": (str,),
    "DeviceObjType": (torch.device,),
}


@cache
def overload(kind: str, args: tuple, keywords: tuple[tuple[str, Any], ...]) -> FunctionSchema:
    """The schema of the first overload that takes them. No number becomes a tensor for it."""
    for schema in torch._C._jit_get_schemas_for_operator(kind):
        given = dict(zip((a.name for a in schema.arguments if not a.kwarg_only), args)) | dict(keywords)
        names = {a.name for a in schema.arguments}
        if len(given) != len(args) + len(keywords) or not names.issuperset(given):
            continue
        missing = [a for a in schema.arguments if a.name not in given]
        fit = all(_fits(given[a.name], a.type) for a in schema.arguments if a.name in given)
        if fit and all(a.has_default_value() for a in missing):
            return schema
    raise RuntimeError(f"{kind} does not take {args} {dict(keywords)}")


def _fits(sample: Any, type_) -> bool:
    kind = type_.kind()
    if kind == "OptionalType":
        return sample is None or _fits(sample, type_.getElementType())
    if kind == "TensorType":
        return sample is torch.Tensor
    if kind == "ListType":
        return isinstance(sample, tuple) and all(_fits(item, type_.getElementType()) for item in sample)
    if kind == "BoolType" or isinstance(sample, bool):
        return isinstance(sample, bool) and kind in ("BoolType", "NumberType")
    return isinstance(sample, _TAKES.get(kind, ()))
