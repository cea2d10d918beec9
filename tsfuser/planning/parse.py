"""A group's subgraph to a Fusion; nothing here knows an op.

In: a torch._C.Graph, a Call. Out: the Fusion of that class of calls, by looking each node's row up and
calling its `build`. Arguments are passed by the type that the schema gives them: tensors and numbers as
values, structural ones as their value in this call (a decision). Example:

    parse(graph, call, "cuda:0")
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .. import options
from ..errors import Refusal
from ..graph.evaluate import CONTROL, OPERATIONS, QUESTIONS, is_number, run_control
from ..graph.identities import is_no_op, stays_inside
from ..graph.passes import no_collection
from ..graph.wrapper import ids, inputs, outputs, schema
from ..ir import size as sz
from ..ir.build import Builder
from ..ir.call import Call, ListArg, OtherArg, ScalarArg, TensorArg
from ..ir.dtypes import DTYPES
from ..ir.fusion import Empty, Fusion, Seed, Value
from ..ops import table
from . import eager_random, targets


@dataclass(frozen=True)
class _Argument:
    """Group argument `index`, not yet used."""

    index: int


_UNDEFINED = object()  # a result that eager leaves undefined


@no_collection()
def parse(graph: torch._C.Graph, call: Call, device: str) -> Fusion:
    """The Fusion that `graph` computes for calls like `call`. Raises Refusal."""
    eager = eager_random.grid_of if options.enabled("eager_random") else None
    default = DTYPES[str(torch.get_default_dtype()).removeprefix("torch.")]
    machine = targets.chosen(device, options.host_launch()).machine(device)
    builder = Builder(call, device, default, eager, machine.computes_fast)
    values: dict[int, object] = {v.unique(): _Argument(i) for i, v in enumerate(graph.inputs())}
    for result in _run(builder, graph.nodes(), values, graph.outputs()):
        result = builder.tensor(result.index) if isinstance(result, _Argument) else result
        builder.output(None if result is _UNDEFINED else result)
    return builder.finish()


def _run(builder: Builder, nodes, values: dict[int, object], results) -> list:
    """Builds the nodes in order; `values`, by the number of a value, get what they make. Returns those of
    `results`."""
    for node in nodes:
        values.update(zip(ids(outputs(node)), _results(builder, node, values)))
    return [values[v.unique()] for v in results]


def _results(builder: Builder, node: torch._C.Node, values: dict[int, object]) -> tuple | list:
    kind = node.kind()
    if kind == "prim::Constant":
        return [node.output().toIValue()]
    read = inputs(node)
    given = [values[key] for key in ids(read)]
    if kind in ("prim::ListConstruct", "prim::TupleConstruct"):
        return [given]
    if kind in CONTROL:
        known = dict(values)
        known.update((v.unique(), _plain(builder.call, x)) for v, x in zip(read, given))

        def run_block(block, known: dict) -> list:
            return _run(builder, block.nodes(), dict(known), block.outputs())

        return run_control(builder.call, node, known, run_block)
    if kind == "prim::dtype":
        return [DTYPES[_dtype(builder.call, given[0])].code]
    if kind in QUESTIONS:
        value = _value(builder, given[0])
        assert isinstance(value, Value)
        sizes = builder.sizes(value)
        return [QUESTIONS[kind](builder.call, sizes, *(_plain(builder.call, x) for x in given[1:]))]
    if kind in OPERATIONS and is_number(node.output().type()):
        return [OPERATIONS[kind](builder.call, *(_plain(builder.call, x) for x in given))]
    if is_no_op(node, lambda v: _dtype(builder.call, values[v.unique()])) and stays_inside(node):
        return given[:1]
    return _build(builder, node, given)


def _dtype(call: Call, given) -> str | None:
    """The dtype's name of a tensor; None for all else."""
    if isinstance(given, _Argument):
        arg = call.args[given.index]
        return arg.dtype if isinstance(arg, TensorArg) else None
    return given.dtype.name if isinstance(given, Value) and not given.is_number else None


