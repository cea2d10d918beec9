"""Results of norms that the backward computes again, from the norm's operand and statistics, which the norm's
gradient reads anyway.

In: a joint graph. Out: the same graph, in which readers of a norm's result read elementwise ops, and both
(`Written`). The cut may have the backward compute these ops; the forward reads the norm's result again.
Before:

    %y, %mean, %rstd = aten::native_layer_norm(%x, ...);  %z = aten::silu(%y)
    aten::silu_backward(%g, %y);  aten::native_layer_norm_backward(..., %x, ..., %mean, %rstd, ...)
becomes in the backward
    aten::silu_backward(%g, (%x - %mean) * %rstd * %w + %b)

Statistics that are rounded to 16 bits would not do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from ..graph.rows import row_of
from ..graph.wrapper import (
    CONSTANT,
    Graph,
    Node,
    Value,
    constant_before,
    constant_of,
    facts,
    inputs,
    is_constant,
    is_tensor,
    nodes_in,
    outputs,
    schema,
)
from .divide import Written
from .rules.table import argument
from .terms import DTYPE_NUMBERS, Term, Writer

_EXACT = ("float32", "float64")


def write_norms(graph: Graph) -> list[Written]:
    """What is written for each norm's result."""
    writer = Writer(graph)
    nodes = nodes_in(graph)
    followed = [pair for pair in zip(nodes, [*nodes[1:], graph.return_node()]) if pair[0].kind() in _NORMS]
    return [written for node, behind in followed for written in _written(node, behind, writer)]


def _written(node: Node, behind: Node, writer: Writer) -> Iterator[Written]:
    found, (result, *statistics) = schema(node), outputs(node)[:3]
    if found is None or not all(_is_for_gradient(v) for v in statistics):
        return
    writer.place, writer.lines = behind, node
    if _places(node):
        yield from _bias_of_its_own(node, writer)
    given = {name: argument(writer, v) for name, v in zip(found.arguments, inputs(node))}
    readers = [(use.user, use.offset) for use in result.uses()]
    made = _NORMS[node.kind()](given, *(Term(writer, v) for v in statistics))
    if made is None or None in facts(result.type()):
        return
    dtype = facts(result.type()).dtype
    if made.facts.dtype != dtype:
        made = writer("aten::to", made, DTYPE_NUMBERS[dtype], False, False)
    made.value.setType(result.type())
    for reader, place in readers:
        reader.replaceInput(place, made.value)
    yield Written(made.value, result)


# ---- running statistics, which no second computation may change


def read_for_statistics(nodes: Sequence[Node]) -> list[Value]:
    """What norms of the batch read for their running statistics alone."""
    found = {v.unique(): v for node in nodes for v in (inputs(node)[place] for place in _places(node))}
    return [v for v in found.values() if v.node().kind() != CONSTANT]


def keep_no_statistics(graph: Graph) -> None:
    """Has norms of the batch have no running statistics."""
    for node in nodes_in(graph):
        for place, nothing in _places(node).items():
            node.replaceInput(place, constant_before(graph, node, nothing))


def _places(node: Node) -> dict[int, float | None]:
    """Where a norm of the batch is given what it has running statistics of, and what stands for that."""
    found = row_of(node)
    if found is None or not found[0].writes:
        return {}
    row, its_schema = found
    ((flag, *_),) = {names[1:] for names in row.writes}
    is_of_batch = inputs(node)[its_schema.arguments.index(flag)]
    if not is_constant(is_of_batch) or constant_of(is_of_batch) is not True:
        return {}
    return {its_schema.arguments.index(name): v for name, v in _NOTHING.items()}


_NOTHING = {"running_mean": None, "running_var": None, "momentum": 0.0}

# ---- results


def _bias_of_its_own(node: Node, writer: Writer) -> Iterator[Written]:
    """Has a batch norm read a copy of its bias, which can be saved: eager saves none, and the program may
    write to it."""
    found = schema(node)
    assert found is not None
    place = found.arguments.index("bias")
    bias = inputs(node)[place]
    if is_tensor(bias):
        copy = Term(writer, bias).clone().value
        copy.node().moveBefore(node)
        copy.setType(bias.type())
        node.replaceInput(place, copy)
        yield Written(copy, bias, (copy,))


def _is_for_gradient(statistic: Value) -> bool:
    """Whether the gradient of the norm reads the statistic, which has digits enough."""
    kind = statistic.node().kind()
    kind = _GRADIENTS.get(kind, f"{kind}_backward")
    return facts(statistic.type()).dtype in _EXACT and kind in {use.user.kind() for use in statistic.uses()}


def _layer_norm(given: dict, mean: Term, rstd: Term) -> Term:
    return _scaled((given["input"] - mean) * rstd, given["weight"], given["bias"])


def _batch_norm(given: dict, mean: Term, rstd: Term) -> Term | None:
    rank = given["input"].facts.rank
    if rank is None or given["training"] is not True:
        return None
    sizes = [1, -1, *[1] * (rank - 2)]

    def view(value: Term) -> Term:
        return value.writer.known(value.view(sizes), value.facts._replace(rank=rank))

    mean, rstd = view(mean), view(rstd)
    weight, bias = (v if v is None else view(v) for v in (given["weight"], given["bias"]))
    return _scaled((given["input"] - mean) * rstd, weight, bias)


def _group_norm(given: dict, mean: Term, rstd: Term) -> Term | None:
    """Of [N, C, ...] viewed as [N, groups, C / groups, ...]."""
    value, batch, channels, groups = (given[name] for name in ("input", "N", "C", "group"))
    rank = value.facts.rank
    if rank is None or not isinstance(channels, int) or not isinstance(groups, int):
        return None
    rest, ones = [value.size(d) for d in range(2, rank)], [1] * (rank - 2)

    def view(term: Term, sizes: list) -> Term:
        return term.writer.known(term.view(sizes), term.facts._replace(rank=len(sizes)))

    mean, rstd = (view(v, [batch, groups, 1, *ones]) for v in (mean, rstd))
    each = [1, groups, channels // groups, *ones]
    weight, bias = (v if v is None else view(v, each) for v in (given["weight"], given["bias"]))
    split = view(value, [batch, groups, channels // groups, *rest])
    return view(_scaled((split - mean) * rstd, weight, bias), [batch, channels, *rest])


def _rms_norm(given: dict, rstd: Term) -> Term:
    return _scaled(given["input"] * rstd, given["weight"], None)


def _scaled(value: Term, weight: Term | None, bias: Term | None) -> Term:
    value = value if weight is None else value * weight
    return value if bias is None else value + bias


#: Those whose name does not tell that of their gradient.
_GRADIENTS = {"aten::_native_batch_norm_legit_functional": "aten::native_batch_norm_backward"}
#: Norms that return statistics, and what their results are.
_NORMS: dict[str, Callable[..., Term | None]] = {
    "aten::native_layer_norm": _layer_norm,
    "aten::native_group_norm": _group_norm,
    "aten::_fused_rms_norm": _rms_norm,
    "aten::_native_batch_norm_legit_functional": _batch_norm,
    "tsfuser::batch_norm": _batch_norm,
}
