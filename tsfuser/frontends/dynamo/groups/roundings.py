"""Where forward and backward must see the same 16-bit numbers.

A group computes in float32 and rounds a 16-bit value where it stores it. If a norm in the same group reads
the value before that rounding, its statistics are not those of the numbers that the backward reads, and
`x - mean` is wrong by a rounding. So what a group of the forward stores is rounded for its readers in the
group, too, if statistics depend on them, and the backward rounds it where it computes it again. The same is
done to the operand of a norm whose statistics are stored in 16 bits, as torch has them on CPUs: the only
element of a row is its mean. All other values stay unrounded, which is nearer to the exact result.

In: a typed graph with groups, and the names that fx/recomputed.py has given to values that both graphs
compute. Out: `tsfuser::rounded` in the groups, a conversion in registers. Example, a group of a forward:

    %y = aten::exp(%x);  %z, ... = aten::native_layer_norm(%y, ...);  return (%y, %z, ...)
becomes
    %y = aten::exp(%x);  %s = tsfuser::rounded(%y)
    %z, ... = aten::native_layer_norm(%s, ...);  return (%y, %z, ...)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ....graph.roundings import leads_to_statistics, round_for
from ....graph.wrapper import GROUP, Graph, Value, facts, inputs, is_tensor, outputs
from ....ir.dtypes import NARROW
from ..fx.recomputed import name_in

_NARROW = tuple(d.name for d in NARROW)


#: A pass over a graph with groups.
Pass = Callable[[Graph], None]


class Roundings:
    """Of one forward and its backward. `forward` comes first, once for each part of the forward's graph."""

    def __init__(self) -> None:
        self._unrounded: set[str] = set()  # names of the values that the forward has unrounded

    def passes(self, role: str) -> Sequence[Pass]:
        """Those over a graph of that role. An inference has none, as it has no backward."""
        return {"forward": (self.forward,), "backward": (self.backward,)}.get(role, ())

    def forward(self, graph: Graph) -> None:
        """Rounds what groups store for those of its readers in them on which statistics depend."""
        in_memory = {name_in(value) for node in graph.nodes() for value in outputs(node)}
        for group in _groups(graph):
            chosen = _stored(group) | _measured(group)
            for value in _narrow_values(group):
                if value.unique() in chosen:
                    round_for(group, value, leads_to_statistics)
                elif name_in(value) not in in_memory:
                    self._unrounded.add(name_in(value))

    def backward(self, graph: Graph) -> None:
        """Rounds what groups compute again and the forward has rounded."""
        for group in _groups(graph):
            for value in _narrow_values(group):
                if name_in(value) and name_in(value) not in self._unrounded:
                    round_for(group, value, lambda reader: True)


def _groups(graph: Graph) -> list[Graph]:
    return [node.g("Subgraph") for node in graph.findAllNodes(GROUP, True)]


def _narrow_values(group: Graph) -> list[Value]:
    """The 16-bit values that the group computes."""
    return [value for node in list(group.nodes()) for value in outputs(node) if _is_narrow(value)]


def _is_narrow(value: Value) -> bool:
    return is_tensor(value) and facts(value.type()).dtype in _NARROW


def _stored(group: Graph) -> set[int]:
    """What the group returns, by `unique()`."""
    return {value.unique() for value in group.outputs()}


def _measured(group: Graph) -> set[int]:
    """The operands of norms whose statistics, the results after the first one, the group returns in 16 bits.
    By `unique()`."""
    returned, found = _stored(group), set()
    for node in group.nodes():
        if any(_is_narrow(value) and value.unique() in returned for value in outputs(node)[1:]):
            found.add(inputs(node)[0].unique())
    return found
