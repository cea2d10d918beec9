"""Casts of parts of a tensor, instead of a cast of the whole tensor of which views read parts.

In: a cast of an FX graph. Out: a cast of each part that is read, if groups take these casts. Before:

    y = _to_copy(x, dtype=float32);  z = upsample_backward(slice(y, 1, 0, 8));  relu(slice(y, 1, 8, 16))
becomes
    z = upsample_backward(_to_copy(slice(x, 1, 0, 8)));  relu(_to_copy(slice(x, 1, 8, 16)))

Now no kernel stores all of `y` for the second reader.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ....ops import table, without_row
from ..fx.insert import Insert, evaluate
from ..fx.strides import is_one_of, is_view, reads_strides
from ..fx.types import hint

#: Views whose results are parts of their first operand.
_PARTS = without_row.PARTS.union(
    f"{row.name}.{overload}" if overload else row.name
    for row in table.all_rows()
    if row.family == "parts"
    for overload in row.overloads
)


def cast_what_is_read(cast: fx.Node) -> bool:
    """Moves the cast behind the views that read it, if it has no other readers, and if no more elements are
    cast then."""
    questions = [user for user in cast.users if is_one_of(without_row.READ_SIZES, user)]
    views = [user for user in cast.users if user not in questions]
    if not (views and _keeps_all_but_dtype(cast) and all(is_one_of(_PARTS, v) for v in views)):
        return False
    parts = [part for view in views for part in _parts(view)]
    if not parts or not _is_less(parts, cast) or not all(may_be_dense(part) for part in parts):
        return False
    if is_written_between(cast, max(views)):
        return False
    for question in questions:
        question.update_arg(0, cast.args[0])
    for view in views:
        view.update_arg(0, cast.args[0])
        view.meta["val"] = evaluate(view)
        for part in _parts(view):
            _cast(part, cast)
    return True


def _cast(part: fx.Node, cast: fx.Node) -> None:
    """Gives the readers of the part a cast of the part instead."""
    part.meta["val"] = evaluate(part)
    made = Insert(part.next, cast)(cast.target, part, **cast.kwargs)
    part.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)
    for view in views_of(made):
        view.meta["val"] = evaluate(view)
    cast_what_is_read(made)


def _keeps_all_but_dtype(cast: fx.Node) -> bool:
    """Whether the cast's result has the device of its operand, and its order of dims in memory."""
    (operand,) = cast.args
    made, given = cast.meta.get("val"), operand.meta.get("val") if isinstance(operand, fx.Node) else None
    if not (isinstance(made, torch.Tensor) and isinstance(given, torch.Tensor)):
        return False
    plain = cast.kwargs.keys() <= {"dtype", "layout", "device"}
    strided = made.layout == given.layout == torch.strided
    return plain and strided and made.device == given.device


def _parts(view: fx.Node) -> list[fx.Node]:
    """The tensors that the view returns and something reads."""
    if isinstance(view.meta.get("val"), torch.Tensor):
        return [view]
    return [user for user in view.users if user.target is operator.getitem]


def _is_less(parts: list[fx.Node], cast: fx.Node) -> bool:
    """Whether the parts are together no larger than the whole, and no more kernels cast them than it: a group
    that reads a part casts it itself."""
    whole, *sizes = (hint(node.meta["val"].numel()) for node in (cast, *parts))
    if whole is None or None in sizes or sizes == [whole]:
        return False
    apart = sum(not all(map(has_row, _readers(part))) for part in parts)
    return sum(sizes) <= whole and apart <= 1


def may_be_dense(part: fx.Node) -> bool:
    """Whether the part may become dense, in memory of its own, and no reader can see that."""
    seen = (part, *views_of(part))
    if any(map(_is_one_channel, seen)):
        return False
    users = [user for node in seen for user in node.users]
    return not any(u.op == "output" or reads_strides(u) or _may_write(u) for u in users)


def _is_one_channel(part: fx.Node) -> bool:
    """Whether the part is one channel of images in channels last. torch takes it for row-major once it is
    dense, and with it what is joined from such channels."""
    found = part.meta.get("val")
    if not isinstance(found, torch.Tensor) or found.dim() not in (4, 5):
        return False
    sizes, strides = found.shape, found.stride()
    return statically_known_true(sizes[1] == 1) and not statically_known_true(strides[1] > strides[-1])


def views_of(node: fx.Node) -> Iterator[fx.Node]:
    """The views of the node's memory, each after the view that it is made from."""
    for user in sorted(node.users):
        if is_view(user):
            yield user
            yield from views_of(user)


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes that read elements of the node, directly or through views."""
    for seen in (node, *views_of(node)):
        readers = (user for user in seen.users if not is_one_of(without_row.READ_SIZES, user))
        yield from (user for user in readers if not is_view(user))


def has_row(node: fx.Node) -> bool:
    found = getattr(node.target, "_schema", None)
    return found is not None and table.find(found.name, found.overload_name) is not None


def is_written_between(first: fx.Node, last: fx.Node) -> bool:
    """Whether a node between these may change tensors."""
    node = first.next
    while node is not last:
        if _may_write(node):
            return True
        node = node.next
    return False


def _may_write(node: fx.Node) -> bool:
    """Whether the node may write to a tensor. Python's functions may, except those of numbers."""
    if node.target is operator.getitem:
        return False
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.is_mutable
    return any(isinstance(n.meta.get("val"), torch.Tensor) for n in node.all_input_nodes)
