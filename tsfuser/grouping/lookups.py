"""Which nodes a lookup must not share a group with, as the tensor that it reads has to be in memory first.

In: a node that reads a tensor at places that another one holds. Out: nodes that compute that tensor. If the
lookup takes few of its elements, its group computes these itself (ir/lookups.py), from tensors in memory and
from sums along the dim of the lookup. Example, of logits x[N, C] with one class each:

    y = log_softmax(x * 0.5, 1);  gather(y, 1, i)       no node: y[n, i] is x[n, i] * 0.5 - offset[n]
    y = layer_norm(x, [C]).t();   gather(y, 0, i)       t
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod

from ..graph.effects import WRITES, effect
from ..graph.rows import row_of, tables_of
from ..graph.worth import shape
from ..graph.wrapper import Node, Value, constant_of, inputs, is_constant, is_tensor
from ..ops.table import Row

FEWER = 4  # elements of a table over elements that are taken from it, at least


class Lookups:
    """The nodes of a block that look elements up, and those that write to an operand, in order. `maker`: the
    position of a value's node, by the value's number. `may_be_fused` is asked about nodes."""

    def __init__(self, maker: Mapping[int, int], may_be_fused: Callable[[Value], bool]):
        self.maker, self.may_be_fused = maker, may_be_fused
        self.lookups: list[int] = []
        self.writers: list[int] = []

    def apart(self, i: int, node: Node) -> tuple[int, ...]:
        """The earlier positions with which `node`, at position `i`, must not share a group. Eager finds an
        index out of range before or after it writes, a group only afterwards."""
        apart: list[int] = []
        if tables_of(node):
            made = (self.maker.get(v.unique()) for v in kept_apart(node, self.may_be_fused))
            apart = [*(k for k in made if k is not None), *self.writers]
            self.lookups.append(i)
        if effect(node) == WRITES:
            apart += self.lookups
            self.writers.append(i)
        return tuple(apart)


def kept_apart(node: Node, may_be_fused: Callable[[Value], bool]) -> list[Value]:
    """Values that must be made in other groups than that of `node`."""
    tables = tables_of(node)
    dim = _dim(node, tables[0]) if tables else None
    if dim is None or not _takes_few(node, tables[0], dim):
        return tables
    apart, waiting, seen = tables[1:], [(tables[0], dim)], set()
    while waiting:
        value, dim = waiting.pop()
        if (value.unique(), dim) not in seen and may_be_fused(value):  # else it is in memory
            before = None if _is_part_of_sums(value, may_be_fused) else _before(value, dim)
            waiting += before or ()
            apart += [value] if before is None else []
        seen.add((value.unique(), dim))
    return apart


def _dim(node: Node, table: Value) -> int | None:
    """The only dim of the table that the node looks up, where its row says it and it is known."""
    row, schema = row_of(node)
    dim, rank = row.picked, len(shape(table)[0] or ())
    if isinstance(dim, str):
        given = node.inputsAt(schema.arguments.index(dim)) if dim else None
        dim = constant_of(given) if given is not None and is_constant(given) else None
    return dim % rank if isinstance(dim, int) and -rank <= dim < rank else None


def _takes_few(node: Node, table: Value, dim: int) -> bool:
    """Whether few elements are taken, and an index of the table's rank is as large along the other dims."""
    row, schema = row_of(node)
    index = node.inputsAt(schema.arguments.index(row.places))
    sizes, places, made = (shape(v)[0] for v in (table, index, node.outputsAt(0)))
    if sizes is None or places is None or made is None or sizes[dim] == 1:
        return False
    if len(sizes) == len(places) and places == made:  # one element for each index, beside those of the table
        if any(p != s for d, (p, s) in enumerate(zip(places, sizes)) if d != dim):
            return False
    return FEWER * max(prod(places), prod(made)) <= prod(sizes)


def _is_part_of_sums(value: Value, may_be_fused: Callable[[Value], bool]) -> bool:
    """Whether the value is a part of one that is not computed elementwise: its group would store that one."""
    found = row_of(value.node())
    if found is None or found[0].family != "parts":
        return False
    waiting, seen = inputs(value.node())[:1], set()
    while waiting:
        value = waiting.pop()
        if value.unique() in seen or not is_tensor(value) or not may_be_fused(value):
            continue
        seen.add(value.unique())
        row = row_of(value.node())
        if row is None or not (row[0].sizes == "broadcast" or row[0].is_view or _casts(row[0])):
            return True
        waiting += inputs(value.node())
    return False


def _casts(row: Row) -> bool:
    return row.family == "casts" and row.smooth and not row.asked


def _before(value: Value, dim: int) -> list[tuple[Value, int]] | None:
    """The operands of which the elements of `value` at places along `dim` are computed, each with that dim;
    None if they cannot be computed there alone. Empty if `value` does not vary along it."""
    sizes, node, found = shape(value)[0], value.node(), row_of(value.node())
    if sizes is None or found is None:
        return None
    if sizes[dim] == 1:
        return []
    row, schema = found
    if row.family == "scans":
        return None  # an element depends on all before it
    if row.along:
        along = constant_of(node.inputsAt(schema.arguments.index(row.along)))
        return [(node.inputsAt(0), dim)] if along % len(sizes) == dim else None
    if row.family == "casts":
        return [(node.inputsAt(0), dim)] if _casts(row) else None
    if row.sizes == "broadcast":
        read = [(v, dim - len(sizes) + len(shape(v)[0] or ())) for v in inputs(node) if is_tensor(v)]
        return [(v, d) for v, d in read if d >= 0]
    before = _dim_before(node, sizes, dim) if row.is_view else None
    return None if before is None else [(node.inputsAt(0), before)]


def _dim_before(node: Node, sizes: list[int], dim: int) -> int | None:
    """The dim of a view's operand that dim `dim` of the view is; None if it is none, or not known."""
    row, schema = row_of(node)
    given = {name: v for name, v in zip(schema.arguments, inputs(node)) if is_constant(v)}
    known = {name: constant_of(v) for name, v in given.items()}
    rank, before = len(sizes), shape(node.inputsAt(0))[0]
    if before is None:
        return None
    if row.sizes == "swapped" and {"dim0", "dim1"} <= known.keys():
        first, second = known["dim0"] % rank, known["dim1"] % rank
        return {first: second, second: first}.get(dim, dim)
    if row.sizes == "permuted" and ("dims" in known or "dims" not in schema.arguments):
        return known["dims"][dim] % rank if "dims" in known else rank - 1 - dim
    if row.sizes == "unsqueezed" and "dim" in known:
        at = known["dim"] % rank
        return None if dim == at else dim - (dim > at)
    if row.sizes == "selected" and "dim" in known:
        return dim + (dim >= known["dim"] % (rank + 1))
    if row.sizes == "sliced":
        return dim
    return len(before) - 1 if row.reshapes and dim == rank - 1 and before[-1:] == sizes[-1:] else None
