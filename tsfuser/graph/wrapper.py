"""What torch's graph bindings leave to be said: short, fast questions about nodes, values and types.

In: `torch._C` nodes and values. Out: plain Python. What passes ask of each node is one call of the extension:
`node.inputs()` makes a new iterator type at each call (9 us), and one more call a value; `inputs` below makes
a list (.4 us). Example: `facts(value.type())` -> `Facts("float32", "cuda:0", 2)`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch._C import Block, Graph, Node, Value

from .. import _C

GROUP, GUARD, FALLBACK = "prim::CudaFusionGroup", "prim::CudaFusionGuard", "prim::FallbackGraph"
CONSTANT, LIST = "prim::Constant", "prim::ListConstruct"


class Facts(NamedTuple):
    """What is known of a tensor: dtype name, device, rank; None where unknown."""

    dtype: str | None
    device: str | None
    rank: int | None

    @property
    def known(self) -> bool:
        return None not in self


class Schema(NamedTuple):
    """An operator's schema: argument names and types in order, whether it writes to an argument, whether
    results may alias arguments."""

    name: str
    overload: str
    arguments: tuple[str, ...]
    types: tuple[str, ...]
    writes: bool
    aliases: bool


inputs: Callable[[Node], list[Value]] = _C.inputs
outputs: Callable[[Node], list[Value]] = _C.outputs
#: The blocks of a node (of an If, a Loop...).
blocks: Callable[[Node], list[Block]] = _C.blocks
#: The results of a node that somebody reads. A gradient that was not asked for is undefined: nobody reads it,
#: or it was profiled as undefined.
used_outputs: Callable[[Node], list[Value]] = _C.used_outputs
#: The values that a graph gets, and those that it returns.
graph_inputs: Callable[[Graph], list[Value]] = _C.graph_inputs
graph_outputs: Callable[[Graph], list[Value]] = _C.graph_outputs
#: The nodes of a block, as they are now.
nodes_in: Callable[[Graph | Block], list[Node]] = _C.nodes_in
#: The nodes of a block and of all blocks within, those of outer ones first.
all_nodes: Callable[[Graph | Block], list[Node]] = _C.all_nodes
#: Those of one of some kinds.
all_nodes_of: Callable[[Graph | Block, Sequence[str]], list[Node]] = _C.all_nodes_of
#: The nodes of a block of one of some kinds.
nodes_of: Callable[[Graph | Block, Sequence[str]], list[Node]] = _C.nodes_of
#: The nodes of a block that have blocks themselves.
nodes_with_blocks: Callable[[Graph | Block], list[Node]] = _C.nodes_with_blocks
#: The nodes of a block with a tensor of which dtype, device or rank is unknown among their results.
nodes_without_types: Callable[[Graph | Block], list[Node]] = _C.nodes_without_types
#: The numbers of values.
ids: Callable[[Sequence[Value]], list[int]] = _C.ids
#: How many uses a value has.
use_count: Callable[[Value], int] = _C.use_count
#: Whether a value is a Tensor; an Optional[Tensor] is not.
is_tensor: Callable[[Value], bool] = _C.is_tensor
#: Whether a value can be written into another graph: a plain constant, or a list of ints, floats or bools
#: that are constants.
is_constant: Callable[[Value], bool] = _C.is_constant
#: Whether a value is a list of ints, floats or bools.
is_plain_list: Callable[[Value], bool] = _C.is_plain_list
#: Whether a value is a list of tensors, and perhaps of None, that its node makes, which nothing but one op
#: reads.
is_tensor_list: Callable[[Value], bool] = _C.is_tensor_list


def insert(graph: Graph, place: Node, kind: str, operands: list[Value], results: int = 1) -> Node:
    """A new node before `place`, with its source lines."""
    node = graph.create(kind, operands, results)
    node.copyMetadata(place)
    node.insertBefore(place)
    return node


def constant_before(graph: Graph, place: Node, value: object) -> Value:
    """A constant of that value before `place`. The graph's insert point does not stay there: torch puts it
    back where it was, and aborts the process if that node is gone by then."""
    graph.setInsertPoint(place)
    constant = graph.insertConstant(value)
    graph.setInsertPoint(graph.return_node())
    return constant


def constant_near(graph: Graph, place: Node, constant: Value) -> Value:
    """A copy of a constant before `place`."""
    return graph.createClone(constant.node(), lambda v: v).insertBefore(place).output()


def used_inside(node: Node) -> list[Value]:
    """The values that the blocks of a node use: one entry for each use."""
    used: list[Value] = []
    for block in blocks(node):
        used += block.outputs()
        for inner in nodes_in(block):
            used += inputs(inner) + used_inside(inner)
    return used


def operands(node: Node) -> list[Value]:
    """What a node reads, once a use: its inputs, and what its blocks take from outside."""
    used = used_inside(node) if blocks(node) else ()
    if not used:
        return inputs(node)
    own: set[int] = set()
    waiting = blocks(node)
    while waiting:
        block = waiting.pop()
        own.update(v.unique() for v in block.inputs())
        for inner in nodes_in(block):
            own.update(v.unique() for v in outputs(inner))
            waiting += blocks(inner)
    return inputs(node) + [v for v in used if v.unique() not in own]


def all_blocks(graph: Graph) -> Iterator[Block]:
    """Every block of the graph, outer ones first. `graph` itself stands for its top block: it has the same
    methods."""
    waiting = [graph]
    while waiting:
        block = waiting.pop()
        yield block
        waiting += _C.blocks_within(block)


def end_of(block: Graph | Block) -> Node:
    """The node before which the block's last node stands."""
    return block.return_node() if isinstance(block, Graph) else block.returnNode()


