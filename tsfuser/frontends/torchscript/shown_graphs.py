"""`graph_for` and `last_executed_optimized_graph` show the copy that runs where branches are settled.

In: the graph that torch shows of a function. Where its branches were settled (csrc_stubs/torchscript/
settled_branches.h), that is one call, and tests that look for `prim::CudaFusionGroup` in it find none. Out:
the copy of the program without these branches that such a call runs, with its groups, guards and
differentiable graphs, each of which shows the graph that its executor has made. Example:

    fn.graph_for(x, True)     # what the call fn(x, True) runs
    fn.graph_for(x, False)

A copy that torch has not optimised by then is called until it has, as torch's own `graph_for` calls a
function that it knows no graph of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.jit import _fuser, _script

from ... import _C

#: So many calls after the first one with new facts torch has optimised a copy for inference and training.
CALLS = 4

_last_executed = torch._C._last_executed_optimized_graph
_graph_for = _fuser._script_method_graph_for


def install() -> None:
    """Puts ours in the place of torch's functions, wherever torch has them."""
    _fuser._script_method_graph_for = _script._script_method_graph_for = graph_for
    _fuser._graph_for = _script._graph_for = lambda self, *args, **kwargs: graph_for(
        self, self, *args, **kwargs
    )
    torch._C.ScriptMethod.graph_for = graph_for
    torch._C.ScriptFunction.graph_for = _fuser._graph_for
    torch._C._last_executed_optimized_graph = last_executed
    _fuser.last_executed_optimized_graph = torch.jit.last_executed_optimized_graph = last_executed


def graph_for(method: Any, parent: Any, *args: Any, **kwargs: Any) -> torch._C.Graph:
    """The graph that the call `method(*args, **kwargs)` of `parent` runs."""
    graph, trains = _graph_for(method, parent, *args, **kwargs), _may_train(parent, args, kwargs)
    settled = _settled(parent, graph)
    if settled is None:
        shown = _of_program(graph, trains)
        packed = _packed(parent) if shown is graph and trains else []
        return packed[-1] if packed else shown
    found = _C.copy_for_arguments(settled, method, args, kwargs)
    for _ in range(CALLS):
        if found is not None and found[0] is not None:
            break
        method(*args, **kwargs)
        found = _C.copy_for_arguments(settled, method, args, kwargs) or _C.last_copy(settled)
    return _shown(found, graph, trains)


def last_executed() -> torch._C.Graph | None:
    """The graph that this thread ran last."""
    graph = _last_executed()
    if graph is None:
        return None
    return _shown(_C.last_copy(graph), graph) if _C.is_settled(graph) else _of_program(graph)


def _packed(parent: Any) -> list[torch._C.Graph]:
    """The graphs that joint graphs have been made of (joint_door.py), with what their executors have made:
    of programs that torch calls where a check of gradients fails."""
    state = parent.get_debug_state() if hasattr(parent, "get_debug_state") else None
    plans = list(state.execution_plans.values()) if state is not None else []
    found = []
    for plan in plans:
        for graph, states in zip(_C.joint_graphs(plan.code), _C.differentiable_states(plan.code)):
            found.append(graph.copy())
            _show_forwards(found[-1], [states])
    return found


def _may_train(parent: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the call may record gradients."""
    given = [*args, *kwargs.values(), *(parent.parameters() if isinstance(parent, torch.nn.Module) else ())]
    items = [item for value in given for item in (value if isinstance(value, (list, tuple)) else [value])]
    return torch.is_grad_enabled() and any(isinstance(v, torch.Tensor) and v.requires_grad for v in items)


def _of_program(graph: torch._C.Graph, trains: bool | None = None) -> torch._C.Graph:
    """What runs where the graph is a call of a program with joint graphs. `trains`: whether the call may
    record gradients; None for the last one."""
    found = _C.joint_shown(graph)
    if found is None:
        return graph
    has_recorded, shown, states = found
    if has_recorded if trains is None else trains:
        _show_forwards(shown, states)
        return shown
    program = _C.joint_program(graph)
    state = program[0] if program is not None else None
    plans = list(state.execution_plans.values()) if state is not None else []
    return plans[0].graph if len(plans) == 1 else graph


def _settled(parent: Any, shown: torch._C.Graph) -> torch._C.Graph | None:
    """The graph that calls settled copies; None where the function has no such graph."""
    if _C.is_settled(shown):
        return shown
    state = parent.get_debug_state() if hasattr(parent, "get_debug_state") else None
    plans = list(state.execution_plans.values()) if state is not None else []
    return plans[0].graph if len(plans) == 1 and _C.is_settled(plans[0].graph) else None


def _shown(found: tuple | None, otherwise: torch._C.Graph, trains: bool | None = None) -> torch._C.Graph:
    """The graph of a copy, with those of its differentiable graphs. `trains`: that of `_of_program`."""
    if found is None:
        return otherwise
    state, graph = found
    plans = list(state.execution_plans.values()) if state is not None else []
    if len(plans) != 1:
        return graph
    if _C.joint_program(plans[0].graph) is not None:
        return _of_program(plans[0].graph, trains)
    graph = plans[0].graph.copy()
    _show_forwards(graph, _C.differentiable_states(plans[0].code))
    return graph


def _show_forwards(graph: torch._C.Graph, states: Sequence[tuple]) -> None:
    """Has differentiable graphs show what their executors have made of the forward."""
    nodes = graph.findAllNodes("prim::DifferentiableGraph", True)
    for node, (forward, _) in zip(nodes, states) if len(nodes) == len(states) else ():
        inner = list(forward.execution_plans.values()) if forward is not None else []
        if len(inner) == 1:
            node.g_("Subgraph", inner[0].graph)
