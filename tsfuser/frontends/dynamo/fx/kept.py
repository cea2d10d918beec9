"""A module's graph as it is, for the case that a pass over it fails half-way.

In: a module whose graph will be rewritten. Out: the same module with the graph that it had. Example:

    kept = Kept(module)
    try:
        simplify(module)
    except Exception as error:
        failures.gave_up("simplify", error, kept.line)
        module = kept.put_back()
"""

from __future__ import annotations

import re

from torch import fx


class Kept:
    """`graph` is a copy: its nodes are others, with dicts of their own as `meta`."""

    def __init__(self, module: fx.GraphModule):
        self._module, self._graph = module, _copy(module.graph)

    def put_back(self) -> fx.GraphModule:
        """The module, with the graph as it was."""
        self._module.graph = self._graph
        return self._module

    @property
    def line(self) -> str:
        """A line of the program, as "file:line"; "" where no node has one."""
        for node in self._graph.nodes:
            calls = re.findall(r'File "(.*?)", line (\d+)', node.meta.get("stack_trace") or "")
            if calls:
                return ":".join(calls[-1])
        return ""


def _copy(graph: fx.Graph) -> fx.Graph:
    """A copy of the nodes. A deepcopy copies the trees of arguments, too, of which torch warns the user."""
    made = fx.Graph(tracer_cls=graph._tracer_cls)
    result = made.graph_copy(graph, {})
    output = graph.output_node()
    made.output(result, output.type).meta = dict(output.meta)
    made._codegen = graph._codegen  # no pass changes it
    return made
