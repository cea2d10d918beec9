"""Moves views of groups' results out of `with torch.jit.strict_fusion():`.

In: a graph whose groups are guarded. Out: the same graph. Torch complains of every node between the
`prim::Enter` and the `prim::Exit` of that block which is not inside of a guarded group. A view costs nothing
and stays outside of groups, since it has to share memory: where only what comes behind the block reads it, it
can be made there as well. Example:

    prim::Enter(%c); %y = prim::If(%guard) ...; %z = aten::expand(%y, %sizes); %_ = prim::Exit(%c)
becomes
    prim::Enter(%c); %y = prim::If(%guard) ...; %_ = prim::Exit(%c); %z = aten::expand(%y, %sizes)
"""

from __future__ import annotations

from ...graph.evaluate import OPERATIONS, QUESTIONS, is_plain
from ...graph.rows import row_of
from ...graph.wrapper import GROUP, LIST, Block, Graph, Node, all_blocks, blocks, nodes_in, nodes_of, outputs

_STRICT = "__torch__.torch.jit.strict_fusion"


def move_views_out(graph: Graph) -> None:
    """Moves views of groups' results, and the sizes that only they read, behind the strict blocks."""
    for block in list(all_blocks(graph)):
        for end in nodes_of(block, ("prim::Exit",)):
            if end.inputsAt(0).type().str() == _STRICT:
                _move_views_behind(nodes_in(block), end)


def _move_views_behind(nodes: list[Node], end: Node) -> None:
    inside = nodes[: nodes.index(end)]
    for k in reversed(range(len(inside))):
        node = inside[k]
        if node.kind() == "prim::Enter":
            return
        readers = [use.user for value in outputs(node) for use in value.uses()]
        if _is_movable(node) and readers and all(reader.isAfter(end) for reader in readers):
            node.moveAfter(end)


def _is_movable(node: Node) -> bool:
    """Whether the node is such a view, makes sizes, or joins results in a tuple."""
    if _is_view(node):
        return _leads_to_group(node)
    if node.kind() == "prim::TupleConstruct":
        return True
    makes_sizes = node.kind() == LIST or node.kind() in OPERATIONS or node.kind() in QUESTIONS
    return makes_sizes and all(is_plain(value.type()) for value in outputs(node))


def _is_view(node: Node) -> bool:
    found = row_of(node)
    return found is not None and found[0].is_view


def _leads_to_group(view: Node) -> bool:
    """Whether `view` is one of a group's result, or a view of such a view."""
    source = view.inputsAt(0).node()
    while _is_view(source):
        source = source.inputsAt(0).node()
    return source.kind() == GROUP or any(_holds_group(block) for block in blocks(source))


def _holds_group(block: Block) -> bool:
    return bool(nodes_of(block, (GROUP,)))
