"""Room for whole accesses behind operands of products of matrices.

The libraries that multiply matrices of 16 bits read 16 bytes at a time where rows hold whole accesses of 8
elements, and begin at one. Windows of 49 positions, or texts of 77 words, do not: their products take twice
as long. So a group that computes such an operand stores zeros behind its rows, or behind its matrices, and
the product, which sees that (csrc_stubs/torchscript/room_products.cpp), is one of larger matrices, of which
the result is a part. Before:

    %p : BFloat16(6144, 49, 49) = aten::softmax(...);  %o = aten::matmul(%p, %v)
becomes
    %r = tsfuser::with_room(%p, -1);  %w = tsfuser::with_room(%v, -2);  %o = tsfuser::product_of_room(%r, %w)

In: a graph with types. Out: the same, with room behind results of groups. Sizes and values stay what they
were: sums get further terms that are zero. A result is a part of a larger tensor only where nobody can tell:
nothing writes to it, what reads it makes new tensors, and the program does not get it."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from ..ir.layout import LEAST_BEFORE_ZERO, WHOLE_ACCESS
from .effects import Effects, may_return_operand
from .functionalize import fresh_kinds
from .matmul_operands import (
    BACKWARD_OTHER,
    GRADIENTS,
    OF_ROOM,
    PACKED,
    PLAIN,
    PRODUCT,
    WITH_ROOM,
    are_batches,
    is_copied,
)
from .rows import row_of
from .worth import shape
from .wrapper import (
    Graph,
    Node,
    Value,
    all_nodes_of,
    constant_before,
    constant_of,
    facts,
    inputs,
    insert,
    is_tensor,
)

#: Queries that a view of the padded memory answers as the dense tensor does.
QUESTIONS = frozenset(("aten::size", "aten::dim", "aten::numel", "prim::dtype", "prim::device"))
#: Views as other dims: one that raises where memory has gaps, and those that copy then.
VIEW, _RESHAPE = "aten::view", ("aten::reshape", "aten::flatten")
# attributes of a product whose result, or whose operand, the program does not see
_RESULT, _OPERANDS = "result_inside", ("self_inside", "other_inside")
DEVICES = ("cuda",)  # whose libraries read so
NO_COPIES = -1  # operations for each byte of a copy: products make none
LEAST = 1 << 27  # operations of a product: with fewer, it takes as long with room (some us on an H200)


def make_room(graph: Graph) -> Graph:
    """Inserts what makes room, and has products use it."""
    products = [node for node in all_nodes_of(graph, tuple(OF_ROOM)) if _is_uneven(node)]
    if not products:
        return graph
    effects = Effects(graph)
    made: dict[tuple[int, int], Value] = {}
    wanted = [(node, *how) for node in products for how in _wanted(node)]
    for node, k, dim in wanted:
        value = node.inputsAt(k)
        if not effects.is_written(value):
            inside = node.hasAttribute(_OPERANDS[k])
            node.replaceInput(k, _room_behind(graph, value, dim, inside, made))
    for node in products:
        _choose_kind(graph, node, effects)
    return graph


def may_be_parts(graph: Graph, is_inside: Callable[[Value], bool]) -> None:
    """Notes which results and operands of a graph's products are `is_inside`: the program does not see them,
    though the graph may return them."""
    for node in all_nodes_of(graph, (PRODUCT,)):
        values = zip((_RESULT, *_OPERANDS), (node.output(), *inputs(node)))
        for name in (name for name, value in values if is_inside(value) and is_inside(_source(value))):
            node.i_(name, 1)


def may_have_gaps(graph: Graph, value: Value) -> bool:
    """Whether a product of the graph may have made the tensor a part, or it may be kept with room: then
    it was profiled without gaps, and has some in later calls."""
    if not _is_narrow_batch(value) or not any(map(wants_room, shape(value)[0][-2:])):
        return False
    return any(graph.findNode(kind, True) is not None for kind in PLAIN)


def _is_uneven(node: Node) -> bool:
    """Whether the product is one of large batches, of which some matrices do not hold whole accesses."""
    a, b = map(_source, inputs(node)[:2])
    if not (_is_narrow_batch(a) and _is_narrow_batch(b) and are_batches(a, b)):
        return False
    sizes = [shape(v)[0] for v in (a, b)]
    return 2 * prod(sizes[0]) * sizes[1][-1] >= LEAST and any(wants_room(n) for s in sizes for n in s[-2:])


def wants_room(size: int) -> bool:
    """Whether a dim of that size does not hold whole accesses, and zeros would not be much of it."""
    return 0 < -size % WHOLE_ACCESS <= size // LEAST_BEFORE_ZERO


def whole_accesses(size: int) -> int:
    """The size with the room behind it."""
    return size + -size % WHOLE_ACCESS


def _wanted(node: Node) -> list[tuple[int, int]]:
    """The operands behind which room makes the product faster, and the dim that is to have it."""
    given = inputs(node)[:2]
    stored = [is_stored(v) for v in given]
    sizes = [shape(_source(v))[0][-2:] for v in given]  # what packs has no type yet
    if node.kind() in GRADIENTS:  # of these the gradient; what else they read is kept by the forward
        k = int(node.kind() == BACKWARD_OTHER)
        return [(k, -1)] if wants_room(sizes[k][1]) and stored[k] else []
    inner, columns = sizes[1]
    if inner % WHOLE_ACCESS:
        return [(0, -1), (1, -2)] if wants_room(inner) and all(stored) else []
    return [(1, -1)] if wants_room(columns) and stored[1] else []


def _is_narrow_batch(value: Value) -> bool:
    """Whether it is a batch of matrices of 16 bits on a device whose libraries read whole accesses."""
    if not is_tensor(value) or shape(value)[0] is None or len(shape(value)[0]) < 3:
        return False
    return is_narrow(value)


def is_narrow(value: Value) -> bool:
    """Whether the tensor has 16 bits, on a device whose libraries read whole accesses."""
    known = facts(value.type())
    return known.dtype in ("float16", "bfloat16") and (known.device or "").startswith(DEVICES)


def _source(value: Value) -> Value:
    """What is packed, or gets room, where the value is that."""
    return value.node().inputsAt(0) if value.node().kind() in (PACKED, WITH_ROOM) else value


def is_stored(value: Value) -> bool:
    """Whether a group stores the operand: it computes that, perhaps cast or viewed then, or it packs it."""
    source = _source(value)
    maker = source.node()
    while (found := row_of(maker)) and (found[0].is_view or may_return_operand(maker)):
        maker = maker.inputsAt(0).node()
    if found is not None and maker.kind() in fresh_kinds():
        return True
    return value.node().kind() != "prim::Param" and is_copied(source)  # behind which a node can stand


def _room_behind(
    graph: Graph, value: Value, dim: int, inside: bool, made: dict[tuple[int, int], Value]
) -> Value:
    """`value` with room, made where it is. What the program does not see is kept with its room, too, and not
    once more without."""
    if value.node().kind() == WITH_ROOM:
        return value
    key = value.unique(), dim
    if key not in made:
        maker, source = value.node(), _source(value)
        number = constant_before(graph, maker, dim)
        room = graph.create(WITH_ROOM, [source, number], 1).insertAfter(maker).output()
        room.setType(source.type().contiguous())
        if not is_reshaped(source):
            if source.unique() != value.unique() and (inside or is_copied(source)):
                _return_instead(value, room)
            if inside:
                _return_instead(source, room)
        made[key] = room
    return made[key]


def _return_instead(value: Value, room: Value) -> None:
    """Has the graph return `room` in the place of `value`. What else reads that may not do with gaps."""
    for use in list(value.uses()):
        if use.user.kind() == "prim::Return":
            use.user.replaceInput(use.offset, room)
    if not value.node().hasUses():
        value.node().destroy()


def is_reshaped(value: Value) -> bool:
    """Whether the graph has a view of the value as other dims, perhaps behind other views and casts. If it is
    kept, the backward may have that view as well, which would raise where memory has gaps."""
    for node in (use.user for use in value.uses()):
        found = row_of(node)
        if found is not None and (found[0].reshapes or (hands_on(node) and is_reshaped(node.output()))):
            return True
    return False


def _choose_kind(graph: Graph, node: Node, effects: Effects) -> None:
    """Has a product use the room of its operands, if there may be some, and nobody can tell its result from a
    tensor of its own."""
    kind, result = node.kind(), node.output()
    if kind in GRADIENTS:  # what the forward has kept comes with room, which its profile does not show
        some, is_cut = True, True
    else:
        pair = [v.node() for v in inputs(node)[:2]]
        rooms = [constant_of(n.inputsAt(1)) if n.kind() == WITH_ROOM else 0 for n in pair]
        some, is_cut = any(rooms), rooms[0] == -2 or rooms[1] == -1
    views: list[Node] = []
    if not some or (is_cut and not _may_be_part(result, node.hasAttribute(_RESULT), effects, views)):
        return
    operands = inputs(node)
    if kind == PRODUCT:
        choices = (None, False, False, is_cut, NO_COPIES)
        operands += [constant_before(graph, node, choice) for choice in choices]
    made = insert(graph, node, OF_ROOM[kind], operands)
    made.copyMetadata(node)
    made.output().setType(result.type())
    result.replaceAllUsesWith(made.output())
    node.destroy()
    reshape_instead(graph, views)


def reshape_instead(graph: Graph, views: list[Node]) -> None:
    """Puts reshapes in the place of views that would raise where memory has gaps."""
    for view in views:
        reshape = insert(graph, view, _RESHAPE[0], inputs(view))
        reshape.output().setType(view.output().type())
        view.output().replaceAllUsesWith(reshape.output())
        view.destroy()


def _may_be_part(result: Value, returned: bool, effects: Effects, views: list[Node]) -> bool:
    """Whether nobody can tell the result from a tensor of its own: nothing writes to it, and what reads it
    makes new tensors, or asks for its sizes, perhaps behind casts and views. `returned`: the graph may return
    it. `views` gets the nodes that would raise."""
    if effects.is_written(result):
        return False
    for use in result.uses():
        node = use.user
        if node.kind() == "prim::Return":
            if not returned or is_reshaped(result):
                return False
        elif hands_on(node):
            views += [node] if node.kind() == VIEW else []
            if not _may_be_part(node.output(), returned, effects, views):
                return False
        elif node.kind() not in QUESTIONS and node.kind() not in fresh_kinds():
            return False
    return True


def hands_on(node: Node) -> bool:
    """Whether the op may return its operand, or a view of it, and would with gaps in its memory, too."""
    found = row_of(node)
    if found is None:
        return node.kind() == "prim::AutogradAdd"
    if found[0].reshapes:
        return node.kind() in (VIEW, *_RESHAPE)
    return found[0].is_view or may_return_operand(node)
