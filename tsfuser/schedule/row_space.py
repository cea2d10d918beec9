"""A domain as rows.

In: a segment whose reductions run over the contiguous dim. Out: `Rows`: the dims of a row, how many rows
there are, how long they are, and what is read along them. Example: layer_norm over the last dim of x[64, 32,
1024] is 2048 rows of 1024 elements; batch_norm over x[8, 16, 196] is 16 rows of 1568 elements, in 8 pieces
each.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..ir import size as sz
from ..ir.call import Call
from ..ir.fusion import Reduce
from ..ir.size import Size
from ..segment import Segment
from .domain import Access, Domain, domain
from .placement import kept_terms


@dataclass(frozen=True)
class Rows:
    """A domain, and the names of the dims that make a row (`along`). The last of them is contiguous. `kept`:
    how many values of an element the registers that hold it keep beside it from one sweep to the next.
    `apart`: the names of the dims across rows over which columns are not added up."""

    space: Domain
    along: tuple[str, ...]
    kept: int = 0
    apart: tuple[str, ...] = ()

    @property
    def length(self) -> Size:
        """Elements of a row."""
        return sz.product([d.extent for d in self.space.dims if d.name in self.along])

    @property
    def count(self) -> Size:
        """How many rows there are."""
        return sz.product([d.extent for d in self.space.dims if d.name not in self.along])

    @property
    def count_apart(self) -> Size:
        """How many rows have columns of their own."""
        return sz.product([d.extent for d in self.space.dims if d.name in self.apart])

    @property
    def count_added(self) -> Size:
        """How many rows are added up to one row of columns."""
        outer = [d for d in self.space.dims if d.name not in self.along and d.name not in self.apart]
        return sz.product([d.extent for d in outer])

    @property
    def streamed(self) -> list[Access]:
        """The tensors whose elements differ from row to row, and so come from memory."""
        inner = len(self.space.dims) - 1
        across = [d for d, dim in enumerate(self.space.dims) if dim.name not in self.along]
        return [
            a for a in self.space.reads if a.moves(inner) and (not across or any(a.moves(d) for d in across))
        ]

    @property
    def shared(self) -> list[Access]:
        """The tensors that vary along a row, and that all rows share."""
        inner = len(self.space.dims) - 1
        return [a for a in self.space.reads if a.moves(inner) and a not in self.streamed]

    @property
    def fetchable(self) -> tuple[str, ...]:
        """The names of the streamed ones that asynchronous copies can fetch into shared memory."""
        return tuple(a.buffer.value.name for a in self.streamed if self.is_fetchable(a))

    def is_fetchable(self, access: Access) -> bool:
        """Whether asynchronous copies can fetch vectors of it."""
        return access.is_unit(len(self.space.dims) - 1) and not access.buffer.windows

    @property
    def bytes(self) -> int:
        """Bytes per element of these, and of lookups."""
        inner = len(self.space.dims) - 1
        looked_up = [a for a in self.space.lookups if a.moves(inner) or inner in a.indexed]
        return sum(a.itemsize for a in (*self.streamed, *looked_up))


def rows_of(
    call: Call, segment: Segment, like: Domain | None = None
) -> tuple[Rows, list[Reduce], list[Reduce]]:
    """The rows of a segment (if `like` is given, with its dims), the reductions along rows, and those over
    columns."""
    space = domain(call, segment) if like is None else domain(call, segment, like)
    inner = set(space.dims[-1].axes)
    along = [op for op in segment.reductions if set(op.axes) & inner]
    columns = [op for op in segment.reductions if op not in along]
    axes = set(along[0].axes) if along else inner
    added = axes.union(*(op.axes for op in columns))
    return (
        Rows(
            space,
            tuple(d.name for d in space.dims if set(d.axes) & axes),
            kept_terms(segment),
            tuple(d.name for d in space.dims if columns and not set(d.axes) & added),
        ),
        along,
        columns,
    )
