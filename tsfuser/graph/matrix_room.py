"""Products of two matrices of 16 bits with sizes that do not hold whole accesses, as of 50,257 columns.

Such a product takes up to ten times as long as one of 50,264 columns. Before, in a forward, and its backward:

    %v = aten::_to_copy(%w, ...);  %t = aten::t(%v);  %y : BFloat16(4096, 50257) = aten::mm(%x, %t)
    %g : BFloat16(4096, 50257) = aten::_to_copy(...);  %dx = aten::mm(%g, %v);  %dv = aten::mm(%gt, %x)
becomes
    %v = aten::_to_copy(%w, ...);  %r = tsfuser::with_room(%v, -1)
    %y : BFloat16(4096, 50257, strides=[50264, 1]) = tsfuser::product_of_room(%x, %r, ...)
    %s = tsfuser::with_room(%g, -1);  %dx = tsfuser::product_of_room(%s, %r, ...);  ...

What groups compute they store with room (operand_room.py), which a matrix has behind both dims. Other
operands whose rows begin at no whole access, as a gradient that the graph gets, are copied with room once for
all products that read them, if that costs less than it saves. Of what else has no room, products make copies
(csrc_stubs/torchscript/room_products.cpp, which says which sizes count). The rows of a result with room lie
apart, and what reads it reads it so. What leaves the graph, or may depend on strides, is `aten::contiguous`
of the result, which a group makes while it reads that.

In: a graph with types. Out: the same graph. All sizes stay as they were, and so do the strides of the
program's results."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

import torch

from ..ir.layout import WHOLE_ACCESS
from . import operand_room
from .effects import Effects
from .functionalize import fresh_kinds
from .matmul_operands import OF_ROOM, PRODUCT, WITH_ROOM
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
    is_constant,
)

#: Kind -> the positions of both matrices.
_KINDS = {"aten::mm": (0, 1), PRODUCT: (0, 1), "aten::addmm": (1, 2)}
_GAPS = "may_have_gaps"  # attribute of the return node: the outputs that may have gaps
_CAST, _TURN, _CONTIGUOUS = "aten::_to_copy", "aten::t", "aten::contiguous"
#: Operations for each byte of a copy, from which on it costs less than it saves. On an H200 each saves 4 to 9
#: fs, and the copy of a byte takes 600 to 1,200. Other GPUs were not measured.
LEAST_OPERATIONS = 256


@dataclass(frozen=True)
class _Operand:
    """A matrix before `t`, if it is `turned`. `inner` and `outer` are dims in memory, -1 and -2, and
    `roles` what they are in the product: "m", "k", "n"."""

    value: Value
    turned: bool
    inner: int
    outer: int
    roles: dict[int, str]

    def size(self, dim: int) -> int:
        return shape(self.value)[0][dim]

    def has_inside(self, role: str) -> bool:
        return self.roles[self.inner] == role


@dataclass(frozen=True)
class _Product:
    node: Node
    left: _Operand
    right: _Operand
    bias: Value | None

    @property
    def columns(self) -> int:
        return shape(self.node.output())[0][1]

    @property
    def length(self) -> int:
        """Of each sum."""
        return shape(self.node.inputsAt(_KINDS[self.node.kind()][0]))[0][1]

    @property
    def operations(self) -> int:
        return 2 * prod(shape(self.node.output())[0]) * self.length

    @property
    def is_uneven(self) -> bool:
        """Whether rows in memory do not hold whole accesses, of an operand or of the result."""
        sizes = [self.columns, *(o.size(o.inner) for o in (self.left, self.right))]
        return any(map(operand_room.wants_room, sizes))


def make_matrix_room(graph: Graph) -> Graph:
    """Has products use room, and groups make it."""
    products = [p for node in all_nodes_of(graph, tuple(_KINDS)) if (p := _product(node)) and p.is_uneven]
    if not products:
        return graph
    effects = Effects(graph)
    made: dict[int, Value] = {}
    copied = _worth_a_copy(products)
    for product in products:
        for operand in (product.left, product.right):
            value = operand.value
            if value.unique() in made or not _helps(product, operand):
                continue
            if (_is_stored(value) or value.unique() in copied) and not effects.is_written(value):
                made[value.unique()] = _with_room(graph, operand)
    for product in products:
        _use_room(graph, product, made, effects)
    return graph


def allow_gaps(graph: Graph, outputs: Iterable[int]) -> None:
    """Notes that nobody can tell gaps between the rows of these outputs."""
    graph.return_node().is_(_GAPS, list(outputs))


def has_gaps(value: Value) -> bool:
    """Whether rows of the matrix lie apart."""
    sizes, strides = shape(value)
    return sizes is not None and strides not in ([sizes[1], 1], [1, sizes[0]])


def _product(node: Node) -> _Product | None:
    """The product, if it is one of two large matrices on a device whose libraries read whole accesses."""
    places = _KINDS[node.kind()]
    a, b = (node.inputsAt(k) for k in places)
    if not all(map(_is_narrow_matrix, (a, b, node.output()))):
        return None
    if facts(a.type()).dtype != facts(b.type()).dtype:
        return None
    bias = node.inputsAt(0) if places == (1, 2) else None
    if bias is not None and not _is_row(bias, node):
        return None
    left, right = _operand(a, "mk"), _operand(b, "kn")
    product = _Product(node, left, right, bias) if left and right else None
    return product if product and product.operations >= operand_room.LEAST else None


def _is_narrow_matrix(value: Value) -> bool:
    return len(shape(value)[0] or ()) == 2 and operand_room.is_narrow(value)


def _is_row(bias: Value, node: Node) -> bool:
    """Whether `addmm` adds `bias` as it is to each row."""
    factors = inputs(node)[3:]
    if not all(map(is_constant, factors)) or any(constant_of(v) != 1 for v in factors):
        return False
    same_dtype = facts(bias.type()).dtype == facts(node.output().type()).dtype
    return same_dtype and shape(bias)[0] == shape(node.output())[0][1:]


def _operand(value: Value, roles: str) -> _Operand | None:
    turned = False
    while value.node().kind() == _TURN and shape(value.node().inputsAt(0))[0] is not None:
        value, turned, roles = value.node().inputsAt(0), not turned, roles[::-1]
    strides = shape(value)[1]
    if 1 not in strides:
        return None
    inner = -1 if strides[-1] == 1 else -2
    return _Operand(value, turned, inner, -3 - inner, {-2: roles[0], -1: roles[1]})


def _helps(product: _Product, operand: _Operand) -> bool:
    """Whether the product can use room behind the operand."""
    if operand_room.wants_room(operand.size(operand.inner)):
        return True
    if not operand_room.wants_room(operand.size(operand.outer)):
        return False
    role = operand.roles[operand.outer]
    return role == "n" or (role == "k" and any(o.has_inside("k") for o in (product.left, product.right)))


def _worth_a_copy(products: Iterable[_Product]) -> set[int]:
    """The operands whose rows in memory begin at no whole access, and whose products save more than a copy
    costs. Without one, each of these products makes its own."""
    operations: dict[int, int] = {}
    bytes_of: dict[int, int] = {}
    for product in products:
        for operand in (product.left, product.right):
            key, (sizes, strides) = operand.value.unique(), shape(operand.value)
            if operand_room.wants_room(operand.size(operand.inner)) and strides[operand.outer] % WHOLE_ACCESS:
                operations[key] = operations.get(key, 0) + product.operations
                bytes_of[key] = prod(sizes) * operand.value.type().dtype().itemsize
    return {key for key, count in operations.items() if count >= LEAST_OPERATIONS * bytes_of[key]}


def _is_stored(value: Value) -> bool:
    """Whether a group stores the matrix."""
    node = value.node()
    if node.kind() == _CAST and row_of(node) is not None:
        return node.inputsAt(0).type().dtype() != value.type().dtype()
    return operand_room.is_stored(value)


def _with_room(graph: Graph, operand: _Operand) -> Value:
    """The operand with room, for all readers that may read it so."""
    value, maker = operand.value, operand.value.node()
    has_gaps = operand_room.wants_room(operand.size(operand.inner))
    if maker.kind() == "prim::Param":
        first = next(iter(graph.nodes()))
        room = insert(graph, first, WITH_ROOM, [value, constant_before(graph, first, -1)]).output()
    else:
        number = constant_before(graph, maker, -1)
        room = graph.create(WITH_ROOM, [value, number], 1).insertAfter(maker).output()
    room.setType(_with_gaps(value) if has_gaps else value.type())
    for use in list(value.uses()):
        if use.user != room.node() and (not has_gaps or _reads_gaps(use)):
            use.user.replaceInput(use.offset, room)
    for turn in [use.user for use in room.uses() if use.user.kind() == _TURN]:
        for again in [use.user for use in turn.output().uses() if use.user.kind() == _TURN]:
            again.output().replaceAllUsesWith(room)  # a view would not show the room
    return room


def _with_gaps(value: Value):
    """The type of a matrix whose rows, or columns, begin at whole accesses."""
    (rows, columns), strides = shape(value)
    wide = [operand_room.whole_accesses(columns), 1]
    if strides[-1] != 1:
        wide = [1, operand_room.whole_accesses(rows)]
    like = torch.empty_strided((rows, columns), wide, dtype=value.type().dtype(), device="meta")
    return torch._C.TensorType.create_from_tensor(like).with_device(value.type().device())


def _reads_gaps(use: torch._C.Use, views: list[Node] | None = None) -> bool:
    """Whether the reader computes the same of a tensor with gaps, perhaps behind views, and nobody can tell.
    `views` gets those that would raise."""
    node = use.user
    if node.kind() == "prim::Return":
        return node.hasAttribute(_GAPS) and use.offset in getattr(node, "is")(_GAPS)
    if operand_room.hands_on(node):
        if node.kind() == operand_room.VIEW and views is not None:
            views.append(node)
        return all(_is_inside_and_reads_gaps(inner, views) for inner in node.output().uses())
    return node.kind() in operand_room.QUESTIONS or node.kind() in fresh_kinds()


def _split_views(graph: Graph, value: Value) -> None:
    """Gives those readers of views that can read gaps views of their own: others may need a copy without."""
    for use in list(value.uses()):
        node = use.user
        if not operand_room.hands_on(node) or _reads_gaps(use):
            continue
        _split_views(graph, node.output())
        able = [inner for inner in node.output().uses() if _is_inside_and_reads_gaps(inner)]
        if able:
            again = graph.createClone(node, lambda v: v).insertBefore(node)
            for inner in able:
                inner.user.replaceInput(inner.offset, again.output())


def _is_inside_and_reads_gaps(use: torch._C.Use, views: list[Node] | None = None) -> bool:
    return use.user.kind() != "prim::Return" and _reads_gaps(use, views)


def _use_room(graph: Graph, product: _Product, made: dict[int, Value], effects: Effects) -> None:
    """Puts the product with room in the place of the plain one."""
    node, result = product.node, product.node.output()
    has_gaps = operand_room.wants_room(product.columns)
    if has_gaps and effects.is_written(result):
        return
    if has_gaps:
        _split_views(graph, result)
    others = [use for use in result.uses() if not _reads_gaps(use)]
    # what reads the result anyway makes a copy for others in half the time
    least = LEAST_OPERATIONS // (2 if len(others) < len(result.uses()) else 1)
    if has_gaps and others and product.length < least:
        return  # the copy would cost more than is saved
    operands = [made.get(o.value.unique(), o.value) for o in (product.left, product.right)]
    bias = product.bias if product.bias is not None else constant_before(graph, node, None)
    choices = [product.left.turned, product.right.turned, has_gaps, LEAST_OPERATIONS]
    constants = [constant_before(graph, node, choice) for choice in choices]
    new = insert(graph, node, OF_ROOM[PRODUCT], [*operands, bias, *constants])
    new.output().setType(_with_gaps(result) if has_gaps else result.type())
    if has_gaps and others:
        dense = insert(graph, node, _CONTIGUOUS, [new.output(), constant_before(graph, node, 0)]).output()
        dense.setType(result.type())
        for use in others:
            use.user.replaceInput(use.offset, dense)
    views: list[Node] = []
    for use in list(result.uses()) if has_gaps else []:
        _reads_gaps(use, views)
    result.replaceAllUsesWith(new.output())
    node.destroy()
    operand_room.reshape_instead(graph, views)
