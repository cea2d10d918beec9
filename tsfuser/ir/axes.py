"""Which axes are one: sizes that broadcast against each other are walked by one loop.

In: axes as operands meet. Out: the axis that stands for each. Two axes along which one value varies are never
joined: in `x + x.sum(1)` on a square x, the sums vary along x's first axis but meet its second, and one loop
cannot walk both. `clash` tells; the builder then computes one of the operands a second time, over axes of its
own.

An axis may be several loops, in the whole build: the channels of a group norm are groups and channels of a
group, the axis of a merged dim those of the dims that were merged. Values keep the one axis until the end;
then `parts` gives the loops that it is. Where two such axes are joined, both become the finest pieces that
each is made of: 4 * 6 and 2 * 12 are 2 * 2 * 6. `(2, 6)` and `(3, 4)` have no such pieces: they clash.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..errors import Refusal
from . import size as sz
from .call import Call
from .fusion import Axis, Value


class Axes:
    """The axes of one build; `fresh` makes new ones."""

    def __init__(self, call: Call, fresh: Callable[[sz.Size], Axis]):
        self.call, self.fresh = call, fresh
        # by the name of an axis: the axis it was joined to
        self._joined: dict[str, Axis] = {}
        # by the name of one that stands for itself: what it is made of, outermost first
        self._pieces: dict[str, tuple[Axis, ...]] = {}
        # by the name of a loop: the names of the values that vary along it
        self._holders: dict[str, set[str]] = {}

    def root(self, axis: Axis) -> Axis:
        """The axis that stands for `axis` now."""
        while axis.name in self._joined:
            axis = self._joined[axis.name]
        return axis

    def parts(self, axis: Axis) -> list[Axis]:
        """The loops that `axis` is, outermost first."""
        root = self.root(axis)
        pieces = self._pieces.get(root.name)
        return [root] if pieces is None else [part for piece in pieces for part in self.parts(piece)]

    def is_split(self, axis: Axis) -> bool:
        """Whether `axis` is several loops."""
        return self.root(axis).name in self._pieces

    def hold(self, value: Value) -> Value:
        """Takes note that `value` varies along its axes."""
        for axis in value.axes:
            for part in self.parts(axis):
                self._holders.setdefault(part.name, set()).add(value.name)
        return value

    def clash(self, a: Axis, b: Axis) -> bool:
        """Whether some value varies along both, so that they must not be joined, or they are of loops that
        cannot be."""
        a, b = self.root(a), self.root(b)
        if a == b:
            return False
        pairs = [(a, b)]
        if self.is_split(a) or self.is_split(b):
            if not self.call.decide(sz.eq(a.extent, b.extent)):
                return False
            pairs = self._paired(a, b)
        return pairs is None or any(p != q and not self._held(p).isdisjoint(self._held(q)) for p, q in pairs)

    def _meet(self, a: Axis, b: Axis) -> bool:
        """Whether two axes, which stand for themselves, have a loop in common."""
        return a == b or bool(self._pieces) and not set(self.parts(a)).isdisjoint(self.parts(b))

    def _held(self, part: Axis) -> set[str]:
        return self._holders.get(part.name, set())

    def join(self, a: Axis, b: Axis) -> Axis:
        """The one axis that stands for both, which do not clash, from now on; raises Refusal if their sizes
        differ in this call."""
        a, b = self.root(a), self.root(b)
        if a == b:
            return a
        if not self.call.decide(sz.eq(a.extent, b.extent)):
            raise Refusal(
                f"sizes {self.call.value(a.extent)} and {self.call.value(b.extent)} do not broadcast"
            )
        if self.is_split(a) or self.is_split(b):
            for p, q in self._paired(a, b):
                self.join(p, q)
            self._pieces.pop(b.name, None)
        self._joined[b.name] = a
        self._holders.setdefault(a.name, set()).update(self._holders.pop(b.name, ()))
        return a

    def _paired(self, a: Axis, b: Axis) -> list[tuple[Axis, Axis]] | None:
        """The loops of two axes of one size side by side, which are cut as it takes; None where their pieces
        do not nest."""
        mine = self.parts(a)
        shares = self.shared_out([b], [p.extent for p in mine])
        pairs: list[tuple[Axis, Axis]] = []
        for p, share in zip(mine, shares or ()):
            if len(share) > 1 and not self.is_split(p):
                self._pieces[p.name] = self._cut(p, [q.extent for q in share])
            own = self.parts(p)
            if len(own) != len(share) or not all(
                self.call.decide(sz.eq(x.extent, y.extent)) for x, y in zip(own, share)
            ):
                return None  # a loop of both that was cut on the way
            pairs += zip(own, share)
        return None if shares is None else pairs

    def shared_out(self, axes: Sequence[Axis], sizes: Sequence[sz.Size]) -> list[list[Axis]] | None:
        """The loops of `axes`, in order, as those of dims of `sizes`, which are not 1 and have as many
        elements. Loops are cut where they must be. None where the sizes do not nest."""
        decide, result = self.call.decide, []
        waiting = [part for axis in reversed(axes) for part in reversed(self.parts(axis))]
        for size in sizes:
            share: list[Axis] = []
            while not share or not decide(sz.eq(size, 1)):
                if not waiting:
                    return None
                loop = waiting.pop()
                if decide(sz.lt(size, loop.extent)):
                    if not decide(sz.eq(loop.extent % size, 0)):
                        return None
                    pieces = self._cut(loop, [size, sz.divided(loop.extent, size)])
                    self._pieces[loop.name] = pieces
                    loop, rest = pieces
                    waiting.append(rest)
                elif not decide(sz.eq(size % loop.extent, 0)):
                    return None
                share.append(loop)
                size = sz.divided(size, loop.extent)
            result.append(share)
        return None if waiting else result

    def _cut(self, loop: Axis, extents: Sequence[sz.Size]) -> tuple[Axis, ...]:
        """New loops instead of one."""
        pieces, held = tuple(map(self.fresh, extents)), self._holders.pop(loop.name, set())
        self._holders.update((piece.name, set(held)) for piece in pieces)
        return pieces

    def whole(self, loops: Sequence[Axis], extent: sz.Size) -> Axis:
        """The axis of a dim of `extent` elements that is the `loops`."""
        if len(loops) == 1:
            return loops[0]
        axis = self.fresh(extent)
        self._pieces[axis.name] = tuple(loops)
        return axis

    def align(self, dims: list[Axis | None], value: Value) -> bool:
        """Broadcasts `value` against `dims`, which are changed, aligned at the right; False if that would let
        one loop walk two dims of a value, and `dims` are as they were."""
        trial = list(dims)
        for d, axis in enumerate(value.dims, len(dims) - len(value.dims)):
            if axis is None:
                continue
            root = self.root(axis)
            for e, other in enumerate(trial):
                if other is not None and e != d and self._meet(self.root(other), root):
                    return False
            if trial[d] is not None and self.clash(trial[d], root):
                return False
            trial[d] = root if trial[d] is None else self.join(trial[d], root)
        dims[:] = trial
        return True


def loop_strides(loops: Sequence[Sequence[Axis | None]], strides: Sequence[sz.Size]) -> tuple[sz.Size, ...]:
    """The strides of all loops over dims of `strides`, where `loops[d]` are those over dim d, outermost
    first."""
    found = []
    for own, stride in zip(loops, strides):
        found += [stride * sz.product([loop.extent for loop in own[k + 1 :]]) for k in range(len(own))]
    return tuple(found)
