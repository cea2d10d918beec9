"""Which axes are one: sizes that broadcast against each other are walked by one loop.

In: axes as operands meet. Out: the axis that stands for each. Two axes along which one value varies are never joined: in `x + x.sum(1)` on a
square x, the sums vary along x's first axis but meet its second, and one loop cannot walk both. `clash` tells; the builder then computes one of
the operands a second time, over axes of its own.

An axis may be split into two, in the whole build: the channels of a group norm into groups and channels of a group. Values keep the one axis
until the end; then `parts` gives the loops that it is.
"""

from __future__ import annotations

from . import size as sz
from .call import Call
from .fusion import Axis, Value
from ..errors import Refusal


class Axes:
    """The axes of one build."""

    def __init__(self, call: Call):
        self.call = call
        self._joined: dict[Axis, Axis] = {}  # axis -> the axis it was joined to
        self._splits: "dict[Axis, tuple[int, Axis, Axis]]" = {}  # axis -> how many outer steps, outer, inner
        self._holders: dict[Axis, set[str]] = {}  # axis that stands for itself -> names of the values that vary along it

    def root(self, axis: Axis) -> Axis:
        """The axis that stands for `axis` now."""
        while axis in self._joined:
            axis = self._joined[axis]
        return axis

    def hold(self, value: Value) -> Value:
        """Takes note that `value` varies along its axes."""
        for axis in value.axes:
            self._holders.setdefault(self.root(axis), set()).add(value.name)
        return value

    def clash(self, a: Axis, b: Axis) -> bool:
        """Whether some value varies along both, so that they must not be joined."""
        a, b = self.root(a), self.root(b)
        return a != b and not self._holders.get(a, set()).isdisjoint(self._holders.get(b, ()))

    def join(self, a: Axis, b: Axis) -> Axis:
        """The one axis that stands for both from now on; raises Refusal if their sizes differ in this call."""
        a, b = self.root(a), self.root(b)
        if a == b:
            return a
        if not self.call.decide(sz.eq(a.extent, b.extent)):
            raise Refusal(f"sizes {self.call.value(a.extent)} and {self.call.value(b.extent)} do not broadcast")
        self._joined[b] = a
        self._holders.setdefault(a, set()).update(self._holders.pop(b, ()))
        return a

    def split(self, axis: Axis, count: int, outer: Axis, inner: Axis) -> tuple[Axis, Axis]:
        """The two axes, of `count` and of the other steps, that `axis` is from now on: `outer` and `inner`, or those that it was before. Raises
        Refusal if it is split in another way."""
        known = self.halves(axis)
        if known is not None and self._splits[self.root(axis)][0] != count:
            raise Refusal("channels are grouped in two ways")
        if known is None:
            self._splits[self.root(axis)] = (count, outer, inner)
        return known or (outer, inner)

    def halves(self, axis: Axis) -> "tuple[Axis, Axis] | None":
        """The two axes that `axis` has been split into, if it has been."""
        self._settle()
        found = self._splits.get(self.root(axis))
        return found and (self.root(found[1]), self.root(found[2]))

    def _settle(self) -> None:
        """Splits of axes that have been joined since become one."""
        for axis, (count, outer, inner) in list(self._splits.items()):
            root = self.root(axis)
            if root is axis:
                continue
            del self._splits[axis]
            other = self._splits.setdefault(root, (count, outer, inner))
            if other[0] != count:
                raise Refusal("channels are grouped in two ways")
            self.join(other[1], outer)
            self.join(other[2], inner)

    def parts(self, axis: Axis) -> list[Axis]:
        """The axes that `axis` is in the end, outermost first."""
        halves = self.halves(axis)
        return [self.root(axis)] if halves is None else [part for half in halves for part in self.parts(half)]

    def align(self, dims: "list[Axis | None]", value: Value) -> bool:
        """Broadcasts `value` against `dims`, which are changed, aligned at the right; False if that would let one loop walk two dims of a
        value, and `dims` are as they were."""
        trial = list(dims)
        for d, axis in enumerate(value.dims, len(dims) - len(value.dims)):
            if axis is None:
                continue
            root = self.root(axis)
            if any(other is not None and e != d and self.root(other) == root for e, other in enumerate(trial)):
                return False
            if trial[d] is not None and self.clash(trial[d], root):
                return False
            trial[d] = root if trial[d] is None else self.join(trial[d], root)
        dims[:] = trial
        return True
