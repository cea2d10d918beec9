"""Shape ops: what eager does as views is a relabeling of axes here.

A result has the axes of its operand in other dims, dims of size 1 more or less, or further axes along which
it does not change; a reshape cuts the loops of its operand as both shapes need it. A result never leaves a
group: the partition keeps a view whose result leaves outside, where it stays a view (grouping/views.py)."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import Refusal
from ..ir import size as sz
from ..ir.build import Builder
from ..ir.dtypes import DTYPES
from ..ir.fusion import Axis, Value
from ..ir.layout import Layout, contiguous, is_channels_last, is_contiguous, is_packed_channels_last
from ..ir.rematerialize import rematerialized
from ..ir.symbols import define
from ..ir.views import read_as, regrouped, through_memory, view
from .casts import clone
from .table import COMPLEX, CONVERTED, NUMERIC, composite, scalar_type

define("bits_as", "bit_cast<{ctype}>({0})", cheap=True)
_BITS = tuple([d for d in DTYPES.values() if d.kind in "ifp"])
for _dtype in _BITS:
    if _dtype.register is not _dtype:  # registers hold it as a float
        _names = _dtype.register.ctype, _dtype.ctype
        define(f"bits_as_{_dtype}", "convert<%s>(bit_cast<%s>({0}))" % _names, cheap=True)


def dim_of(rank: int, dim: int) -> int:
    """A dim that counts from the end or the start, counted from the start. Where there is none, 0 and -1 name
    it."""
    rank = max(rank, 1)
    dim = dim + rank if dim < 0 else dim
    if not 0 <= dim < rank:
        raise Refusal("a dim out of range is an error in eager")
    return dim


def _permuted(b: Builder, name: str, self: Value, order: Sequence[int]) -> Value:
    strides = b.layout(self).strides
    return view(b, name, self, [self.dims[d] for d in order], [strides[d] for d in order])


def _swapped(b: Builder, name: str, self: Value, first: int, second: int) -> Value:
    rank = len(self.dims)
    first, second = dim_of(rank, first), dim_of(rank, second)
    order = list(range(rank))
    if rank:
        order[first], order[second] = second, first
    return _permuted(b, name, self, order)


@composite("aten::permute", dtypes=CONVERTED, sizes="permuted", moves=True)
def permute(b: Builder, self, dims: list) -> Value:
    """`self` with its dims in the order `dims`"""
    rank = len(self.dims)
    order = [dim_of(rank, d) for d in dims]
    if sorted(order) != list(range(rank)):
        raise Refusal("a permutation that does not name every dim once is an error in eager")
    return _permuted(b, "permute", self, order)


@composite("aten::positive", dtypes=NUMERIC + COMPLEX, sizes="first", moves=True)
def positive(b: Builder, self) -> Value:
    """`self`; eager hands its operand on"""
    return _permuted(b, "positive", self, range(len(self.dims)))


@composite("aten::contiguous", dtypes=CONVERTED, sizes="first", moves=True)
def in_order(b: Builder, self, memory_format: int = 0) -> Value:
    """`self`, or its copy where memory does not hold it in the order of `memory_format`, without gaps"""
    layout, rank = b.layout(self), len(self.dims)
    if memory_format == 0:
        there = b.call.decide(sz.eq(sz.product(layout.sizes), 0)) or is_contiguous(b.call, layout)
    elif memory_format == 2 and rank == 4 or memory_format == 3 and rank == 5:
        there = is_packed_channels_last(b.call, layout)
    else:
        raise Refusal("contiguous in a memory format for another number of dims is an error in eager")
    return _permuted(b, "contiguous", self, range(rank)) if there else clone(b, self, memory_format)


@composite("tsfuser::in_format_of", dtypes=CONVERTED, sizes="first", moves=True, asked="like")
def in_format_of(b: Builder, self, like) -> Value:
    """`self` in channels-last where `like` is, else row-major"""
    memory_format = {4: 2, 5: 3}[len(self.dims)] if is_channels_last(b.call, b.layout(like)) else 0
    return in_order(b, self, memory_format)


@composite("aten::transpose", "int", dtypes=CONVERTED, sizes="swapped", autodiff_excludes=True, moves=True)
def transpose(b: Builder, self, dim0: int, dim1: int) -> Value:
    """`self` with two dims exchanged"""
    return _swapped(b, "transpose", self, dim0, dim1)


@composite("aten::swapaxes", dtypes=CONVERTED, sizes="own", moves=True)
def swapaxes(b: Builder, self, axis0: int, axis1: int) -> Value:
    """`self` with two dims exchanged"""
    return _swapped(b, "transpose", self, axis0, axis1)


@composite("aten::swapdims", dtypes=CONVERTED, sizes="own", moves=True)
def swapdims(b: Builder, self, dim0: int, dim1: int) -> Value:
    """`self` with two dims exchanged"""
    return _swapped(b, "transpose", self, dim0, dim1)


@composite("aten::t", dtypes=CONVERTED, sizes="permuted", moves=True)
def t(b: Builder, self) -> Value:
    """`self` of at most two dims, with these exchanged"""
    rank = len(self.dims)
    if rank > 2:
        raise Refusal("t of more than two dims is an error in eager")
    return _permuted(b, "t", self, list(reversed(range(rank))))


@composite("aten::movedim", "int", "intlist", dtypes=CONVERTED, sizes="own", moves=True)
def movedim(b: Builder, self, source: int | list, destination: int | list) -> Value:
    """`self` with the dims `source` moved to where `destination` says"""
    rank = len(self.dims)
    sources = [dim_of(rank, d) for d in ([source] if isinstance(source, int) else source)]
    targets = [dim_of(rank, d) for d in ([destination] if isinstance(destination, int) else destination)]
    if len(set(sources)) != len(sources) or len(set(targets)) != len(targets) or len(sources) != len(targets):
        raise Refusal("movedim with a dim named twice is an error in eager")
    others = iter(d for d in range(rank) if d not in sources)
    order = [sources[targets.index(d)] if d in targets else next(others) for d in range(rank)]
    return _permuted(b, "movedim", self, order)


# Not of floats of 16 bits: registers keep the number, but not which NaN it is.
@composite("tsfuser::view_as_dtype", dtypes=[d.name for d in _BITS if d.register is d], sizes="first")
def view_as_dtype(b: Builder, self, dtype: int) -> Value:
    """the bits of `self` as another dtype of the same size; a NaN keeps its bits"""
    wanted = scalar_type(dtype)
    if wanted not in _BITS or wanted.itemsize != self.dtype.itemsize:
        raise Refusal(f"the bits of {self.dtype} as {wanted}")
    if wanted is self.dtype:
        return _permuted(b, "view_as_dtype", self, range(len(self.dims)))
    symbol = "bits_as" if wanted.register is wanted else f"bits_as_{wanted}"
    return b.pointwise(symbol, (self,), wanted, own_types=True, layouts=(b.layout(self),))


# ---- dims of size 1


@composite("aten::unsqueeze", dtypes=CONVERTED, sizes="unsqueezed", moves=True)
def unsqueeze(b: Builder, self, dim: int) -> Value:
    """`self` with a dim of size 1 more"""
    return unsqueezed(b, self, dim)


def unsqueezed(b: Builder, self: Value, dim: int) -> Value:
    """`self` with a dim of size 1 more"""
    dim = dim_of(len(self.dims) + 1, dim)
    layout = b.layout(self)
    step = layout.sizes[dim] * layout.strides[dim] if dim < len(self.dims) else sz.const(1)
    dims, strides = list(self.dims), list(layout.strides)
    dims.insert(dim, None)
    strides.insert(dim, step)
    return view(b, "unsqueeze", self, dims, strides)


@composite(
    "aten::squeeze",
    "",
    "dim",
    "dims",
    dtypes=CONVERTED,
    sizes="squeezed",
    rank_depends_on_sizes=True,
    moves=True,
)
def squeeze(b: Builder, self, dim: int | list | None = None) -> Value:
    """`self` without those of the dims `dim` (default: all) that are of size 1"""
    rank = len(self.dims)
    named = (
        range(rank) if dim is None else [dim_of(rank, d) for d in ([dim] if isinstance(dim, int) else dim)]
    )
    if len(set(named)) < len(named):
        raise Refusal("squeeze with a dim named twice is an error in eager")
    kept = [d for d in range(rank) if self.dims[d] is not None or d not in named]
    return _permuted(b, "squeeze", self, kept)


# ---- more elements


def _expanded(b: Builder, self: Value, sizes: Sequence[sz.Size], axes: Sequence) -> Value:
    """`self` expanded to `sizes`, in which -1 stands for the size that there is; `axes` are those of new
    elements (None: a new one)."""
    leading = len(sizes) - len(self.dims)
    if leading < 0:
        raise Refusal("expand to fewer dims is an error in eager")
    old, decide = b.layout(self).strides, b.call.decide
    dims: list[Axis | None] = []
    strides: list[sz.Size] = []
    for d, size in reversed(list(enumerate(sizes))):
        own = self.dims[d - leading] if d >= leading else None
        if d >= leading or not old:
            stride = old[d - leading] if d >= leading else sz.const(0)
        else:  # a new dim of size 1: as eager has it, since it may decide about the layout of later results
            stride = strides[0] * (sz.const(1) if dims[0] is None else b.axis(dims[0]).extent)
        if own is not None:
            if not decide(sz.eq(size, b.axis(own).extent)) and not decide(sz.eq(size, -1)):
                raise Refusal("expand to a size that a dim does not have is an error in eager")
        elif not decide(sz.eq(size, 1)) and not (d >= leading and decide(sz.eq(size, -1))):
            if decide(sz.lt(size, 0)):
                raise Refusal("expand to a negative size is an error in eager")
            own, stride = axes[d] or b.fresh_axis(size), sz.const(0)
        dims.insert(0, own)
        strides.insert(0, stride)
    return view(b, "expand", self, dims, strides)


@composite(
    "aten::expand", dtypes=CONVERTED, sizes="expanded", symbolic=("size",), autodiff_excludes=True, moves=True
)
def expand(b: Builder, self, size: list, implicit: bool = False) -> Value:
    """`self` with dims of size 1, and new leading dims, repeated to `size`"""
    return _expanded(b, self, size, [None] * len(size))


@composite(
    "aten::expand_as", dtypes=CONVERTED, sizes="other", autodiff_excludes=True, asked="other", moves=True
)
def expand_as(b: Builder, self, other) -> Value:
    """`self` expanded to the sizes of `other`"""
    return _expanded(b, self, b.sizes(other), other.dims)


# ---- split and merged dims


def _complete(b: Builder, self: Value, sizes: Sequence[sz.Size]) -> list:
    """`sizes` with the one that is -1 computed from the others; below -1 they are an error in eager."""
    sizes, decide = [sz.as_size(s) for s in sizes], b.call.decide
    open_dims = [d for d, size in enumerate(sizes) if decide(sz.lt(size, 0))]
    if not all(decide(sz.eq(sizes[d], -1)) for d in open_dims):
        raise Refusal("a negative size is an error in eager")
    if len(open_dims) > 1:
        raise Refusal("two sizes of -1 are an error in eager")
    if open_dims:
        total = sz.product(b.sizes(self))
        known = sz.product([s for d, s in enumerate(sizes) if d not in open_dims])
        if decide(sz.eq(known, 0)):
            raise Refusal("a size of -1 of no elements is an error in eager")
        sizes[open_dims[0]] = sz.divided(total, known)
    return sizes


def reshaped(b: Builder, name: str, self: Value, sizes: Sequence[sz.Size], copies: bool = True) -> Value:
    """`self` with its elements, in row-major order, as a tensor of `sizes`: old and new dims are matched
    from the left, in the smallest pieces that have equally many elements. Eager `copies` what is no view of
    memory, or raises an error."""
    sizes, decide = _complete(b, self, sizes), b.call.decide
    have = b.sizes(self)
    old = [d for d, axis in enumerate(self.dims) if axis is not None]
    new = [d for d, size in enumerate(sizes) if not decide(sz.eq(size, 1))]
    pieces, i, j = [], 0, 0
    while i < len(old) and j < len(new):
        first, start = i, j
        mine, wanted = have[old[i]], sizes[new[j]]
        i, j = i + 1, j + 1
        while not decide(sz.eq(mine, wanted)):
            if decide(sz.lt(mine, wanted)) and i < len(old):
                mine, i = mine * have[old[i]], i + 1
            elif not decide(sz.lt(mine, wanted)) and j < len(new):
                wanted, j = wanted * sizes[new[j]], j + 1
            else:
                raise Refusal("a reshape to another number of elements, or of none")
        pieces.append((old[first:i], [sizes[d] for d in new[start:j]]))
    if i < len(old) or j < len(new):
        raise Refusal("a reshape to another number of elements, or of none")
    return _by_pieces(
        b, name, self, pieces, [new.index(d) if d in new else -1 for d in range(len(sizes))], copies
    )


def _by_pieces(b: Builder, name: str, self: Value, pieces: list, places: list[int], copies: bool) -> Value:
    """`self` reshaped: each piece takes some of its dims, neighbours of sizes other than 1, to dims of the
    given sizes, also not 1, with the same number of elements; `places` says which of the latter each dim of
    the result is, -1 for those of size 1. Where dims are only split, or memory is walked as one, axes of its
    own leave those of all else as they are; else the loops become those of both shapes."""
    layout, merged = b.layout(self), [pair for old, _ in pieces for pair in zip(old, old[1:])]
    walks = all(
        b.call.decide(sz.eq(layout.strides[i], layout.strides[j] * layout.sizes[j])) for i, j in merged
    )
    if not walks and not copies:
        raise Refusal("a view that merges dims which memory does not walk as one is an error in eager")
    strides = [
        layout.strides[old[-1]] * sz.product(sizes[k + 1 :])
        for old, sizes in pieces
        for k in range(len(sizes))
    ]
    flat = [size for _, sizes in pieces for size in sizes]
    base = layout.strides[-1] if self.dims else sz.const(1)
    where = (
        _layout(flat, strides, places, base)
        if walks
        else contiguous([sz.const(1) if k < 0 else flat[k] for k in places])
    )
    if not merged or walks and b.is_read(self):
        fresh: list[Axis] = []
        into = {}
        for old, sizes in pieces:
            first = b.axis(self.dims[old[0]])
            into[first] = (first,) if len(old) == len(sizes) == 1 else tuple(map(b.fresh_axis, sizes))
            fresh += into[first]
        dims, steps = [None if k < 0 else fresh[k] for k in places], where.strides
        if all(len(old) == len(sizes) == 1 for old, sizes in pieces):
            return view(b, name, self, dims, steps)
        if b.is_read(self):
            return read_as(b, name, self, dims, steps, None if merged else into)
        copy = rematerialized(b, self, into)
        if copy is not None:
            return view(b, name, copy, dims, steps)
    axes = regrouped(b, self, [d for old, _ in pieces for d in old], flat)
    if axes is None:
        return through_memory(b, self, where)
    return view(b, name, self, [None if k < 0 else axes[k] for k in places], where.strides, not walks)


def _layout(sizes: list, strides: list, places: list[int], base: sz.Size) -> Layout:
    """That of eager's view with dims of `sizes` and `strides` in their `places` (ATen/TensorUtils.cpp,
    `computeStride`): a dim of size 1 would walk over all that is inside of it, the last one by `base`, the
    stride of the viewed tensor's last dim."""
    shape = [sz.const(1) if k < 0 else sizes[k] for k in places]
    steps = [base if k < 0 else strides[k] for k in places]
    for d in reversed(range(len(places) - 1)):
        if places[d] < 0:
            steps[d] = steps[d + 1] * shape[d + 1]
    return Layout(tuple(shape), tuple(steps))