def _plain(call: Call, given):
    """An int, bool or list of the group's arguments for arithmetic on it; all else as it is."""
    if not isinstance(given, _Argument):
        return given
    arg = call.args[given.index]
    if isinstance(arg, ListArg):
        return [call.item(given.index, k) for k in range(len(arg.values))]
    return call.item(given.index) if isinstance(arg, ScalarArg) and arg.kind in ("bool", "int") else given


def _build(builder: Builder, node: torch._C.Node, given: list) -> tuple:
    found = schema(node)
    row = table.find(found.name, found.overload) if found else None
    if row is None:
        raise Refusal(f"{node.kind()} has no row in the op table")
    args = {}
    for name, operand in zip(found.arguments, given):
        if name in row.structural:
            args[name] = _concrete(builder.call, operand)
        elif name in row.symbolic:
            args[name] = _sizes(builder.call, operand)
        elif name in row.ignored:
            args[name] = None
        else:
            args[name] = _value(builder, operand)
    result = row.build(builder, **args)
    return tuple(_UNDEFINED if r is None else r for r in (result if isinstance(result, tuple) else (result,)))


def _value(builder: Builder, given) -> Value | list | None:
    """A tensor or number for the algorithm, or a list of those; None stays None."""
    if isinstance(given, list):
        return [_value(builder, item) for item in given]
    if isinstance(given, _Argument):
        arg = builder.call.args[given.index]
        if isinstance(arg, TensorArg):
            return builder.tensor(given.index)
        if isinstance(arg, ScalarArg):
            return builder.number(given.index)
        if isinstance(arg, OtherArg) and arg.value is None:
            return None
        raise Refusal(f"argument {given.index} is neither a tensor nor a number")
    if given is None or isinstance(given, Value):
        return given
    if given is _UNDEFINED or isinstance(given, (Empty, Seed)):
        raise Refusal("an operand is a gradient that was not asked for, an empty tensor, or a seed")
    if isinstance(given, sz.Size):
        return builder.extent(given)
    if isinstance(given, (bool, int, float, complex)):
        return builder.literal(given)
    if isinstance(given, torch.Tensor):
        raise Refusal("a constant tensor inside a group is not supported")
    raise Refusal(f"{type(given).__name__} is not a tensor or a number")


def _concrete(call: Call, given):
    """The value of a structural argument in this call, on which the plan depends from now on."""
    if isinstance(given, list):
        return [_concrete(call, item) for item in given]
    if isinstance(given, sz.Size):
        return call.decide(given)
    if not isinstance(given, _Argument):
        return given
    arg = call.args[given.index]
    if isinstance(arg, OtherArg):
        return arg.value
    if isinstance(arg, ListArg):
        items = [call.decide(call.item(given.index, k)) for k in range(len(arg.values))]
        return [bool(x) for x in items] if arg.kind == "bool" else items
    if isinstance(arg, ScalarArg) and arg.kind in ("bool", "int"):
        value = call.decide(call.item(given.index))
        return bool(value) if arg.kind == "bool" else value
    raise Refusal(
        f"argument {given.index} shapes the code but is not an integer, a bool, a list of them, a string "
        "or None"
    )


def _sizes(call: Call, given):
    """An int list as sizes, which may differ within a class; None stays None."""
    if isinstance(given, _Argument):
        arg = call.args[given.index]
        if isinstance(arg, OtherArg) and arg.value is None:
            return None
        if isinstance(arg, ListArg):
            return [call.item(given.index, k) for k in range(len(arg.values))]
        if isinstance(arg, ScalarArg):
            return call.item(given.index)
        raise Refusal(f"argument {given.index} is not a list of sizes")
    if isinstance(given, (list, tuple)):
        return [_sizes(call, item) for item in given]
    return None if given is None else sz.as_size(given)
