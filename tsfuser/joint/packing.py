"""A whole function as torch's own differentiable graph.

In: a typed graph without in-place ops, and which inputs want a gradient. Out: a graph of one node, which
torch's operator runs:

    graph(%x, %w):
      %y = prim::DifferentiableGraph[Subgraph=..., ReverseSubgraph=...](%x, %w)
      return (%y)

torch's executor dissolves such a node: the graph has to be run as it is. ReverseSubgraph is the backward that
the cut has made. Where gradients are on in the backward, another one runs instead, the node's attribute
`again`: eager's formulas, of the saved values. Autograd records what it does, so the gradient has a
gradient itself. That comes in part through saved values, which are further results with gradients, as in
torch's own differentiable graphs; where there is such a gradient, `again` runs, too.

Where gradients are missing or not asked for, the part of one of the two runs that the call needs; `readers`
says which saved values that is to find, and which it frees (partial.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ..errors import Refusal
from ..graph.effects import PURE, draws, effect, keep_writers, secretly_written, tell_writers_apart
from ..graph.wrapper import (
    CONSTANT,
    Graph,
    Value,
    facts,
    graph_inputs,
    graph_outputs,
    inputs,
    is_tensor,
    nodes_in,
    outputs,
    use_count,
)
from .behind import leave_behind
from .casts import write_as_copies
from .divide import Copy, Cut, part
from .example_types import note_types
from .expansions import expand
from .joins import nest_joins
from .names import add_input, mark_as_part
from .node_facts import elements_read, holds_tensors
from .norms import keep_no_statistics, read_for_statistics
from .order import ask_early
from .partial import readers
from .passes import divide
from .results import read_results
from .reverse import reverse
from .roles import Roles
from .room import use_room
from .rules import RULES, second
from .rules.products import STATISTICS
from .seeds import draw_again
from .sizes import drop_idle_sums
from .terms import DTYPE_NUMBERS

PACKED = "prim::DifferentiableGraph"


def pack(
    graph: Graph,
    wanted: Sequence[bool],
    keep_inputs: bool = False,
    seeds: bool = True,
    numbers: Sequence[Any] = (),
) -> Graph:
    """`graph`, which is changed, as one node. `seeds`: dropouts may save these. `numbers`: those of `Joint`.
    Raises Refusal with the reason where it has to stay."""
    for node in nodes_in(graph):
        if effect(node) != PURE and not secretly_written(node):
            raise Refusal(f"{node.kind()} does more than it returns")
    expand(graph)
    tell_writers_apart(graph)
    nest_joins(graph)
    behind = leave_behind(graph)
    joint = replace(reverse(graph, wanted), numbers=tuple(numbers))
    if not joint.asked or not joint.differentiated:
        raise Refusal("no result has a gradient that an input wants")
    parts, again = _again(divide(joint, keep_inputs), wanted, joint.numbers)
    use_room(parts, again)
    if seeds:
        draw_again(parts, again)
    ask_early(parts.forward)
    keep_writers(parts.forward, elements_read)
    write_as_copies(parts.forward)
    packed = _packed(parts, again)
    behind.write(packed)
    if len(graph_outputs(packed)) != 1:
        packed.makeMultiOutputIntoTuple()
    torch._C._jit_pass_erase_shape_information(packed)
    return packed


# ---- the backward of the backward


def _again(parts: Cut, wanted: Sequence[bool], numbers: Sequence[Any]) -> tuple[Cut, Cut]:
    """The cut, whose forward may save further numbers, and the same forward with eager's formulas for its
    backward, which gets gradients of saved values as well. It has only what the cut has saved."""
    made = graph_outputs(parts.forward)
    moving = {i for i in parts.saved_outputs if i >= parts.results and _moves(made[i])}
    joint = reverse(parts.forward.copy(), wanted, moving.union(parts.asked))
    if joint.differentiated != parts.differentiated:
        raise Refusal("an input has second derivatives only")
    drop_idle_sums(joint)
    expand(joint.graph, second.FORMS)
    kept = {graph_outputs(joint.graph)[i].unique() for i in parts.saved_outputs}
    read_results(
        joint.graph, lambda value, node: value.unique() in kept and node.inputsAt(1).unique() not in kept
    )
    note_types(joint.graph, numbers)  # as before the cut, which has saved one of equal values
    torch._C._jit_pass_cse(joint.graph)
    roles = Roles(joint)
    saved = [*(roles.given[i] for i in parts.saved_inputs), *(roles.results[i] for i in parts.saved_outputs)]
    more = _missing_numbers(roles, saved)
    forward = part(roles, roles.given, [*roles.results, *more], roles.acting)
    places = range(len(made), len(made) + len(more))
    for value in more:
        parts.backward.addInput().setType(value.type())
    given = [*roles.grads, *saved, *more]
    backward = part(roles, [*given, *read_for_statistics(roles.nodes)], roles.gradients, [])
    keep_no_statistics(backward)
    for place in reversed(range(len(given), len(graph_inputs(backward)))):
        if use_count(graph_inputs(backward)[place]):
            raise Refusal("a value is needed that is not saved")
        backward.eraseInput(place)
    for node in nodes_in(backward):
        if draws(node) or effect(node) != PURE:
            raise Refusal(f"second derivatives would run {node.kind()} twice")
    parts = replace(parts, forward=forward, saved_outputs=(*parts.saved_outputs, *places))
    return parts, replace(parts, backward=backward, asked=joint.asked)


def _missing_numbers(roles: Roles, saved: list[Value]) -> list[Value]:
    """Numbers that the backward reads and that saved tensors do not tell, such as sizes of inputs."""
    known = {v.unique() for v in (*roles.grads, *saved)}
    missing: list[Value] = []
    for node in roles.nodes:
        made = outputs(node)
        if not roles.is_free(node) or roles.is_late(node):
            continue
        if all(v.unique() in known or v.node().kind() == CONSTANT for v in inputs(node)):
            known.update(v.unique() for v in made)
        elif not roles.is_early(node):
            numbers = [v for v in made if not is_tensor(v)]
            missing += numbers
            known.update(v.unique() for v in numbers)
    return missing


def _moves(value: Value) -> bool:
    """Whether the value has a gradient: it has fractions, and is not a statistic of a norm, or the like. For
    these the second derivative of the norm itself accounts."""
    if is_tensor(value) and not any(map(holds_tensors, inputs(value.node()))):
        return False
    if is_tensor(value) and facts(value.type()).dtype is None:
        raise Refusal(f"the dtype of a saved result of {value.node().kind()} is not known")
    if not is_tensor(value) or facts(value.type()).dtype not in DTYPE_NUMBERS:
        return False
    rule = RULES.get(value.node().kind())
    if value.offset() == 0 or rule is None:
        return True
    return "grads" in rule.takes and value.node().kind() not in STATISTICS


# ---- the graphs


def _backward(way: Cut, parts: Cut, again: Cut) -> Graph:
    """The backward of one of both ways, which gets gradients of all results that either asks for, and returns
    a tuple."""
    graph, made = Graph(), graph_outputs(parts.forward)
    gradients = {i: add_input(graph, made[i]) for i in again.asked}
    saved = [add_input(graph, graph_inputs(parts.forward)[i]) for i in parts.saved_inputs]
    saved += [add_input(graph, made[i]) for i in parts.saved_outputs]
    arguments = [*(gradients[i] for i in way.asked), *saved]
    known = {v.unique(): a for v, a in zip(graph_inputs(way.backward), arguments, strict=True)}
    copy = Copy(graph, graph.return_node(), known)
    for node in nodes_in(way.backward):
        if node.kind() != CONSTANT:
            copy.add(node)
    results = [copy.of(value) for value in graph_outputs(way.backward)]
    packed = graph.create("prim::TupleConstruct", results, 1).insertBefore(graph.return_node())
    packed.output().setType(torch._C.TupleType([v.type() for v in results]))
    graph.registerOutput(packed.output())
    return graph


def _packed(parts: Cut, again: Cut) -> Graph:
    graph, made = Graph(), graph_outputs(parts.forward)[: parts.results]
    backward, other = (_backward(way, parts, again) for way in (parts, again))
    given = [add_input(graph, v) for v in graph_inputs(parts.forward)]
    node = graph.create(PACKED, given, parts.results).insertBefore(graph.return_node())
    for value, result in zip(outputs(node), made):
        value.setType(result.type())
        graph.registerOutput(value)
    node.gs_("ways", [backward.copy(), other])
    for inner in (parts.forward, backward):
        torch._C._jit_pass_erase_shape_information(inner)
        mark_as_part(inner)
    node.i_("joint", 1)
    node.g_("Subgraph", parts.forward)
    node.g_("ReverseSubgraph", backward)
    node.is_("readers", readers((backward, other), len(again.asked)))
    node.i_("f_real_outputs", parts.results)
    node.is_("df_input_vjps", list(again.asked))
    node.is_("df_input_captured_inputs", list(parts.saved_inputs))
    node.is_("df_input_captured_outputs", list(parts.saved_outputs))
    node.is_("df_output_vjps", list(parts.differentiated))
    return graph
