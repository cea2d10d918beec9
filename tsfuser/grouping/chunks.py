"""Moves elementwise ops from before a chunk to behind it, where they join the groups that read the chunks.

Before: `%v = aten::add(%a, %b, 1);  %p, %q = prim::ConstantChunk[chunks=2, dim=1](%v)`. After: `%a0, %a1`
and `%b0, %b1` are chunks of %a and %b, broadcast to each other, and `%p = aten::add(%a0, %b0, 1)`, `%q`
alike. A chunk is a view and costs nothing; %v is not stored any more. Only where %v is read by nothing else,
each chunk by ops that can be fused alone, %a and %b are not made by such ops, and nothing involved is
written to."""

from __future__ import annotations

import torch

from .. import options
from ..graph.effects import Effects
from ..graph.rows import Knowledge, row_of
from ..graph.wrapper import (
    Block,
    Facts,
    Graph,
    Node,
    Value,
    all_blocks,
    inputs,
    insert,
    is_tensor,
    nodes_in,
    nodes_of,
    outputs,
    refine,
)
from .support import examine

CHUNK = "prim::ConstantChunk"
_LIST_OF_TENSORS = torch._C.ListType(torch._C.TensorType.get())


def move_chunks(graph: Graph) -> Graph:
    """Moves every chunk as far up as it goes."""
    blocks = [(block, nodes_of(block, (CHUNK,))) for block in all_blocks(graph)]
    if any(chunks for _, chunks in blocks):
        effects = Effects(graph)
        for block, waiting in blocks:
            while waiting:
                chunk = waiting.pop()
                if _may_move(chunk, block, effects, Knowledge()):
                    made = _move(graph, chunk)
                    waiting += made
                    for node in made:
                        effects.learn([*inputs(node), *outputs(node)], written=False)
    return graph


def _may_move(chunk: Node, block: Graph | Block, effects: Effects, knowledge: Knowledge) -> bool:
    """Whether the node that makes the operand of the chunk can move behind the chunk."""
    whole, maker = chunk.inputsAt(0), chunk.inputsAt(0).node()
    here = {v.unique() for node in nodes_in(block) for v in outputs(node)}
    found = row_of(maker)
    if (
        found is None
        or found[0].sizes != "broadcast"
        or maker.outputsSize() != 1
        or whole.unique() not in here
    ):
        return False
    tensors = [v for v in (whole, *inputs(maker), *outputs(chunk)) if is_tensor(v)]
    if any(effects.is_written(v) for v in tensors) or not all(knowledge.facts(v).known for v in tensors):
        return False
    if any(use.user.kind() != CHUNK and not _asks_for_sizes(use.user) for use in whole.uses()):
        return False
    if sum(use.user.kind() == CHUNK for use in whole.uses()) != 1:
        return False
    wide = _wide(maker)
    if len(wide) > 1 and any(_joins(v.node(), here, knowledge) for v in wide):
        return False  # it is in one group with them, which stores as much as they would
    readers = [use.user for v in outputs(chunk) for use in v.uses() if not _asks_for_sizes(use.user)]
    return bool(readers) and all(_joins(node, here, knowledge) for node in [maker, *readers])


def _wide(maker: Node) -> list[Value]:
    """The operands that have dims."""
    return [v for v in dict.fromkeys(inputs(maker)) if is_tensor(v) and v.type().dim()]


def _asks_for_sizes(node: Node) -> bool:
    return node.kind() == "aten::size" and node.inputsSize() == 1


def _joins(node: Node, here: set[int], knowledge: Knowledge) -> bool:
    """Whether the node, one of the block, can be fused, and is no view."""
    found = row_of(node)
    if found is None or found[0].is_view or not node.outputsSize() or node.outputsAt(0).unique() not in here:
        return False
    return examine(node, knowledge, options.state.skip_kinds).reason is None


def _move(graph: Graph, chunk: Node) -> list[Node]:
    """Does it; returns the chunks of the operands, which may be moved on."""
    whole, maker = chunk.inputsAt(0), chunk.inputsAt(0).node()
    wide = _wide(maker)
    graph.setInsertPoint(maker)
    sizes = _sizes(graph, maker, wide)
    for use in [use for use in whole.uses() if _asks_for_sizes(use.user)]:
        use.user.output().replaceAllUsesWith(sizes(use.user))
        use.user.destroy()
    made = [_chunk_of(graph, chunk, maker, v, like) for v, like in zip(_broadcast(graph, maker, wide), wide)]
    for i, part in enumerate(outputs(chunk)):
        mapping = {v.unique(): node.outputsAt(i) for v, node in zip(wide, made)}
        copy = graph.createClone(maker, lambda v: mapping.get(v.unique(), v))
        copy.insertBefore(chunk)
        copy.output().setType(_loose(part))
        part.replaceAllUsesWith(copy.output())
    chunk.destroy()
    maker.destroy()
    graph.setInsertPoint(graph.return_node())
    return made


def _broadcast(graph: Graph, place: Node, values: list[Value]) -> list[Value]:
    """The values as views of one common size."""
    if len(values) < 2:
        return values
    packed = insert(graph, place, "prim::ListConstruct", values)
    packed.output().setType(_LIST_OF_TENSORS)
    both = insert(graph, place, "aten::broadcast_tensors", [packed.output()])
    both.output().setType(_LIST_OF_TENSORS)
    unpacked = insert(graph, place, "prim::ListUnpack", [both.output()], len(values))
    return outputs(unpacked)


def _chunk_of(graph: Graph, chunk: Node, place: Node, value: Value, like: Value) -> Node:
    """The chunk of another value than before; `like`: of the same dtype and device."""
    made = insert(graph, place, CHUNK, [value], chunk.outputsSize())
    made.i_("chunks", chunk.i("chunks"))
    made.i_("dim", chunk.i("dim"))
    for part, before in zip(outputs(made), outputs(chunk)):
        facts = Facts(*_facts(like)[:2], before.type().dim())
        part.setType(refine(torch._C.TensorType.get(), facts))
    return made


def _sizes(graph: Graph, place: Node, values: list[Value]):
    """A function that gives, for a node that asked for the sizes of the result, those of the operands."""
    made: list[Value] = []

    def of(asked: Node) -> Value:
        if not made:
            each = [insert(graph, place, "aten::size", [v]).output() for v in values]
            for size in each:
                size.setType(asked.output().type())
            if len(each) > 1:
                each = [insert(graph, place, "prim::BroadcastSizes", each).output()]
                each[0].setType(asked.output().type())
            made.append(each[0])
        return made[0]

    return of


def _facts(value: Value) -> Facts:
    type_ = value.type()
    return Facts(str(type_.dtype())[6:], str(type_.device()), type_.dim())


def _loose(value: Value):
    """Its type without sizes and strides."""
    return refine(torch._C.TensorType.get(), _facts(value))
