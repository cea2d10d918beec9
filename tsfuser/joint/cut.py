"""What the forward saves for the backward.

In: a `Joint`, one graph with forward and backward, without in-place ops. Out: a `Cut`: two graphs, of which
the forward returns what the backward gets. Example, for `y = sin(x * w)`:

    graph(%x, %w, %grad_y):                  forward(%x, %w):
      %h = aten::mul(%x, %w)                   %h = aten::mul(%x, %w);  %y = aten::sin(%h)
      %y = aten::sin(%h)                       return (%y)
      %c = aten::cos(%h)           ->        backward(%grad_y, %x, %w):
      %g = aten::mul(%grad_y, %c)              %h = aten::mul(%x, %w);  %c = aten::cos(%h)
      return (%y, mul(%g, %w), ...)            %g = aten::mul(%grad_y, %c);  ...

The backward reads x and w anyway, so it computes h again. In general it is the cut of the fewest bytes
(`min_cut.py`) through a network in which each value that does not depend on a gradient is saved, or computed
again:

- A view is computed again, as that costs nothing. So are numbers of saved tensors; others are saved.
- Elementwise ops, casts and joins may be computed again, and a softmax for its own gradient, which walks over
  the same rows. Reductions, products and random numbers may not, nor what the backward's products read, nor
  what is compared with a saved value (graph/compared.py).
- Inputs and results, and what shares memory with them, are saved only where a derivative reads them, as eager
  does: the program may write to them otherwise. `keep_inputs` says that nobody writes to inputs but, where
  they are named `WRITTEN`, the program itself.
- Of an input or result that eager saves for the gradients of some results, nothing is computed again for
  others: who has no gradient for the former may write to it. (Who asks for the gradients of some inputs only
  may get an error that eager does not raise: a norm would save its result for its weight alone.)
- What eager saves of inputs and results counts for nothing: it is in memory anyway. Such results are not
  computed again, so that an error tells the program that has written to them, as in eager.
- A sum that a residual network carries along, from product to product, is saved (`_carried`).
- What the forward stores for its backward alone costs a little more than what it stores anyway (`_WRITE`), as
  does a slow function that a host computes again, such as a sigmoid whose result its derivative reads
  (`_SLOW`). Of equal cuts, that is taken which saves later values, so that less is computed again.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ..errors import Refusal
from ..graph.compared import is_elementwise
from ..graph.effects import PURE, effect
from ..graph.rows import row_of
from ..graph.worth import shape
from ..graph.wrapper import (
    CONSTANT,
    Node,
    Value,
    blocks,
    facts,
    inputs,
    is_plain_list,
    is_tensor,
    nodes_in,
    outputs,
)
from ..ir.symbols import all_symbols
from ..ops.table import BOOLEAN, INTEGRAL
from .divide import Cut, Written, divided
from .example_types import bytes_of, elements_of
from .min_cut import UNBOUNDED, Network
from .names import is_written
from .node_facts import viewed
from .reverse import Joint
from .roles import Roles

LONGEST = 64  # ops in a row that the backward computes again, at most
_ALSO = ("casts", "fills")  # families of rows that may be computed again, besides elementwise ones
#: What it costs to keep a byte, and what it costs more where the forward stores it for its backward alone.
_BYTE, _WRITE = 1 << 16, 1 << 11
#: What it costs a host to compute a byte again by a function of many instructions.
_SLOW = 1 << 12
_SOURCE, _SINK = 0, 1


def cut(
    joint: Joint,
    by_eager: dict[int, frozenset[int]],
    keep_inputs: bool = False,
    written: Sequence[Written] = (),
) -> Cut:
    """The cut of the fewest bytes. Raises Refusal where the graph has blocks. `by_eager`: what eager saves,
    and for which gradients (`Roles.read_directly`). `written`: that of `divided`; with it, the joint graph is
    changed."""
    if any(blocks(node) for node in nodes_in(joint.graph)):
        raise Refusal("a graph with branches or loops is not cut into forward and backward")
    roles = Roles(joint)
    return divided(joint, roles, chosen(roles, by_eager, keep_inputs), written)


def chosen(
    roles: Roles,
    by_eager: dict[int, frozenset[int]],
    keep_inputs: bool = False,
    again: Collection[str] = (),
) -> set[int]:
    """The numbers of the values that `cut` has the forward save. `again`: further kinds of ops that the
    backward may run again."""
    saved = _Values(roles, by_eager, keep_inputs, again).saved()
    if saved is None:
        saved = _Values(roles, by_eager, keep_inputs, again, apart=False).saved()
    if saved is None:
        raise Refusal("the backward reads what can neither be saved nor computed again")
    return saved


class _Values:
    """The network. A node is a vertex; a value is two, and the edge between them is what it costs to save it.
    What the backward computes is on the sink's side. `apart`: it reads nothing that eager saves for other
    gradients."""

    def __init__(
        self,
        roles: Roles,
        by_eager: dict[int, frozenset[int]],
        keep_inputs: bool,
        again: Collection[str],
        apart: bool = True,
    ):
        self.roles, self.again = roles, again
        given = [v for v in roles.given if not keep_inputs or is_written(v)]
        seen = [*given, *roles.results]
        roots = {root for v in seen for root in roles.roots(v)}
        #: Roots of values that the program may write to, and that eager does not save.
        self.exposed = roots - by_eager.keys()
        #: Of the others, where eager saves them for some gradients only: for which.
        self.apart = {root: by_eager[root] for root in roots - self.exposed} if apart else {}
        #: Results that eager saves: a write to one is an error, as in eager.
        self.kept = {v.unique() for v in roles.results} & by_eager.keys()
        self.compared = roles.compared()
        #: Results, and what they are views of.
        self.returned = {root for v in roles.results for root in (v.unique(), *roles.roots(v))}
        self.stored, self.stored_again = self._stored()
        self.carried = self._carried()
        self.network = Network(2)
        self.ends: dict[int, tuple[int, int]] = {}  # by the numbers of values
        self._depths: dict[int, int] = {}
        self._build()

    def saved(self) -> set[int] | None:
        """The numbers of the values that are saved; None if there are none, as the backward reads what can
        neither be saved nor computed again."""
        side = self.network.sink_side(_SOURCE, _SINK)
        if side is None:
            return None
        saved = {v for v, (start, end) in self.ends.items() if end in side and start not in side}
        return saved - self._follow(saved, side)

    def _follow(self, saved: set[int], side: set[int]) -> set[int]:
        """The saved numbers that the backward can ask of the tensors it has, such as their sizes."""
        known = saved.union(v for v, (start, _) in self.ends.items() if start in side)
        following = set[int]()
        for node in self.roles.nodes:
            made = {v.unique() for v in outputs(node)} & saved
            if made and self._is_number(node) and not self._is_for_others(node):
                read = (v.unique() for v in inputs(node))
                if all(v in known for v in read if v in self.ends):
                    following |= made
        return following

    def _is_number(self, node: Node) -> bool:
        return self.roles.is_free(node) and not any(map(is_tensor, outputs(node)))

    def _is_for_others(self, node: Node) -> bool:
        """Whether the node's results serve gradients for which eager has not saved what the node reads."""
        served = frozenset().union(*map(self.roles.served, outputs(node)))
        read = {root for v in inputs(node) for root in self.roles.roots(v)}
        return any(not served <= self.apart[root] for root in read & self.apart.keys())

    def _stored(self) -> tuple[set[int], set[int]]:
        """The values that an op which is not fused makes or reads in the forward, itself or a view of it; and
        those that one reads in the backward."""
        forward, backward = set[int](), set[int]()
        for node in reversed(self.roles.nodes):
            made, read = {v.unique() for v in outputs(node)}, {v.unique() for v in inputs(node)}
            is_early = self.roles.is_early(node)
            stored = forward if is_early else backward
            if self.roles.is_free(node):
                for found in (forward, backward):
                    found |= read if made & found and not self.roles.is_late(node) else set()
            elif row_of(node) is None:
                stored |= read
                forward |= made if is_early else set()
        return forward, backward

    def _carried(self) -> set[int]:
        """The sums that a residual network carries along: each is of one before and of what a product gives
        that comes later. They are in memory between the products; computed again, each kernel of the backward
        would read two operands in its place, and the ones before."""
        ages: dict[int, int] = {}  # the products before a value, in a row
        made, read = set[int](), set[int]()
        for node in filter(self.roles.is_early, self.roles.nodes):
            age = max((ages.get(v.unique(), 0) for v in inputs(node)), default=0)
            is_product = row_of(node) is None and not self.roles.is_free(node)
            ages |= {v.unique(): age + is_product for v in outputs(node)}
            if is_product or self.roles.is_free(node):
                continue
            elements = max(map(elements_of, filter(is_tensor, outputs(node))), default=0)
            older = {
                root
                for v in filter(is_tensor, inputs(node))
                if ages.get(v.unique(), age) < age and elements_of(v) >= elements
                for root in self.roles.roots(v)
            }
            read |= older
            made |= {v.unique() for v in outputs(node)} if older else set()
        return made & read

    def _build(self) -> None:
        roles = self.roles
        read = [v for node in roles.nodes if roles.is_late(node) for v in inputs(node)] + roles.gradients
        read = [v for v in read if not roles.has_gradient(v) and v.node().kind() != CONSTANT]
        used = roles.leading_to(read)
        for value in roles.given:
            if value.unique() in used:
                self.network.edge(_SOURCE, self._add(value, is_early=True), UNBOUNDED)
        for node in roles.nodes:
            if not roles.is_late(node) and any(v.unique() in used for v in outputs(node)):
                self._add_node(node)
        for number in {v.unique() for v in read}:
            self.network.edge(self.ends[number][1], _SINK, UNBOUNDED)

    def _add_node(self, node: Node) -> None:
        vertex, is_early = self.network.vertex(), self.roles.is_early(node)
        operands = [v.unique() for v in inputs(node) if v.unique() in self.ends]
        for number in operands:
            self.network.edge(self.ends[number][1], vertex, UNBOUNDED)
        depth = self._depth(node, operands)
        if is_early and (depth > LONGEST or not self._may_be_computed_again(node)):
            self.network.edge(_SOURCE, vertex, UNBOUNDED)
            depth = 0
        elif is_early and _is_slow(node):
            self.network.edge(_SOURCE, vertex, _SLOW * sum(map(bytes_of, outputs(node))))
        for value in outputs(node):
            self._depths[value.unique()] = depth
            self.network.edge(vertex, self._add(value, is_early), UNBOUNDED)

    def _depth(self, node: Node, operands: Sequence[int]) -> int:
        """How many ops in a row the backward would compute for the node's results."""
        return max((self._depths.get(v, 0) for v in operands), default=0) + (not self.roles.is_free(node))

    def _add(self, value: Value, is_early: bool) -> int:
        start, end = self.network.vertex(), self.network.vertex()
        self.ends[value.unique()] = start, end
        self.network.edge(start, end, self._price(value, is_early))
        return start

    # ---- what may be computed again, and what it costs to save

    def _may_be_computed_again(self, node: Node) -> bool:
        if self.roles.is_free(node):
            return True
        if self._is_for_others(node):
            return False
        never = self.compared | self.kept | self.carried
        if effect(node) != PURE or any(v.unique() in never for v in outputs(node)):
            return False
        return self._is_cheap(node) and all(v.unique() not in self.stored_again for v in outputs(node))

    def _is_cheap(self, node: Node) -> bool:
        if node.kind() in self.again:
            return shape(outputs(node)[0])[0] is not None  # elements decide no sizes
        if (found := row_of(node)) is None:
            return False
        return is_elementwise(found[0]) or found[0].family in _ALSO or self._is_for_its_gradient(node)

    def _is_for_its_gradient(self, node: Node) -> bool:
        """Whether the node is a softmax that the backward reads for its own gradient alone."""
        gradient = _GRADIENTS_OF_SOFTMAXES.get(node.kind())
        if gradient is None:
            return False
        readers = [use.user for use in node.output().uses() if any(map(is_tensor, outputs(use.user)))]
        return all(reader.kind() == gradient or self.roles.is_early(reader) for reader in readers)

    def _price(self, value: Value, is_early: bool) -> int:
        if not is_tensor(value):
            is_number = is_plain_list(value) or value.type().kind() in _NUMBERS
            return 0 if is_number else UNBOUNDED
        if viewed(value.node()) is not None and self.roles.is_free(value.node()):
            return UNBOUNDED
        if not self.exposed.isdisjoint(self.roles.roots(value)):
            return UNBOUNDED
        if not is_early and facts(value.type()).dtype not in _WHOLE:
            return UNBOUNDED  # second derivatives need the ops that it is computed by
        if value.node().kind() == _PARAM or value.unique() in self.returned:
            return 1
        return 1 + bytes_of(value) * (_BYTE if value.unique() in self.stored else _BYTE + _WRITE)


def _is_slow(node: Node) -> bool:
    """Whether it takes a host longer than to read the result."""
    made = outputs(node)[0]
    is_slow = node.kind().partition("::")[2] in _SLOW_ONES
    return is_slow and is_tensor(made) and facts(made.type()).device == "cpu"


_GRADIENTS_OF_SOFTMAXES = {
    f"aten::{mark}{kind}": f"aten::_{kind}_backward_data"
    for kind in ("softmax", "log_softmax")
    for mark in ("", "_")
}
_SLOW_ONES = frozenset(symbol.name for symbol in all_symbols() if not symbol.cheap)
_PARAM = "prim::Param"
_NUMBERS = frozenset(("IntType", "FloatType", "BoolType", "NumberType"))
_WHOLE = frozenset((*BOOLEAN, *INTEGRAL))
