"""Picks: one load from the tensor that has the element, where several are joined.

In: the picks of a segment, and its schedule. Out: the segment with those of them that are one load, and their
statements. Example, of cat((x0, x1, x2), 1), of 16-byte vectors:

    cat_4_piece = passed<3>(args.cat_4_ends, i1)
    cat_4_from = args.cat_4_from[cat_4_piece]
    cat_4_offset = args.cat_4_offsets[cat_4_piece]
    cat_4_v = cat_4_from[cat_4_offset + i0 * args.cat_4_stride0 + i1 .. +8]
"""

from __future__ import annotations

from ..ir import size as sz
from ..ir.size import Size
from ..schedule.loops import Schedule
from ..schedule.picks import Pick, picks_of, with_picks
from ..segment import Segment
from . import index as ix
from .combine import conversion
from .elements import Elements
from .index import Expr, Var
from .indices import Indices
from .loop_ir import Compute, Let, Load, Stmt

MOST_SEARCHED_BY_LANE = 8  #: pieces beyond which a lane of a host that looks for its own is the faster one


def picked_in(segment: Segment, schedule: Schedule) -> tuple[Segment, frozenset[str]]:
    """`segment` with its picks that are one load, and the names of the loads that are left to them."""
    return with_picks(segment, [pick for pick in picks_of(segment) if _is_one_load(pick, schedule)])


def _is_one_load(pick: Pick, schedule: Schedule) -> bool:
    """Whether all elements of an access are of one piece, and no piece goes another way. A host's compiler
    makes vectors of a few choices, but of no search."""
    domain, own = schedule.domain, set(pick.pieces)
    elsewhere = {
        name for where in ("tile", "prefetched", "held", "kept") for name in schedule.values_in(where)
    }
    elsewhere |= {a.buffer.value.name for a in domain.loads if a.part_of}
    elsewhere |= {a.part_of for a in domain.loads}
    if own & elsewhere:
        return False
    if domain.numbered(pick.window)[0][-1] is sz.const(0):
        return True
    if schedule.is_vectorised:
        return len(own) > MOST_SEARCHED_BY_LANE
    row = domain.dims[-1].extent
    return not any(x.bind == "vector" and x.extent is row for x in schedule.loops)


def picked(elements: Elements, op: Pick, at: Indices) -> list[Stmt]:
    """The statements of one element."""
    params, name = elements.params, op.output.name
    loads = {a.buffer.value.name: a for a in elements.schedule.domain.loads}
    accesses = [loads[piece] for piece in op.pieces]
    ctype, register = op.output.dtype.ctype, op.output.dtype.register.ctype
    elements.registers[name] = register
    place, scale = elements.place(op.window, at, name)
    ends = [stop * scale for stop in op.stops]
    size = (1 << len(ends).bit_length()) - 1
    ends += [sz.const((1 << (63 if params.index == "int64_t" else 31)) - 1)] * (size - len(ends))
    table = params.table(f"{name}_ends", params.index, [("size", end) for end in ends])
    sources = [(a.buffer.kind.value, a.buffer.index) for a in accesses]
    pointers = params.table(f"{name}_from", f"const {ctype}*", sources)
    piece = Var(f"{name}_piece")
    made: list[Stmt] = [
        Let(piece.name, "int32_t", ix.Passed(table, size, place)),
        Let(f"{name}_from", f"const {ctype}*", ix.Entry(pointers, piece)),
    ]

    def of_piece(sizes: list[Size], wish: str) -> Expr:
        """The entry of the piece in `sizes`."""
        if all(size is sizes[0] for size in sizes):
            return params.size(sizes[0], wish)
        entries = params.table(wish, params.index, [("size", size) for size in sizes])
        made.append(Let(wish, params.index, ix.Entry(entries, piece)))
        return Var(wish)

    offset = of_piece([a.buffer.offset for a in accesses], f"{name}_offset")
    for d, dim in enumerate(elements.schedule.domain.dims):
        if any(a.moves(d) for a in accesses):
            stride = of_piece([a.strides[d] for a in accesses], f"{name}_stride{d}")
            offset = ix.add(offset, ix.mul(at.of[dim.name], stride))
    read = Load(f"{name}_m", ctype, f"{name}_from", offset, elements.guard(at, *accesses))
    return [*made, read, Compute(name, register, conversion(ctype, register), (read.name,))]