def _reshape(kind: str) -> None:
    @composite(
        kind,
        dtypes=CONVERTED,
        sizes="viewed",
        symbolic=("size", "shape"),
        reshapes=True,
        autodiff_excludes=True,
        moves=True,
    )
    def evaluate(b: Builder, self, size: list | None = None, shape: list | None = None) -> Value:
        """The elements of `self`, in row-major order, as a tensor of other sizes"""
        return reshaped(b, "view", self, shape if size is None else size, kind == "aten::reshape")


for _kind in ("aten::view", "aten::reshape"):
    _reshape(_kind)


@composite(
    "aten::view_as",
    dtypes=CONVERTED,
    sizes="own",
    reshapes=True,
    autodiff_excludes=True,
    asked="other",
    moves=True,
)
def view_as(b: Builder, self, other) -> Value:
    """The elements of `self`, in row-major order, as a tensor of the sizes of `other`"""
    return reshaped(b, "view", self, b.sizes(other), False)


@composite(
    "aten::reshape_as",
    dtypes=CONVERTED,
    sizes="own",
    reshapes=True,
    autodiff_excludes=True,
    asked="other",
    moves=True,
)
def reshape_as(b: Builder, self, other) -> Value:
    """The elements of `self`, in row-major order, as a tensor of the sizes of `other`"""
    return reshaped(b, "view", self, b.sizes(other))