@lru_cache(maxsize=4096)
def _parse(text: str) -> Schema:
    schema = torch._C.parse_schema(text)
    arguments = schema.arguments
    writes = any(a.is_write for a in arguments)
    aliases = any(r.alias_info is not None for r in schema.returns)
    types = tuple(str(a.real_type.annotation_str) for a in arguments)
    return Schema(schema.name, schema.overload_name, tuple(a.name for a in arguments), types, writes, aliases)


def schema(node: Node) -> Schema | None:
    """The operator's schema; None for nodes without one."""
    key = _C.schema_key(node)
    if key in _known:
        return _known[key]
    text = node.schema()
    found = None if text == "(no schema)" or "..." in text else _parse(text)
    if key is not None:
        _known[key] = found
    return found


#: By the number that stands for a schema: torch takes a microsecond to write its text.
_known: dict[int, Schema | None] = {0: None}


def facts(type_) -> Facts:
    """Dtype, device and rank of a tensor type."""
    return Facts(_name_of(type_.dtype()), _name_of(type_.device()), type_.dim())


@cache
def _name_of(what: torch.dtype | torch.device | None) -> str | None:
    return None if what is None else str(what).removeprefix("torch.")


def refine(type_, found: Facts):
    """`type_` with those facts filled in that it lacks."""
    own = facts(type_)
    if own.rank is None and found.rank is not None:
        type_ = type_.with_sizes([None] * found.rank)
    if own.dtype is None and found.dtype is not None:
        type_ = type_.with_dtype(getattr(torch, found.dtype))
    if own.device is None and found.device is not None:
        type_ = type_.with_device(torch.device(found.device))
    return type_


def constant_of(value: Value) -> Any:
    """The Python value of an `is_constant` value, lists as tuples."""
    node = value.node()
    if node.kind() == LIST:
        return tuple(v.toIValue() for v in inputs(node))
    found = value.toIValue()
    return tuple(found) if isinstance(found, list) else found


def with_items(values: list[Value]) -> list[Value]:
    """`values` with the items of those that are lists of tensors instead of the lists; without None in such
    lists."""
    return [x for v in values for x in (filter(is_tensor, inputs(v.node())) if is_tensor_list(v) else [v])]
