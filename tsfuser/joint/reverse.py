"""Reverse mode on typed graphs.

In: a graph without in-place ops and without blocks, whose tensors have dtypes and ranks, and which inputs
want a gradient. Out: the same graph, longer: it gets the gradients of the results that have one as further
inputs, and returns the gradients of those inputs as well. Example, for `y = x * w` and x, w that want one:

    graph(%x, %w):            ->    graph(%x, %w, %grad_y):
      %y = aten::mul(%x, %w)          %y = aten::mul(%x, %w)
      return (%y)                     %0 = aten::mul(%grad_y, %w);  %1 = aten::_grad_sum_to_size(%0, ...)
                                      ...
                                      return (%y, %1, %3)

Sizes are values of the graph, so one graph serves all sizes. Gradients are added in the order of eager: that
of the last reader first.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import Refusal
from ..graph.effects import remove_dead_code
from ..graph.rows import Knowledge, row_of
from ..graph.wrapper import (
    LIST,
    Facts,
    Graph,
    Node,
    Value,
    facts,
    graph_inputs,
    graph_outputs,
    inputs,
    is_tensor,
    nodes_in,
    outputs,
    schema,
    with_items,
)
from ..ops import without_row
from .expansions import expand
from .node_facts import elements_read
from .rules import RULES, Rule
from .rules.table import argument
from .terms import DTYPE_NUMBERS, Term, Writer

_UNPACK = "prim::ListUnpack"


#: Ops without a row that pass no gradient on.
_CONSTANT = without_row.FLAT | without_row.LIKE_SELF | {"aten::detach"}


@dataclass(frozen=True)
class Joint:
    """A graph with forward and backward. `results` of its outputs are the forward's; behind them come the
    gradients of `differentiated` inputs (by number), None in `missing` for those that depend on none.
    `asked`: the results (by number) whose gradients are its last inputs, in order. `numbers`: its first
    inputs in the call that its types are of, None where they are tensors."""

    graph: Graph
    results: int
    asked: tuple[int, ...]
    differentiated: tuple[int, ...]
    numbers: tuple[Any, ...] = ()


def reverse(graph: Graph, wanted: Sequence[bool], asked: Collection[int] | None = None) -> Joint:
    """`graph`, changed in place, with the gradients of its wanted inputs. `asked`: the results whose
    gradients it gets, where they have one; None for all.

    Raises Refusal where an op on the way has no derivative here."""
    expand(graph)
    values = graph_inputs(graph)
    results = graph_outputs(graph)
    active = {v.unique() for v, wants in zip(values, wanted) if wants and _may_have_gradient(v)}
    nodes = nodes_in(graph)
    for node in nodes:
        if any(v.unique() in active for v in _sources(node)):
            active.update(v.unique() for v in _differentiable(node) if _may_have_gradient(v))
    moving = [i for i, v in enumerate(results) if v.unique() in active]
    asked = tuple(moving if asked is None else (i for i in moving if i in asked))
    writer = Writer(graph, Knowledge())
    gradients = _Gradients(writer, active)
    for i in asked:
        given = graph.addInput()
        given.setType(results[i].type())
        gradients.add(results[i], Term(writer, given))
    for node in reversed(nodes):
        _differentiate(node, gradients)
    differentiated = []
    for i, value in enumerate(values):
        if (gradient := gradients.of(value)) is not None:
            graph.registerOutput(gradient.value)
            differentiated.append(i)
    remove_dead_code(graph)
    return Joint(graph, len(results), asked, tuple(differentiated))


def _sources(node: Node) -> list[Value]:
    """The operands that a gradient goes to: not the tensor of which an op asks the sizes or the dtype."""
    rule, its_schema = RULES.get(node.kind()), schema(node)
    if rule is None or its_schema is None:
        return inputs(node)
    return [v for name, v in zip(its_schema.arguments, inputs(node)) if name in rule.of]


def _differentiable(node: Node) -> list[Value]:
    """The results of a node that eager differentiates."""
    found = row_of(node)
    if found is None:
        return [] if node.kind() in _CONSTANT else outputs(node)
    row, its_schema = found
    if row.flat and node.kind() not in RULES or row.asked == its_schema.arguments[0]:
        return []
    return [v for i, v in enumerate(outputs(node)) if i not in row.without_gradient]


def _may_have_gradient(value: Value) -> bool:
    if value.type().kind() == "ListType":
        return value.type().getElementType().kind() == "TensorType"
    if not is_tensor(value):
        return False
    dtype = facts(value.type()).dtype
    if dtype is not None and dtype.startswith("complex"):
        raise Refusal("complex numbers are not differentiated here")
    return dtype is None or dtype in DTYPE_NUMBERS


class _Gradients:
    """What is known of the gradients, by value."""

    def __init__(self, writer: Writer, active: set[int]):
        self.writer = writer
        self.active = active
        self._known: dict[int, Any] = {}

    def of(self, value: Value) -> Any:
        return self._known.get(value.unique())

    def add(self, value: Value, gradient: Any) -> None:
        """One more share of the gradient: a Term, or a list of these for a list of tensors."""
        if gradient is None or value.unique() not in self.active:
            return
        if isinstance(gradient, list):
            if value.node().kind() != LIST:
                raise Refusal("a list of tensors that another op makes is not differentiated here")
            for item, share in zip(inputs(value.node()), gradient):
                self.add(item, share)
            return
        before = self.of(value)
        gradient = self.writer.known_as(self._as(value, gradient), value)
        self._known[value.unique()] = gradient if before is None else before + gradient

    def _as(self, value: Value, gradient: Term) -> Term:
        """In the dtype of the value."""
        own, its = facts(value.type()).dtype, gradient.facts.dtype
        if own == its:
            return gradient
        if own is None:
            return gradient.type_as(Term(self.writer, value))
        return self.writer("aten::to", gradient, DTYPE_NUMBERS[own], False, False)

    def of_list(self, value: Value) -> list[Term | None]:
        """The gradients of the items of a list that one node unpacks."""
        uses = value.uses()
        if len(uses) != 1 or uses[0].user.kind() != _UNPACK:
            raise Refusal("a list of tensors that is read as a list is not differentiated here")
        return [self.of(item) for item in outputs(uses[0].user)]


def _differentiate(node: Node, gradients: _Gradients) -> None:
    """The gradients of a node's operands, where one of its results has a gradient."""
    made = outputs(node)
    if node.kind() in (LIST, _UNPACK) or not any(v.unique() in gradients.active for v in made):
        return
    lists = [v for v in made if v.type().kind() == "ListType"]
    given = gradients.of_list(lists[0]) if lists else [gradients.of(v) for v in made]
    if all(gradient is None for gradient in given):
        return
    rule, its_schema = RULES.get(node.kind()), schema(node)
    if rule is None or its_schema is None:
        raise Refusal(f"{node.kind()} has no derivative here")
    writer = gradients.writer
    writer.lines = node
    arguments = dict(zip(its_schema.arguments, inputs(node)))
    _check_operands(node, [v for name, v in arguments.items() if name in rule.of], gradients)
    found = _arguments(rule, writer, arguments, made, given, lists)
    if "wants" in rule.takes:
        operands = {name: arguments[name] for name in rule.of if name in arguments}
        found["wants"] = {name for name, v in operands.items() if v.unique() in gradients.active}
    shares = rule.write(**found)
    dtype = _only_dtype(node, given)
    # numbers make no operand larger
    is_broadcast = rule.broadcasts and sum(map(is_tensor, arguments.values())) > 1
    for name, share in zip(rule.of, shares if isinstance(shares, tuple) else (shares,)):
        value = arguments.get(name)
        if value is None or value.unique() not in gradients.active:
            continue
        if share is None:
            raise Refusal(f"{node.kind()} has no derivative by its {name} here")
        for term in share if isinstance(share, list) else [share]:
            _note_dtype(term, dtype)
        gradients.add(value, _summed(share, value, writer) if is_broadcast else share)


