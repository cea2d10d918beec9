"""FX graphs as plain values: those pieces of a compiled graph that Python runs, and the order of all pieces.

In: a module of the graphs that AOTAutograd makes. Out: a `Written`, which pickles without code, and from it
a module that does the same. Raises Refusal for nodes that call what a name does not tell, such as kernels of
the program's own. Example: `sort = torch.ops.aten.sort.default(x, 1)` is

    Step("call_function", "sort", Named("op", "aten.sort.default"), (At(0), 1), {})
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ....errors import Refusal
from .custom_ops import MODULES

#: Higher-order ops that do only what their arguments say.
_HIGHER = frozenset(("auto_functionalized", "auto_functionalized_v2", "cond"))
_ATOMS = (bool, int, float, complex, str, type(None), type(...), slice)
_OF_TORCH = (torch.dtype, torch.layout, torch.memory_format, torch.device)
_LARGEST = 1 << 16  # bytes of a tensor that a module owns


@dataclass(frozen=True)
class At:
    """The value of a step, by number."""

    number: int


@dataclass(frozen=True)
class Named:
    """A function. `kind`: "op", "higher" or the module that it is in."""

    kind: str
    name: str


@dataclass(frozen=True)
class Step:
    op: str
    name: str
    target: Any  # a Named, or the name of an input or an attribute
    args: Any
    kwargs: Any


@dataclass(frozen=True)
class Written:
    """`owned`: tensors and graphs that steps read as attributes, by name; submodules that are not among them
    are somebody else's."""

    steps: tuple[Step, ...]
    owned: Mapping[str, Any]


def write(module: fx.GraphModule, left_out: frozenset[str] = frozenset()) -> Written:
    """`left_out`: submodules that are not written. Raises Refusal."""
    numbers: dict[fx.Node, At] = {}
    steps, owned = [], {}
    for node in module.graph.nodes:
        if node.op == "call_function":
            target: Any = _named(node.target)
        elif node.op in ("placeholder", "get_attr", "call_module", "output"):
            target = str(node.target)
        else:
            raise Refusal(f"Python runs a {node.op}")
        if node.op in ("get_attr", "call_module") and target not in left_out:
            owned[target] = _owned(module, target)
        args, kwargs = _plain(node.args, numbers), _plain(node.kwargs, numbers)
        steps.append(Step(node.op, node.name, target, args, kwargs))
        numbers[node] = At(len(numbers))
    return Written(tuple(steps), owned)


def read(written: Written) -> fx.GraphModule:
    """A module that does the same; what was left out is an empty module."""
    root, graph = torch.nn.Module(), fx.Graph()
    for name, value in written.owned.items():
        if isinstance(value, Written):
            root.add_module(name, read(value))
        else:
            root.register_buffer(name, value, persistent=False)
    nodes: list[fx.Node] = []
    for step in written.steps:
        target = _function(step.target) if isinstance(step.target, Named) else step.target
        if step.op == "call_module" and step.target not in written.owned:
            root.add_module(step.target, torch.nn.Module())
        args, kwargs = _alive(step.args, nodes), _alive(step.kwargs, nodes)
        nodes.append(graph.create_node(step.op, target, args, kwargs, step.name))
    return fx.GraphModule(root, graph)


def _owned(module: fx.GraphModule, name: str) -> Any:
    found = getattr(module, name) if "." not in name else None
    if isinstance(found, fx.GraphModule):
        return write(found)
    if type(found) is torch.Tensor and found.device.type == "cpu" and not found.requires_grad:
        if found.untyped_storage().nbytes() <= _LARGEST:
            return found
    raise Refusal(f"Python reads {name}, a {type(found).__name__}")


def _named(target: Any) -> Named:
    """Raises Refusal where the name would not give `target` again."""
    if isinstance(target, torch._ops.OpOverload):
        named = Named("op", str(target))
    elif isinstance(target, torch._ops.HigherOrderOperator):
        if target.name() not in _HIGHER:
            raise Refusal(f"Python runs {target.name()}")
        named = Named("higher", target.name())
    else:
        module = str(getattr(target, "__module__", None))
        if module.split(".")[0] not in MODULES:
            raise Refusal(f"Python runs {target}, which is no op")
        named = Named(module, getattr(target, "__name__", ""))
    try:
        same = _function(named) is target
    except (AttributeError, ImportError):
        same = False
    if not same:
        raise Refusal(f"Python runs {target}, which has another name")
    return named


def _function(named: Named) -> Callable[..., Any]:
    if named.kind == "higher":
        return getattr(torch.ops.higher_order, named.name)
    if named.kind != "op":
        return getattr(importlib.import_module(named.kind), named.name)
    found: Any = torch.ops
    for part in named.name.split("."):
        found = getattr(found, part)
    return found


def _plain(value: Any, numbers: Mapping[fx.Node, At]) -> Any:
    if isinstance(value, fx.Node):
        return numbers[value]
    if isinstance(value, (list, tuple)):
        items = [_plain(item, numbers) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, dict):
        return {_plain(k, numbers): _plain(item, numbers) for k, item in value.items()}
    if isinstance(value, (torch._ops.OpOverload, torch._ops.HigherOrderOperator)):
        return _named(value)
    if isinstance(value, slice):
        return slice(*(_plain(v, numbers) for v in (value.start, value.stop, value.step)))
    if type(value) in _ATOMS or isinstance(value, _OF_TORCH):
        return value
    raise Refusal(f"Python gets a {type(value).__name__}")


def _alive(value: Any, nodes: list[fx.Node]) -> Any:
    if isinstance(value, At):
        return nodes[value.number]
    if isinstance(value, Named):
        return _function(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_alive(item, nodes) for item in value)
    if isinstance(value, dict):
        return {_alive(k, nodes): _alive(item, nodes) for k, item in value.items()}
    if isinstance(value, slice):
        return slice(*(_alive(v, nodes) for v in (value.start, value.stop, value.step)))
    return value
