"""The backward computes again what costs less to compute than to keep.

In: `SavedValues`, of a differentiable graph. Out: the same with a backward that needs fewer of the values
that are kept, and which it does not. These are elementwise results of values that are kept anyway: the
forward does not write them, the backward does not read them, and where it is fused computing them takes next
to no time. Example, for `r = rsqrt(mean(x * x) + eps); y = x * r * w`, of which autodiff keeps x, r, w and
x * r:

    forward  %n = aten::mul(%x, %r);  ... return (%y, %x, %r, %w, %n)
    backward(%grad, %x, %r, %w, %n):  ... aten::mul(%grad, %n)
becomes
    forward  %n = aten::mul(%x, %r);  ... return (%y, %x, %r, %w)
    backward(%grad, %x, %r, %w):  %m = aten::mul(%x, %r) ... aten::mul(%grad, %m)

What is computed again may take several ops. Of a cast to float32 the forward keeps the operand of 16 bits
rather than the result: `silu(linear(x))` under autocast, of which autodiff keeps float32 copies. Often that
operand is in memory anyway, as a product of matrices is, or a view of it.

A kept value also has a gradient of its own, which double backward makes; for one that is dropped there is
none (`prim::AutogradZero`): what would have come through it comes through those that it is computed of.
Nothing is kept instead that the program may write to before the backward: no input of the forward, unless
the program has made it and leaves it as it is, such as the result of a convolution, and no result of the
forward. Masks and all else that jumps are kept: a group computes with more digits than it stores, so that the
backward could take another branch than the forward did. So is what the backward compares (compared.py).
"""

from __future__ import annotations

from collections.abc import Collection

from ....graph.effects import may_return_operand
from ....graph.rows import row_of
from ....graph.wrapper import (
    CONSTANT,
    Graph,
    Node,
    Value,
    graph_inputs,
    graph_outputs,
    inputs,
    is_tensor,
    nodes_in,
    outputs,
    schema,
    use_count,
)
from ....grouping.chunks import CHUNK
from ....ir.dtypes import DTYPES, NARROW
from ....ops import table
from .compared import values_compared
from .formulas import SOFTMAX
from .saved import SavedValues, source

STEPS = 8  # ops at most that a value is computed again by
_WIDEN, _NARROW = "aten::_autocast_to_full_precision", "aten::_autocast_to_reduced_precision"
LEAVES = 3  # tensors at most that these read
# dtypes of numbers with fractions
_FRACTIONAL = frozenset(DTYPES[name].code for name in (*table.FLOATING, *table.COMPLEX))
_FLOAT32 = (DTYPES["float32"].code,)
_HALF = tuple(d.code for d in NARROW)
#: Where a value is kept: (number of the output, what stands for it in the backward), several times if the
#: formulas of several ops read it.
Places = list[tuple[int, Value]]


def compute_again(
    saved: SavedValues,
    written: Collection[int] = (),
    own: Collection[int] = (),
    half: Collection[int] = (),
) -> set[int]:
    """Has the backward compute what it can; the outputs of the forward that it needs no more. The program may
    write to the results `written`. Of the inputs of the forward, `own` are in the backward what they were,
    `half` have 16 bits."""
    choice = _Choice(saved, written, own, half)
    choice.make()
    return choice.dropped