@composite("aten::flatten", "using_ints", dtypes=CONVERTED, sizes="flattened", reshapes=True, moves=True)
def flatten(b: Builder, self, start_dim: int = 0, end_dim: int = -1) -> Value:
    """`self` with the dims from `start_dim` to `end_dim` as one"""
    rank, sizes = len(self.dims), list(b.sizes(self))
    start, end = dim_of(rank, start_dim), dim_of(rank, end_dim)
    if start > end:
        raise Refusal("flatten of no dims is an error in eager")
    merged = sz.product(sizes[start : end + 1])
    return reshaped(b, "flatten", self, [*sizes[:start], merged, *sizes[end + 1 :]])


@composite("tsfuser::rows", dtypes=CONVERTED, sizes="own", reshapes=True, moves=True)
def rows(b: Builder, self) -> Value:
    """`self` as a matrix, each row of which is along the last dim"""
    if not self.dims:
        raise Refusal("a tensor without dims has no rows")
    sizes = list(b.sizes(self))
    return reshaped(b, "view", self, [sz.product(sizes[:-1]), sizes[-1]])


@composite(
    "aten::unflatten", "int", dtypes=CONVERTED, sizes="own", symbolic=("sizes",), reshapes=True, moves=True
)
def unflatten(b: Builder, self, dim: int, sizes: list) -> Value:
    """`self` with the dim `dim` as several of `sizes`"""
    if not self.dims:
        raise Refusal("unflatten of a tensor without dims is an error in eager")
    dim, have = dim_of(len(self.dims), dim), list(b.sizes(self))
    return reshaped(b, "unflatten", self, [*have[:dim], *sizes, *have[dim + 1 :]])