def _check_operands(node: Node, differentiated: list[Value], gradients: _Gradients) -> None:
    """Raises Refusal where the node reads an operand that has a gradient, and its rule knows none."""
    known = {v.unique() for v in with_items(differentiated)}
    for value in elements_read(node):
        if value.unique() in gradients.active - known and facts(value.type()).dtype in DTYPE_NUMBERS:
            raise Refusal(f"{node.kind()} has no derivative by all that it reads here")


def _only_dtype(node: Node, given: list) -> str | None:
    """The floating dtype that all tensors have which a rule starts from, and so all that it computes of them;
    None if they have several."""
    tensors = [v for v in with_items([*inputs(node), *outputs(node)]) if is_tensor(v)]
    found = {facts(v.type()).dtype for v in tensors} | {g.facts.dtype for g in given if g is not None}
    floating = [dtype for dtype in found if dtype is None or dtype in DTYPE_NUMBERS]
    return floating[0] if len(floating) == 1 else None


def _note_dtype(term: Term | None, dtype: str | None) -> None:
    if term is not None and dtype is not None:
        term.writer.known(term, Facts(dtype, None, None))


def _summed(share: Term, value: Value, writer: Writer) -> Term:
    summed = writer("aten::_grad_sum_to_size", share, Term(writer, value).sizes)
    return writer.known(summed, share.facts._replace(rank=None))


def _is_tensors(value: Value) -> bool:
    return value.type().kind() == "ListType" and value.type().getElementType().kind() == "TensorType"


def _arguments(
    rule: Rule,
    writer: Writer,
    arguments: dict[str, Value],
    made: list[Value],
    given: list,
    lists: list[Value],
) -> dict[str, Any]:
    """What the rule asks for, by name."""
    own = {
        "grads": tuple(given),
        "grad": given[0],
        "results": tuple(Term(writer, v) for v in made),
        "result": Term(writer, made[0]),
    }
    if lists:
        items = outputs(lists[0].uses()[0].user)
        own["results"] = tuple(Term(writer, v) for v in items)
    found = {}
    for name in rule.takes:
        if name in arguments:
            found[name] = argument(writer, arguments[name])
        elif name in own:
            found[name] = own[name]
    return found