class _Choice:
    """What is kept, and what is computed again. `known`: what the backward has of the forward's values;
    `places`: of the others that are kept; `dropped`: the numbers of outputs that nothing reads any more."""

    def __init__(
        self, saved: SavedValues, written: Collection[int], own: Collection[int], half: Collection[int]
    ):
        given = graph_inputs(saved.forward)
        self.saved, self.first = saved, nodes_in(saved.backward)[0]
        self.dropped: set[int] = set()
        self.exposed = saved.exposed(written)
        self.own = {given[i].debugName() for i in own}
        self.compared = values_compared(saved)
        self.half = _with_16_bits(saved.forward, {given[i].debugName() for i in half})
        self.returned = {v.debugName() for v in graph_outputs(saved.forward)[: saved.real]}
        self.places: dict[str, Places] = {}
        for j, value, argument in saved.of_outputs():
            self.places.setdefault(value.debugName(), []).append((j, argument))
        self.known = {value.debugName(): argument for value, argument in saved.of_inputs()}
        # Autodiff keeps some inputs that no formula reads, as that of `to`. To read one here would forbid the
        # program to write to it before the backward.
        self.known.update(
            (v.debugName(), argument)
            for v in given
            for _, argument in self.places.get(v.debugName(), [])[:1]
            if use_count(argument)
        )

    def make(self) -> None:
        nodes = nodes_in(self.saved.forward)
        kept = [(node, v) for node in nodes for v in outputs(node) if v.debugName() in self.places]
        may_go = []
        for node, value in kept:
            if self._stays(node, value):
                self._keep(value)
            else:
                may_go.append((node, value))
        # First the operands of casts. In `a = h * 0.5; y = tanh(h.float()) * a`, h is not kept and a comes
        # before the cast: once h is kept, it need not be.
        others = {*self.known, *self.places}
        for node, value in may_go:
            operand = self._operand_of_cast(node) if self._is_read(value) else None
            if operand is not None and (
                has_own_memory(operand, self.exposed, self.own)
                or not self._is_computable(node, value, others)
            ):
                self._keep_operand(operand, node, value)
        for node, value in may_go:
            if value.debugName() not in self.places:
                continue  # its operand is kept
            is_read = self._is_read(value)  # else nothing is computed for it, and its operands may go, too
            if self._is_computable(node, value, self.known):
                if is_read:
                    again = computed(node, self.saved.backward, self.first, self.known)
                    self._drop(self.places[value.debugName()], again)
            elif not is_read and _casts_to(node, _WIDEN, _FLOAT32):
                continue  # what could be computed of it is computed of its narrow operand
            elif (operand := self._operand_of_cast(node)) is not None:
                self._keep_operand(operand, node, value)
            else:
                self._keep(value)

    def _stays(self, node: Node, value: Value) -> bool:
        """Whether the value is in memory whatever is done here, or must not be computed again."""
        places = self.places[value.debugName()]
        # what has a gradient has fractions
        fractional = not _has_dtype_of_another(node) or self._has_gradient(value)
        in_memory = value.debugName() in self.returned or not is_read_by_groups(value)
        return in_memory or not fractional or not all(is_read_by_groups(argument) for _, argument in places)

    def _has_gradient(self, value: Value) -> bool:
        return all(j in self.saved.gradients for j, _ in self.places[value.debugName()])

    def _is_read(self, value: Value) -> bool:
        """Whether a formula of the backward reads the kept value; autodiff keeps more."""
        return any(use_count(argument) for _, argument in self.places[value.debugName()])

    def _is_computable(self, node: Node, value: Value, known: Collection[str]) -> bool:
        return _is_computable(node, known, self._has_gradient(value), [STEPS], set(), self.compared)

    def _keep(self, value: Value) -> None:
        _, argument = self.places[value.debugName()][0]
        if use_count(argument) or value.debugName() not in self.exposed:
            self.known[value.debugName()] = argument

    def _operand_of_cast(self, node: Node) -> Value | None:
        """What the node casts to float32, where that may be kept instead, and is not yet: it is in memory
        anyway, or has half the size."""
        if not _casts_to(node, _WIDEN, _FLOAT32):
            return None
        operand = node.inputsAt(0)
        name = operand.debugName()
        if name in self.known or name in self.places:
            return None
        is_smaller = name in self.half and name not in self.exposed
        return operand if is_smaller or has_own_memory(operand, self.exposed, self.own) else None

    def _keep_operand(self, operand: Value, cast: Node, value: Value) -> None:
        (j, argument), *others = self.places.pop(value.debugName())
        self.known[operand.debugName()] = argument
        self.known[value.debugName()] = _save_operand_instead(self.saved, cast, j, argument, self.first)
        self._drop(others, self.known[value.debugName()])

    def _drop(self, places: Places, again: Value) -> None:
        for j, argument in places:
            argument.replaceAllUsesWith(again)
            self.dropped.add(j)


def _is_computable(
    node: Node,
    known: Collection[str],
    moving: bool,
    steps: list[int],
    leaves: set[str],
    compared: Collection[str],
) -> bool:
    """Whether a few elementwise ops compute the node's result of what is known, which is little to read, and
    none of the values `compared`. `moving`: whether the result has a gradient."""
    steps[0] -= 1
    if steps[0] < 0 or not is_elementwise(node) or node.output().debugName() in compared:
        return False
    # The only operand has a gradient where the result has one, and with it fractions.
    moving = moving and sum(map(is_tensor, inputs(node))) == 1
    for v in inputs(node):
        if v.debugName() in known:
            leaves.update([v.debugName()] if is_tensor(v) else [])
        elif v.node().kind() != CONSTANT:
            if _has_dtype_of_another(v.node()) and not moving:
                return False
            if not _is_computable(v.node(), known, moving, steps, leaves, compared):
                return False
    return len(leaves) <= LEAVES


