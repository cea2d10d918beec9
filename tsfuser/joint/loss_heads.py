"""Loss heads: the log of a softmax that the backward computes again, from the logits and two numbers a row.

In: a joint graph. Out: the same graph, in which readers of such a result read reductions and elementwise ops,
and what the forward has instead where the cut saves none of these (`Written`). Before:

    %y = aten::log_softmax(%x, 1, None);  %loss, %total = aten::nll_loss_forward(%y, ...)
    %g = aten::_log_softmax_backward_data(%of_loss, %y, 1, 6)
becomes
    %most = aten::amax(%x, [1], True);  %0 = aten::sub(%x, %most);  %1 = aten::exp(%0)
    %sum = aten::sum(%1, [1], True);  %y = aten::sub(%0, aten::log(%sum));  the same of %y

So a loss saves its logits, in their dtype, which a product has stored anyway. The gradient of the loss has
one element a row, so nothing else of the backward needs to walk over rows. That of other softmaxes does so
anyway, and may compute them there (cut.py).
"""

from __future__ import annotations

from collections.abc import Iterator

from ..graph.wrapper import Graph, Node, facts, nodes_of
from .divide import Written
from .expansions import cast
from .rules.table import argument
from .softmaxes import statistics
from .terms import Term, Writer

_KINDS = ("aten::log_softmax", "aten::_log_softmax")
_GRADIENT = "aten::_log_softmax_backward_data"
_LOSSES = ("aten::nll_loss_forward", "aten::nll_loss2d_forward")


def write_loss_heads(graph: Graph) -> list[Written]:
    """What is written for each."""
    writer = Writer(graph)
    return [written for node in nodes_of(graph, _KINDS) for written in _written(node, writer)]


def _written(node: Node, writer: Writer) -> Iterator[Written]:
    result = node.output()
    logits, dim = (argument(writer, v) for v in list(node.inputs())[:2])
    readers = [(use.user, use.offset) for use in result.uses()]
    kinds = {reader.kind() for reader, _ in readers}
    if _GRADIENT not in kinds or kinds.isdisjoint(_LOSSES) or not _is_of_classes(dim, logits):
        return
    its = facts(result.type()).dtype
    writer.place = writer.lines = node
    parts = statistics(logits, dim, its)
    if parts is None:
        return
    shifted, _, most, total = parts
    made = cast(shifted - total.log(), its)  # torch rounds to 16 bits once, too
    made.value.setType(result.type())
    for reader, place in readers:
        reader.replaceInput(place, made.value)
    yield Written(made.value, result, (most.value, total.value))


def _is_of_classes(dim: object, logits: Term) -> bool:
    """Whether a loss reads the dim as that of the classes, of which there are some then."""
    return isinstance(dim, int) and logits.facts.rank is not None and dim == min(1, logits.facts.rank - 1)
