"""What became of the graphs of a compiled program, as reports.

In: the `Outcome`s of a run (frontends/dynamo/watch.py). Out: a `GraphReport` for each, in which the pieces of
a graph and what Python runs between them are one; and the breaks of TorchDynamo's graphs. Example:

    reports_of(outcomes, reader)[0].title      # "graph 1, forward"
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ..frontends.dynamo.fx.places import is_of_torch, place_of
from ..frontends.dynamo.watch import Outcome, Source
from .findings import Break, GraphReport, Node
from .reader import GraphReader, Items, Makers
from .source import Place

_NOTHING: Makers = frozenset()


def reports_of(outcomes: Sequence[Outcome], reader: GraphReader) -> tuple[GraphReport, ...]:
    """Graph by graph, forwards before backwards, though torch makes the backward when it is asked for."""
    numbers = {number: k for k, number in enumerate(sorted({o.origin.source.number for o in outcomes}), 1)}
    ordered = sorted(outcomes, key=lambda o: (o.origin.source.number, o.origin.role == "backward"))
    return tuple(
        _Reading(outcome, reader).report(
            f"graph {numbers[outcome.origin.source.number]}, {outcome.origin.role}"
        )
        for outcome in ordered
    )


def breaks_of(graphs: Sequence[Source]) -> tuple[Break, ...]:
    """Each break once, where the program has it."""
    found: dict[Break, None] = {}
    for graph in graphs:
        own = [frame for frame in graph.stack if not is_of_torch(frame.filename)]
        if graph.broken:
            place = Place(own[-1].filename, own[-1].lineno, (own[-1].line or "").strip()) if own else Place()
            found[Break(place, _said(graph.broken))] = None
    return tuple(found)


def _said(reason: str) -> str:
    """torch's first line, and its explanation; the hints behind it are for who writes the program anew."""
    lines = [line.strip() for line in reason.splitlines()]
    explained = [line.removeprefix("Explanation: ") for line in lines if line.startswith("Explanation: ")]
    return ": ".join([*lines[:1], *explained[:1]])


class _Reading:
    """One outcome on its way to a report."""

    def __init__(self, outcome: Outcome, reader: GraphReader):
        self.outcome, self.reader, self.found = outcome, reader, Items()

    def report(self, title: str) -> GraphReport:
        if "" in self.outcome.programs:
            self._program("", ())
        else:
            self._module(self.outcome.module, ())
        return self.found.report(title)

    def _program(self, name: str, fed: Sequence[Makers]) -> list[Makers]:
        """Reads a typed graph; the makers of its results."""
        translation, refusals = self.outcome.programs[name]
        made = self.reader.read(translation.graph, self.found, refusals, fed=fed)
        return [_NOTHING if k is None else made[k] for k in translation.results]

    def _module(self, module: fx.GraphModule, fed: Sequence[Makers]) -> list[Makers]:
        """Reads an FX graph: its pieces, and what Python runs; the makers of its results."""
        waiting = iter(fed)
        made: dict[fx.Node, Any] = {}
        for node in module.graph.nodes:
            read = _NOTHING.union(*(_all(made.get(operand, _NOTHING)) for operand in node.all_input_nodes))
            if node.op == "placeholder":
                made[node] = next(waiting, _NOTHING)
            elif node.op == "call_module":
                given = [
                    _all(made.get(x, _NOTHING)) if isinstance(x, fx.Node) else _NOTHING for x in node.args
                ]
                name = str(node.target)
                inner = self.outcome.programs.get(name)
                results = self._program(name, given) if inner else self._inner(module, name, given)
                made[node] = results if len(results) != 1 else results[0]
            elif node.op == "output":
                listed = node.args[0] if isinstance(node.args[0], (list, tuple)) else [node.args[0]]
                return [_all(made.get(x, _NOTHING)) if isinstance(x, fx.Node) else _NOTHING for x in listed]
            elif node.target is operator.getitem:
                source, at = node.args
                several = made.get(source)  # what a piece returns
                made[node] = several[at] if isinstance(several, list) else read
            elif node.op == "call_function" and _has_tensors(node):
                made[node] = self.found.add(self._node(node), read)
            else:
                made[node] = read
        return []

    def _inner(self, module: fx.GraphModule, name: str, given: Sequence[Makers]) -> list[Makers]:
        inner = getattr(module, name)
        return self._module(inner, given) if isinstance(inner, fx.GraphModule) else []

    def _node(self, node: fx.Node) -> Node:
        place = place_of(node)
        reason = self.outcome.failure or self.outcome.foreign.get(node.name, "")
        return Node(
            _kind(node.target), Place(*place) if place else Place(), reason or "it is between such nodes"
        )


def _all(makers: Any) -> Makers:
    return _NOTHING.union(*makers) if isinstance(makers, list) else makers


def _kind(target: Any) -> str:
    """`aten::mm`, or the name of Python's function."""
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name
    return str(getattr(target, "__name__", target))


def _has_tensors(node: fx.Node) -> bool:
    found = node.meta.get("val")
    listed = found if isinstance(found, (list, tuple)) else [found]
    return any(isinstance(value, torch.Tensor) for value in listed)
