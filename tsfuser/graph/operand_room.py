"""Room for whole accesses behind operands of products of matrices.

The libraries that multiply matrices of 16 bits read 16 bytes at a time where rows hold whole accesses of 8
elements, and begin at one. Windows of 49 positions, or texts of 77 words, do not: their products take twice
as long. So a group that computes such an operand stores zeros behind its rows, or behind its matrices, and
the product, which sees that (csrc_stubs/torchscript/room_products.cpp), is one of larger matrices, of which
the result is a part. Before:

    %p : BFloat16(6144, 49, 49) = aten::softmax(...);  %o = aten::matmul(%p, %v)
becomes
    %r = tsfuser::with_room(%p, -1);  %w = tsfuser::with_room(%v, -2);  %o = tsfuser::product(%r, %w)

In: a graph with types. Out: the same, with room behind what groups compute. Sizes
are what they were; so are results, but for zeros that are added. Where the sizes of a later call are
multiples of 8, nothing is stored. A result that the program may see stays a tensor of its own."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from ..ir.layout import WHOLE_ACCESS
from .effects import Effects, may_return_operand
from .matmul_operands import (
    BACKWARD_OTHER,
    GRADIENTS,
    OF_ROOM,
    PACKED,
    PRODUCT,
    WITH_ROOM,
    are_batches,
    fresh,
    is_copied,
)
from .rows import row_of
from .worth import shape
from .wrapper import Graph, Node, Value, all_nodes_of, constant_of, facts, inputs, insert, is_tensor

#: Ops that ask for what is the same of a part.
_QUESTIONS = frozenset(("aten::size", "aten::dim", "aten::numel", "prim::dtype", "prim::device"))
#: Ops of autodiff's that may return an operand.
_HAND_ON = frozenset(("prim::AutogradAdd", "aten::_grad_sum_to_size"))
# attributes of a product whose result, or whose operand, the program does not see
_RESULT, _OPERANDS = "result_inside", ("self_inside", "other_inside")
DEVICES = ("cuda",)  # whose libraries read so
LEAST = 1 << 18  # elements of a product's operands: with fewer, its time does not count
LEAST_OF_ZEROS = 4  # elements for each zero


def make_room(graph: Graph) -> Graph:
    """Inserts what makes room, and has products use it."""
    products = all_nodes_of(graph, tuple(OF_ROOM))
    wanted = [(node, k, dim) for node in products for k, dim in _wanted(node)]
    effects = Effects(graph) if wanted else None
    made: dict[tuple[int, int], Value] = {}
    for node, k, dim in wanted:
        value = node.inputsAt(k)
        if not effects.is_written(value):
            inside = node.hasAttribute(_OPERANDS[k])
            node.replaceInput(k, _room_behind(graph, value, dim, inside, made))
    for node in products:
        _choose_kind(graph, node)
    return graph


def may_be_parts(graph: Graph, is_inside: Callable[[Value], bool]) -> None:
    """Notes which results and operands of the graph's products are `is_inside`: the program sees none of them,
    though the graph may return them."""
    for node in all_nodes_of(graph, (PRODUCT,)):
        values = zip((_RESULT, *_OPERANDS), (node.output(), *inputs(node)))
        for name in (name for name, value in values if is_inside(value) and is_inside(_source(value))):
            node.i_(name, 1)


def _wanted(node: Node) -> list[tuple[int, int]]:
    """The operands behind which room makes the product faster, and the dim that is to have it."""
    given = inputs(node)[:2]
    a, b = map(_source, given)  # what packs has no type yet
    if not _is_uneven(a, b):
        return []
    stored = [_is_stored(v) for v in given]
    if node.kind() in GRADIENTS:  # of these the gradient; what else they read is kept by the forward
        k = int(node.kind() == BACKWARD_OTHER)
        return [(k, -1)] if _wants_room(shape((a, b)[k])[0][-1]) and stored[k] else []
    return _wanted_by_product(a, b, stored) if are_batches(a, b) else []


def _wanted_by_product(a: Value, b: Value, stored: list[bool]) -> list[tuple[int, int]]:
    inner, columns = shape(b)[0][-2:]
    if inner % WHOLE_ACCESS:
        return [(0, -1), (1, -2)] if _wants_room(inner) and all(stored) else []
    return [(1, -1)] if _wants_room(columns) and stored[1] else []


def _is_read_so(value: Value) -> bool:
    """Whether it is a batch of matrices of 16 bits on a device whose libraries read whole accesses."""
    if not is_tensor(value) or shape(value)[0] is None or len(shape(value)[0]) < 3:
        return False
    known = facts(value.type())
    return known.dtype in ("float16", "bfloat16") and (known.device or "").startswith(DEVICES)


def _is_large(a: Value, b: Value) -> bool:
    return sum(prod(shape(v)[0]) for v in (a, b)) >= LEAST


def _source(value: Value) -> Value:
    """What is packed, or gets room, where the value is that."""
    return value.node().inputsAt(0) if value.node().kind() in (PACKED, WITH_ROOM) else value


def _is_stored(value: Value) -> bool:
    """Whether a group stores the operand: it computes that, perhaps cast or viewed then, or it packs it."""
    source = _source(value)
    maker = source.node()
    while (found := row_of(maker)) and (found[0].is_view or may_return_operand(maker)):
        maker = maker.inputsAt(0).node()
    computed = found is not None and maker.kind() in fresh()
    return computed or (value.node().kind() != "prim::Param" and is_copied(source))


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
        number = graph.insertConstant(dim)
        number.node().moveBefore(maker)
        room = graph.create(WITH_ROOM, [source, number], 1).insertAfter(maker).output()
        room.setType(source.type().contiguous())
        if source.unique() != value.unique():
            value.replaceAllUsesWith(room)
            maker.destroy()
        if inside:
            source.replaceAllUsesAfterNodeWith(room.node(), room)
        made[key] = room
    return made[key]


def _choose_kind(graph: Graph, node: Node) -> None:
    """Has a product use the room of its operands, if there may be some, and the program does not see its
    result where that is a part."""
    pair = [v.node() for v in inputs(node)[:2]]
    if node.kind() in GRADIENTS:  # what the forward has kept comes with room, which its profile does not show
        fits = _is_uneven(*map(_source, inputs(node)[:2])) and _may_be_part(node.output(), returned=False)
    else:
        rooms = [constant_of(n.inputsAt(1)) if n.kind() == WITH_ROOM else 0 for n in pair]
        whole = rooms[0] != -2 and rooms[1] != -1
        fits = any(rooms) and (whole or _may_be_part(node.output(), returned=node.hasAttribute(_RESULT)))
    if fits:
        made = insert(graph, node, OF_ROOM[node.kind()], inputs(node))
        made.copyMetadata(node)
        made.output().setType(node.output().type())
        node.output().replaceAllUsesWith(made.output())
        node.destroy()


def _is_uneven(a: Value, b: Value) -> bool:
    """Whether they are large batches of which some matrices do not hold whole accesses."""
    if not (_is_read_so(a) and _is_read_so(b) and _is_large(a, b)):
        return False
    return any(map(_wants_room, (size for v in (a, b) for size in shape(v)[0][-2:])))


def _wants_room(size: int) -> bool:
    """Whether a dim of that size does not hold whole accesses, and zeros would not be much of it."""
    return 0 < -size % WHOLE_ACCESS <= size // LEAST_OF_ZEROS


def _may_be_part(result: Value, returned: bool) -> bool:
    """Whether nobody can tell the result from a tensor of its own: all that reads it makes new tensors, or
    asks for its sizes, perhaps behind casts and views that keep its rows. `returned`: the graph may return
    it."""
    for use in result.uses():
        node = use.user
        if node.kind() == "prim::Return":
            if not returned:
                return False
        elif node.kind() in _HAND_ON or may_return_operand(node):
            if not (_keeps_rows(node, result) and _may_be_part(node.output(), returned)):
                return False
        elif node.kind() not in _QUESTIONS and node.kind() not in fresh():
            return False
    return True


def _keeps_rows(node: Node, operand: Value) -> bool:
    """Whether the op, which may return its operand or a view of it, does not mind a gap behind each row."""
    if node.outputsSize() != 1 or node.output().type().kind() != "TensorType":
        return False
    if node.kind() not in ("aten::view", "aten::view_as"):
        return True
    before, after = shape(operand)[0], shape(node.output())[0]
    return before is not None and after is not None and before[-1:] == after[-1:]
