"""A whole function as torch's own differentiable graph.

In: a typed graph without in-place ops, and which inputs want a gradient. Out: a graph of one node, which
torch's operator runs:

    graph(%x, %w):
      %y = prim::DifferentiableGraph[Subgraph=..., ReverseSubgraph=...](%x, %w)
      return (%y)

torch's executor dissolves such a node: the graph has to be run as it is. The backward has two ways:

    %again = aten::is_grad_enabled() or some saved value has a gradient
    %grad_x, %grad_w = prim::If(%again)
      block0():  eager's formulas, of what the forward saves; saved values are further results with gradients
      block1():  what the cut has made

Where gradients are on in the backward, autograd records what block0 does, so the gradient has a gradient
itself. That comes in part through saved values, as in torch's own differentiable graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce

import torch

from ..errors import Refusal
from ..graph.effects import PURE, draws, effect, secretly_written
from ..graph.wrapper import (
    CONSTANT,
    Block,
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
)
from .behind import leave_behind
from .divide import Copy, Cut, part
from .expansions import expand
from .passes import divide
from .reverse import reverse
from .roles import Roles
from .rules import RULES, second
from .rules.products import STATISTICS
from .terms import DTYPE_NUMBERS, Term, Writer

PACKED = "prim::DifferentiableGraph"
#: Of the first input of the graphs inside, which are not packed once more.
_NAME = "joint_input"
_GIVEN, _GIVEN_IF, _SIZE = "tsfuser::is_given", "tsfuser::given_if", "aten::size"
_BOOL, _INTS = torch._C.BoolType.get(), torch._C.ListType(torch._C.IntType.get())


def pack(graph: Graph, wanted: Sequence[bool], keep_inputs: bool = False) -> Graph:
    """`graph`, which is changed, as one node. Raises Refusal with the reason where it has to stay."""
    for node in nodes_in(graph):
        if effect(node) != PURE and not secretly_written(node):
            raise Refusal(f"{node.kind()} does more than it returns")
    expand(graph)
    behind = leave_behind(graph)
    joint = reverse(graph, wanted)
    if not joint.asked or not joint.differentiated:
        raise Refusal("no result has a gradient that an input wants")
    parts, again = _again(_with_sizes(divide(joint, keep_inputs)), wanted)
    packed = _packed(parts, again, _backward(parts, again))
    behind.write(packed)
    if len(graph_outputs(packed)) != 1:
        packed.makeMultiOutputIntoTuple()
    torch._C._jit_pass_erase_shape_information(packed)
    return packed


def _with_sizes(parts: Cut) -> Cut:
    """The same, where the forward also saves the sizes of results, whose gradients may be missing."""
    made, saved = graph_outputs(parts.forward), list(parts.saved_outputs)
    for i in parts.asked:
        node = parts.forward.create(_SIZE, [made[i]], 1).insertBefore(parts.forward.return_node())
        node.output().setType(_INTS)
        saved.append(parts.forward.registerOutput(node.output()))
        parts.backward.addInput().setType(_INTS)
    return replace(parts, saved_outputs=tuple(saved))


def _sizes_of(parts: Cut) -> dict[int, int]:
    """By the numbers of results, those of the outputs that are their sizes."""
    made = graph_outputs(parts.forward)
    results = {made[i].unique(): i for i in parts.asked}
    queries = [(j, made[j].node()) for j in parts.saved_outputs if made[j].node().kind() == _SIZE]
    whole = [(j, node.inputsAt(0).unique()) for j, node in queries if node.inputsSize() == 1]
    return {results[of]: j for j, of in whole if of in results}


# ---- the backward of the backward


def _again(parts: Cut, wanted: Sequence[bool]) -> tuple[Cut, Cut]:
    """The cut, whose forward may save further numbers, and the same forward with eager's formulas for its
    backward, which gets gradients of saved values as well. It has only what the cut has saved."""
    made = graph_outputs(parts.forward)
    moving = {i for i in parts.saved_outputs if i >= parts.results and _moves(made[i])}
    joint = reverse(parts.forward.copy(), wanted, moving.union(parts.asked))
    if joint.differentiated != parts.differentiated:
        raise Refusal("an input has second derivatives only")
    expand(joint.graph, second.FORMS)
    if without := [node.kind() for node in nodes_in(joint.graph) if node.kind() in second.WITHOUT]:
        raise Refusal(f"{without[0]} has no derivative")
    roles = Roles(joint)
    saved = [*(roles.given[i] for i in parts.saved_inputs), *(roles.results[i] for i in parts.saved_outputs)]
    more = _missing_numbers(roles, saved)
    forward = part(roles, roles.given, [*roles.results, *more], roles.acting)
    numbers = range(len(made), len(made) + len(more))
    for value in more:
        parts.backward.addInput().setType(value.type())
    backward = part(roles, [*roles.grads, *saved, *more], roles.gradients, [])
    for node in nodes_in(backward):
        if draws(node) or effect(node) != PURE:
            raise Refusal(f"second derivatives would run {node.kind()} twice")
    parts = replace(parts, forward=forward, saved_outputs=(*parts.saved_outputs, *numbers))
    return parts, replace(parts, backward=backward, asked=joint.asked)


def _missing_numbers(roles: Roles, saved: list[Value]) -> list[Value]:
    """Numbers that the backward reads and that are not those of what is saved, such as sizes of inputs."""
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
    if not is_tensor(value) or facts(value.type()).dtype not in DTYPE_NUMBERS:
        return False
    rule = RULES.get(value.node().kind())
    if value.offset() == 0 or rule is None:
        return True
    return "grads" in rule.takes and value.node().kind() not in STATISTICS


# ---- the graphs


@dataclass(frozen=True)
class _Given:
    """What the backward gets: gradients of the forward's outputs by their numbers, saved values in order, and
    the sizes of results by their numbers."""

    gradients: dict[int, Value]
    saved: list[Value]
    outputs: dict[int, Value]
    sizes: dict[int, Value]


def _backward(parts: Cut, again: Cut) -> Graph:
    """Both ways in one graph, which returns a tuple."""
    graph, made = Graph(), graph_outputs(parts.forward)
    gradients = {i: _input(graph, made[i]) for i in again.asked}
    saved = [_input(graph, graph_inputs(parts.forward)[i]) for i in parts.saved_inputs]
    kept = [_input(graph, made[i]) for i in parts.saved_outputs]
    places = dict(zip(parts.saved_outputs, kept))
    sizes = {i: places[number] for i, number in _sizes_of(parts).items()}
    given = _Given(gradients, saved + kept, places, sizes)
    end = graph.return_node()
    on = _flag(graph, end, "aten::is_grad_enabled", [])
    for moving in (gradients[i] for i in again.asked if i not in parts.asked):
        on = _flag(graph, end, "aten::__or__", [on, _flag(graph, end, _GIVEN, [moving])])
    choice = graph.create("prim::If", [on], len(parts.differentiated)).insertBefore(end)
    for way in (again, parts):
        _write_way(graph, choice.addBlock(), way, given, made)
    results = outputs(choice)
    packed = graph.create("prim::TupleConstruct", results, 1).insertBefore(end)
    packed.output().setType(torch._C.TupleType([v.type() for v in results]))
    graph.registerOutput(packed.output())
    return graph


def _write_way(graph: Graph, block: Block, way: Cut, given: _Given, made: list[Value]) -> None:
    """Writes a backward into a block. Several gradients: some may be missing, not all."""
    end, gradients = block.returnNode(), given.gradients
    if len(gradients) > 1:
        gradients = {i: _or_zeros(graph, end, given, i, made[i]) for i in way.asked}
    arguments = [*(gradients[i] for i in way.asked), *given.saved]
    known = {v.unique(): a for v, a in zip(graph_inputs(way.backward), arguments, strict=True)}
    copy = Copy(graph, end, known)
    for node in nodes_in(way.backward):
        if node.kind() != CONSTANT:
            copy.add(node)
    for value, leading in zip(graph_outputs(way.backward), _leading(way)):
        gradient = copy.of(value)
        if len(leading) < len(way.asked):
            there = [_flag(graph, end, _GIVEN, [given.gradients[i]]) for i in leading]
            some = reduce(lambda a, b: _flag(graph, end, "aten::__or__", [a, b]), there)
            before, gradient = (
                gradient,
                graph.create(_GIVEN_IF, [gradient, some], 1).insertBefore(end).output(),
            )
            gradient.setType(before.type())
        block.registerOutput(gradient)


def _leading(way: Cut) -> list[list[int]]:
    """For each gradient of a backward the results whose gradients it depends on: without all of these there
    is none."""
    values = graph_inputs(way.backward)
    known = {v.unique(): frozenset((i,)) for i, v in zip(way.asked, values)}
    for node in nodes_in(way.backward):
        found = frozenset().union(*(known.get(v.unique(), ()) for v in inputs(node)))
        known.update((v.unique(), found) for v in outputs(node))
    return [sorted(known.get(v.unique(), way.asked)) for v in graph_outputs(way.backward)]


def _or_zeros(graph: Graph, place: Node, given: _Given, number: int, result: Value) -> Value:
    """The gradient of an output of the forward; zeros if there is none."""
    is_there = _flag(graph, place, _GIVEN, [given.gradients[number]])
    choice = graph.create("prim::If", [is_there], 1).insertBefore(place)
    choice.output().setType(result.type())
    choice.addBlock().registerOutput(given.gradients[number])
    missing, writer = choice.addBlock(), Writer(graph)
    writer.place = missing.returnNode()
    if number in given.sizes:
        dtype, device, _ = facts(result.type())
        if dtype is None or device is None:
            raise Refusal("a result has no known dtype")
        zeros = writer(
            "aten::zeros",
            Term(writer, given.sizes[number]),
            dtype=DTYPE_NUMBERS[dtype],
            device=torch.device(device),
        )
    else:
        zeros = writer("aten::zeros_like", Term(writer, given.outputs[number]))
    missing.registerOutput(zeros.value)
    return choice.output()


def _packed(parts: Cut, again: Cut, backward: Graph) -> Graph:
    graph, made = Graph(), graph_outputs(parts.forward)[: parts.results]
    given = [_input(graph, v) for v in graph_inputs(parts.forward)]
    node = graph.create(PACKED, given, parts.results).insertBefore(graph.return_node())
    for value, result in zip(outputs(node), made):
        value.setType(result.type())
        graph.registerOutput(value)
    for inner in (parts.forward, backward):
        torch._C._jit_pass_erase_shape_information(inner)
    for inner in (parts.forward, backward):
        graph_inputs(inner)[0].setDebugName(_NAME)
    node.i_("joint", 1)
    node.g_("Subgraph", parts.forward)
    node.g_("ReverseSubgraph", backward)
    node.i_("f_real_outputs", parts.results)
    node.is_("df_input_vjps", list(again.asked))
    node.is_("df_input_captured_inputs", list(parts.saved_inputs))
    node.is_("df_input_captured_outputs", list(parts.saved_outputs))
    node.is_("df_output_vjps", list(parts.differentiated))
    return graph


def _input(graph: Graph, like: Value) -> Value:
    argument = graph.addInput()
    argument.setType(like.type())
    return argument


def _flag(graph: Graph, place: Node, kind: str, operands: list[Value]) -> Value:
    made = graph.create(kind, operands, 1).insertBefore(place).output()
    made.setType(_BOOL)
    return made
