"""Results of softmaxes without a gradient that the backward computes again, from the operand and two numbers
a row.

In: a joint graph. Out: the same graph, in which readers of such a result read reductions and elementwise ops,
and what the forward has instead where the cut saves none of these (`Written`). So of a teacher's logits of 16
bits, which a product has stored anyway, no probabilities are saved in float32. Before:

    %p = aten::softmax(%x, -1, None);  aten::mul(%of_loss, %p)
becomes
    %most = aten::amax(%x, [-1], True);  %1 = aten::exp(aten::sub(%x, %most))
    %scale = aten::reciprocal(aten::sum(%1, [-1], True));  %p = aten::mul(%1, %scale);  the same of %p

Of one that has a gradient, which walks over rows anyway, that gradient may compute the result (cut.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ..graph.wrapper import Graph, Node, Value, facts, nodes_of
from .divide import Written
from .expansions import cast
from .rules.table import argument
from .terms import DTYPE_NUMBERS, Term, Writer

#: By the kind of a softmax, whether it is the log of one, and its gradient.
_KINDS = {
    f"aten::{mark}{kind}": (kind != "softmax", f"aten::_{kind}_backward_data")
    for kind in ("softmax", "log_softmax")
    for mark in ("", "_")
}
_EXACT = ("float32", "float64")


def is_filled(value: Value, dim: int) -> bool:
    """Whether the value surely has elements along that dim."""
    sizes = value.type().varyingSizes()
    return sizes is not None and (sizes[dim] or 0) > 0


def write_softmaxes(graph: Graph, filled: Callable[[Value, int], bool] = is_filled) -> list[Written]:
    """What is written for each."""
    writer = Writer(graph)
    return [w for node in nodes_of(graph, tuple(_KINDS)) for w in _written(node, writer, filled)]


def _written(node: Node, writer: Writer, filled: Callable[[Value, int], bool]) -> Iterator[Written]:
    result, (is_log, gradient) = node.output(), _KINDS[node.kind()]
    operand, dim = (argument(writer, v) for v in list(node.inputs())[:2])
    readers = [(use.user, use.offset) for use in result.uses()]
    kinds = {reader.kind() for reader, _ in readers}
    if gradient in kinds or "prim::Return" in kinds or not isinstance(dim, int) or not operand.facts.rank:
        return
    its = facts(result.type()).dtype
    if (not is_log and its not in _EXACT) or not filled(result, dim):
        return
    writer.place = writer.lines = node
    parts = statistics(operand, dim, its)
    if parts is None:
        return
    shifted, power, most, total = parts
    scale = total if is_log else total.reciprocal()
    made = cast(shifted - total.log(), its) if is_log else power * scale  # torch rounds to 16 bits once, too
    made.value.setType(result.type())
    for reader, place in readers:
        reader.replaceInput(place, made.value)
    yield Written(made.value, result, (most.value, scale.value))


def statistics(operand: Term, dim: int, dtype: str | None) -> tuple[Term, Term, Term, Term] | None:
    """Of a softmax with a result of that dtype: the operand less the largest element of its row, the power of
    that, those largest elements, and the sums of the powers. None where torch computes in another dtype."""
    its = operand.facts.dtype
    if (
        its not in DTYPE_NUMBERS
        or dtype not in (its, "float32")
        or (its == "float64") != (dtype == "float64")
    ):
        return None
    wide = operand if its in _EXACT else cast(operand, "float32")
    most = wide.amax([dim], True)
    shifted = wide - most
    power = shifted.exp()
    return shifted, power, most, power.sum([dim], True)
