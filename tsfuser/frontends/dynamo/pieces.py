"""Runs the pieces of a graph that could not be translated whole.

In: the module that `split` makes, and the programs of some of its submodules. Out: a boxed function, which
calls the submodules in order. A piece gets the last reference to values that nobody reads after it, so its
inputs are freed while it runs, as those of a whole graph are. Example: `y = submod_0(x); z = submod_1(y)`; a
kernel of `submod_1` may be the last to need `y`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx
from torch.fx.node import map_arg


@dataclass
class _Step:
    """`run` gets a list of the values at `given`, and empties it if it can. `last`: the values that nobody
    reads later. `to`: where the result goes."""

    run: Callable[[list], Any]
    given: list[int]
    last: list[int]
    to: int


def in_order(module: fx.GraphModule, programs: Mapping[str, Callable[[list], Any]]) -> Callable[[list], Any]:
    """The function. `programs`: submodule -> what runs in its place, boxed, with the same result."""
    inputs = module.graph.find_nodes(op="placeholder")
    (end,) = module.graph.find_nodes(op="output")
    at = {node: k for k, node in enumerate(inputs)}
    constants: list[Any] = []  # behind the inputs; then come the results
    steps: list[_Step] = []
    nodes = [node for node in module.graph.nodes if node.op not in ("placeholder", "output")]
    at.update((node, len(inputs) + k) for k, node in enumerate(nodes))
    first = len(inputs) + len(nodes)

    def place(given: Any) -> int:
        if isinstance(given, fx.Node):
            return at[given]
        constants.append(given)
        return first + len(constants) - 1

    read: set[int] = {at[node] for node in end.all_input_nodes}
    for node in reversed(nodes):
        given = [place(a) for a in node.args]
        last = {at[n] for n in (node, *node.all_input_nodes)} - read
        read |= last
        steps.append(_Step(_function(module, node, programs), given, sorted(last - {at[node]}), at[node]))
    steps.reverse()
    return lambda args: _run(args, steps, [None] * len(nodes) + constants, end, at)


def _function(module: fx.GraphModule, node: fx.Node, programs: Mapping[str, Callable]) -> Callable:
    if node.op == "get_attr":
        found: Any = module
        for name in str(node.target).split("."):
            found = getattr(found, name)
        return lambda given: found
    target = node.target
    if node.op == "call_module":
        if target in programs:
            return programs[target]
        target = getattr(module, target)
    return lambda given: target(*given, **node.kwargs)


def _run(args: list, steps: list[_Step], others: list, end: fx.Node, at: Mapping[fx.Node, int]) -> Any:
    values = args + others
    args.clear()
    for step in steps:
        given = [values[k] for k in step.given]
        for k in step.last:
            values[k] = None
        values[step.to] = step.run(given)
    return map_arg(end.args[0], lambda node: values[at[node]])