def _casts_to(node: Node, autocasts: str, dtypes: tuple[int, ...]) -> bool:
    """Whether the node casts to one of `dtypes`, as autocast does, or as a trace has it of autocast."""
    if node.kind() != "aten::to":
        return node.kind() == autocasts
    if schema(node).overload != "dtype":  # it may move the tensor to another device
        return False
    dtype = node.inputsAt(1)
    return dtype.node().kind() == CONSTANT and dtype.toIValue() in dtypes


def _with_16_bits(forward: Graph, half: set[str]) -> set[str]:
    """Names of the values that are expected to have 16 bits: inputs `half`, what is cast so, and what is
    computed of such alone. If one has another dtype, such as a mask, the backward is right, but more is kept
    for it than need be."""
    names = set(half)
    for node in nodes_in(forward):
        found, operands = row_of(node), [v.debugName() for v in inputs(node) if is_tensor(v)]
        if found is not None:
            keeps = found[0].is_view or found[0].keeps_dtype
        else:  # such as products and convolutions
            keeps = node.kind().startswith("aten::") or node.kind() == CHUNK
        if _casts_to(node, _NARROW, _HALF) or (keeps and operands and names.issuperset(operands)):
            names.update(v.debugName() for v in outputs(node))
    return names


def has_own_memory(value: Value, exposed: set[str], own: set[str]) -> bool:
    """Whether the value is in memory as it is, and nothing writes to it: one of the inputs `own`, or what an
    op has made that is not fused."""
    if source(value).debugName() in own:
        return True
    maker = value.node()
    is_fused = not maker.kind().startswith("aten::") or row_of(maker) is not None
    return not is_fused and not may_return_operand(maker) and value.debugName() not in exposed


def _save_operand_instead(saved: SavedValues, cast: Node, j: int, argument: Value, first: Node) -> Value:
    """Has output `j` of the forward, for which `argument` stands in the backward, be the operand of `cast`;
    the cast in the backward."""
    backward, operand = saved.backward, cast.inputsAt(0)
    again = computed(cast, backward, first, {operand.debugName(): argument})
    argument.replaceAllUsesWith(again)
    again.node().replaceInput(0, argument)
    saved.forward.return_node().replaceInput(j, operand)
    if j in saved.gradients:  # which comes in the narrow dtype now, if it does
        gradient = graph_inputs(backward)[list(saved.gradients).index(j)]
        wide = backward.create("prim::GradOf", [], 1)
        wide.s_("name", cast.kind())
        wide.insertBefore(first)
        gradient.replaceAllUsesWith(wide.output())
        wide.addInput(gradient)
        block = wide.addBlock()
        made = backward.createClone(
            again.node(), lambda v: gradient if v.debugName() == argument.debugName() else v
        )
        made.insertBefore(block.returnNode())
        block.registerOutput(made.output())
    return again


def is_read_by_groups(value: Value) -> bool:
    """Whether the value, and all views of it, are read by ops that can be in a group with what computes it;
    others, such as a product of matrices, have it in memory."""
    return all(_is_read_in_group(use.user) for use in value.uses())


def _is_read_in_group(node: Node) -> bool:
    found = row_of(node)
    if found is None:  # a graph's end says what is kept; others ask what is known without the elements
        return node.kind() in ("prim::Return", "prim::dtype", "aten::size")
    return not found[0].is_view or all(is_read_by_groups(v) for v in outputs(node))


def is_elementwise(node: Node) -> bool:
    """Whether the op may be computed again: it gives the same result, and costs next to nothing where it is
    fused."""
    if node.outputsSize() != 1 or not is_tensor(node.output()):
        return False
    found, row = schema(node), row_of(node)
    if row is None or not row[0].smooth or "rounding_mode" in found.arguments:
        return False
    if "dtype" not in found.arguments or any(use.user.kind() in SOFTMAX for use in node.output().uses()):
        return True  # a softmax refuses integers
    return not _may_be_whole(node.inputsAt(found.arguments.index("dtype")))


def _has_dtype_of_another(node: Node) -> bool:
    """Whether the op casts to the dtype of a tensor, which may be one of integers."""
    found = row_of(node)
    return found is not None and bool(found[0].dtype_from)


def _may_be_whole(dtype: Value) -> bool:
    """Whether `dtype`, an operand, may be one of integers or bool."""
    if dtype.node().kind() != CONSTANT:
        return True
    return dtype.type().kind() != "NoneType" and dtype.toIValue() not in _FRACTIONAL


def computed(node: Node, backward: Graph, first: Node, known: dict[str, Value]) -> Value:
    """The result of `node`, of the forward, computed at the beginning of the backward, before `first`."""
    for v in inputs(node):
        if v.debugName() not in known:
            known[v.debugName()] = computed(v.node(), backward, first, known)
    copy = backward.createClone(node, lambda v: known[v.debugName()])
    copy.insertBefore(first)
    return copy.output()
