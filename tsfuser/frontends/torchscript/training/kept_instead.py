"""The forward keeps the operands of a value instead of the value, where these are in memory anyway. The
backward computes the value again. For an elementwise result the operand is a product of matrices, or another
tensor that the program has made, to which a bias is added, say: `gelu(x @ w + b)` keeps the product and a
copy of b, and the forward does not write the sum.

For the result of a softmax that is kept for its derivative alone, it is the product that an attention takes
the softmax of. Under autocast the product has 16 bits, and the result 32. The derivative walks over the same
rows. Before:

    forward:  %s = aten::matmul(%q, %k);  %m = aten::add(%s, %mask);  %y = aten::softmax(%m);  keeps %y
    backward(%grad, %y):  %g = aten::_softmax_backward_data(%grad, %y, ...);  %gs = ... of %g
becomes
    forward:  ...;  %c = aten::clone(%mask);  keeps %s and %c
    backward(%grad, %grad_s, %s, %c):  %m = aten::add(%s, %c);  %y = aten::softmax(%m);  the same;
                                       %gs = prim::AutogradAdd(%grad_s, ...)

In: `SavedValues`, of a differentiable graph. Out: the same, with other graphs, and the numbers of the outputs
that are not kept. The ops in between are elementwise (recompute.py), of one tensor that nobody writes to, and
of what is kept anyway. Inputs that are small beside others, such as masks, are copied, since the program may
write to them; so is what is made of those alone, such as what an attention looks up in a table of relative
positions. An input that is not small is copied if then fewer tensors are written: of
`(x * 0.5 + 0.25) * sigmoid(x)` eager keeps both factors, and the backward computes both of a copy of x. What
is kept instead has a gradient where the forward's value has one: the backward may be differentiated again."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from ....graph.rows import row_of
from ....graph.wrapper import (
    CONSTANT,
    Graph,
    Node,
    Value,
    graph_inputs,
    inputs,
    is_tensor,
    is_tensor_list,
    nodes_in,
    outputs,
    use_count,
    with_items,
)
from .compared import values_compared
from .formulas import SOFTMAX
from .recompute import LEAVES, STEPS, computed, has_own_memory, is_elementwise, is_read_by_groups
from .saved import SavedValues, asks_for_dtype, gradient_outside

#: Op -> the names of what autodiff differentiates for it, besides its own and that of a twin
#: (csrc_stubs/torchscript/differentiable_forms.cpp).
_FORMS = {
    "aten::masked_fill": "aten::where",
    "aten::_autocast_to_full_precision": "tsfuser::full_precision",
}
_VIEWS = ("aten::view", "aten::reshape")  # that may stand between the ops
_HANDED_ON = ("prim::profile", "aten::contiguous")  # whose formulas give the gradient as it is
_DTYPE = "prim::dtype"
_LOOKUP = "aten::index"
#: What the op table calls the sizes of views that have no more elements than their operands.
_NO_LARGER = frozenset("first flattened permuted selected sliced squeezed swapped unsqueezed viewed".split())


@dataclass
class _Found:
    """What a result is computed of: `instead`, the tensor that is kept instead, at most one, and `small`, of
    which copies are kept; each with its gradient in the backward, if it has one. `kept`: names of what is
    kept anyway. `numbers`, and lists of them. `steps`: ops that are left to look at."""

    instead: dict[str, tuple[Value, Value | None]] = field(default_factory=dict)
    small: dict[str, tuple[Value, Value | None]] = field(default_factory=dict)
    kept: set[str] = field(default_factory=set)
    numbers: dict[str, Value] = field(default_factory=dict)
    steps: int = STEPS


def _add(found: dict[str, tuple[Value, Value | None]], value: Value, gradient: Value | None) -> None:
    """Adds what may be there already: several ops may read it, some of which give it no gradient."""
    earlier = found.get(value.debugName(), (value, None))[1]
    found[value.debugName()] = value, gradient if earlier is None else earlier


@dataclass
class _Search:
    """`kept`: names of the forward's values that the backward gets. `exposed`: of those that the program may
    write to. `own`: of inputs that nobody writes to. `small`, `still`: of values that are small, have no
    gradient. `compared`: of those that must not be computed again."""

    kept: set[str]
    exposed: set[str]
    own: set[str]
    small: set[str]
    still: set[str]
    compared: set[str]

    def what_gives(self, value: Value, argument: Value, gradient: Value) -> _Found | None:
        """What the backward computes `value` of, for which it has `argument` and gets `gradient`; None where
        it should be kept."""
        node, found = value.node(), _Found()
        derivative = _derivative(value, argument)
        if derivative is not None:
            place = gradient_outside(derivative, 0)
            operands = enumerate(inputs(node))
            whole = place is not None and all(self.look(v, None if k else place, found) for k, v in operands)
            return found if whole else None
        name, in_groups = value.debugName(), is_read_by_groups(value) and is_read_by_groups(argument)
        if not in_groups or name in self.small or has_own_memory(value, self.exposed, self.own):
            return None
        self.kept.remove(name)  # or it would be found itself
        whole = self.look(value, gradient, found)
        self.kept.add(name)
        many = len(found.kept | found.instead.keys()) > LEAVES
        return found if whole and not many else None

    def look(self, value: Value, gradient: Value | None, found: _Found) -> bool:
        """Whether the backward can compute `value`; `gradient`: what it has of it."""
        name, node = value.debugName(), value.node()
        if node.kind() == CONSTANT:
            return True
        if name in self.kept:
            found.kept.update([name] if is_tensor(value) else [])
            return True
        if not is_tensor(value):
            found.numbers[name] = value
            return not is_tensor_list(value)
        if name in self.small:
            _add(found.small, value, gradient)
            return True
        if has_own_memory(value, self.exposed, self.own):
            _add(found.instead, value, gradient)
            return len(found.instead) == 1
        found.steps -= 1
        if found.steps < 0 or name in self.compared or not (is_elementwise(node) or node.kind() in _VIEWS):
            return False
        for v in inputs(node):
            inner, is_clear = self._gradient_of(node, v, gradient)
            if not is_clear or not self.look(v, inner, found):
                return False
        return True

    def _gradient_of(self, node: Node, operand: Value, gradient: Value | None) -> tuple[Value | None, bool]:
        """The gradient that the derivative of `node` gives to the operand, and whether that is clear. No
        gradient: None."""
        if gradient is None or operand.debugName() in self.kept or not is_tensor(operand):
            return None, True
        reader = _reader(gradient, node.kind())
        if reader is None:
            return None, not use_count(gradient)
        given = outputs(reader)
        moving = [v.unique() for v in inputs(node) if is_tensor(v) and v.debugName() not in self.still]
        if operand.unique() not in moving:
            return None, True
        if len(given) != len(moving) or (node.kind() in _FORMS and len(moving) > 1):
            return None, False  # a form may have its operands in another order
        found = given[moving.index(operand.unique())]
        return (found if use_count(found) else None), True


def _small(forward: Graph, small: set[str]) -> set[str]:
    """Names of the values that are small beside others: inputs `small`, views of what is small, and what is
    computed of one such tensor, element by element, or looked up in one at few places."""
    names = set(small)
    for node in nodes_in(forward):
        operands = with_items([v for v in inputs(node) if is_tensor(v) or is_tensor_list(v)])
        row = row_of(node)
        is_view = row is not None and row[0].is_view and row[0].sizes in _NO_LARGER
        stays_small = is_view or node.kind() == _LOOKUP or (len(operands) == 1 and is_elementwise(node))
        if operands and stays_small and names.issuperset(v.debugName() for v in operands):
            names.update(v.debugName() for v in outputs(node))
    return names


def _still(forward: Graph, still: set[str]) -> set[str]:
    """Names of the tensors that autodiff gives no gradient: inputs `still`, and what is computed of them
    alone."""
    names = set(still)
    for node in nodes_in(forward):
        row = row_of(node)
        is_flat = row is not None and row[0].flat
        if is_flat or names.issuperset(v.debugName() for v in inputs(node) if is_tensor(v)):
            names.update(v.debugName() for v in outputs(node))
    return names


def _reader(gradient: Value, kind: str) -> Node | None:
    """The formula of the derivative of an op of that kind that reads the gradient, or what it becomes on the
    way; None if that is not clear."""
    names = (kind, kind.replace("aten::", "tsfuser::"), _FORMS.get(kind))
    while True:
        users = [use.user for use in gradient.uses()]
        formulas = [n for n in users if n.kind() == "prim::GradOf"]
        if [n for n in formulas if n.s("name") in names]:
            return formulas[0] if len(formulas) == 1 else None
        ways = formulas or [n for n in users if n.kind() == "prim::AutogradAdd"]
        if len(ways) != 1 or (formulas and ways[0].s("name") not in _HANDED_ON):
            return None
        gradient = ways[0].output()


def compute_again(
    saved: SavedValues,
    written: Collection[int],
    own: Collection[int],
    small: Collection[int],
    moving: Collection[int],
    dropped: Collection[int],
) -> tuple[SavedValues, set[int]]:
    """`saved` with other graphs, and the outputs of the forward that the backward needs no more, besides
    those that are `dropped`. The program may write to the results `written`. Of the inputs of the forward,
    `own` are in the backward what they were, `small` are small beside others, and `moving` get gradients."""

    def names(numbers: Iterable[int]) -> set[str]:
        return {given[i].debugName() for i in numbers}

    given = graph_inputs(saved.forward)
    known = {value.debugName(): argument for value, argument in saved.of_inputs()}
    known.update(
        (value.debugName(), argument)
        for j, value, argument in saved.of_outputs()
        if j not in dropped and use_count(argument)
    )
    in_results = saved.in_results()  # in memory, and to write to a view of it raises in eager's backward
    still = set(range(len(given))).difference(moving)
    search = _Search(
        set(known),
        saved.exposed(written),
        names(own),
        _small(saved.forward, names(small)),
        _still(saved.forward, names(still)),
        values_compared(saved),
    )
    search.small.update(_worth_copies(search, list(_candidates(saved, dropped, in_results)), saved))
    first = nodes_in(saved.backward)[0]
    again: set[int] = set()
    # In the order of the forward: what is computed for one value may be an operand of a later one.
    order = {v.debugName(): k for k, node in enumerate(nodes_in(saved.forward)) for v in outputs(node)}
    candidates = _candidates(saved, dropped, in_results)
    for j, value, argument in sorted(candidates, key=lambda kept: order.get(kept[1].debugName(), -1)):
        name = value.debugName()
        if name not in search.kept:
            continue
        found = search.what_gives(value, argument, _gradient(saved, j))
        if found is not None:
            saved = _keep_dtype(_keep(saved, found, known, value.node()), value, argument)
            search.kept.remove(name)  # the backward has it then, but computes it
            search.kept.update((*found.numbers, *found.instead, *found.small))
            del known[name]
            result = known[name] = computed(value.node(), saved.backward, first, known)
            argument.replaceAllUsesWith(result)
            again.add(j)
    return saved, again


def _candidates(
    saved: SavedValues, dropped: Collection[int], in_results: Collection[str]
) -> Iterator[tuple[int, Value, Value]]:
    """The results that are kept for the backward, and might not be: as `SavedValues.of_outputs`."""
    for j, value, argument in saved.of_outputs():
        if j not in dropped and j in saved.gradients and value.debugName() not in in_results:
            yield j, value, argument


def _worth_copies(
    search: _Search, candidates: Sequence[tuple[int, Value, Value]], saved: SavedValues
) -> set[str]:
    """Names of the inputs of which a copy stands for two kept results at least. They get gradients, so they
    are no integers, which may be wider than the results."""
    copied = set()
    for given in graph_inputs(saved.forward):
        name = given.debugName()
        if not is_tensor(given) or name in search.kept | search.small | search.own | search.still:
            continue
        trial = replace(search, kept=set(search.kept), small=search.small | {name})
        found = {
            value.debugName(): trial.what_gives(value, argument, _gradient(saved, j))
            for j, value, argument in candidates
            if value.debugName() in search.kept and not _is_cast_of(value, name)
        }
        if sum(f is not None and not f.instead and name in f.small for f in found.values()) > 1:
            copied.add(name)
    return copied


def _is_cast_of(value: Value, name: str) -> bool:
    """Whether a cast may stand between the input of that name and the value: the copy would have another
    size in memory."""
    ways, seen = [value], set[str]()
    while ways and len(seen) < STEPS:
        node = ways.pop().node()
        row = row_of(node)
        if row is not None and row[0].gradient == "cast":
            return True
        for operand in inputs(node):
            if is_tensor(operand) and operand.debugName() not in (name, *seen):
                seen.add(operand.debugName())
                ways.append(operand)
    return bool(ways)


def _gradient(saved: SavedValues, output: int) -> Value:
    """What the backward gets as the gradient of the output."""
    return graph_inputs(saved.backward)[list(saved.gradients).index(output)]


def _derivative(value: Value, argument: Value) -> Node | None:
    """The derivative of the softmax that gives `value`, if it alone reads `argument` in the backward."""
    kind = SOFTMAX.get(value.node().kind())
    readers = [use for use in argument.uses() if not asks_for_dtype(use)]
    if kind is None or len(readers) != 1 or (readers[0].user.kind(), readers[0].offset) != (kind, 1):
        return None
    return readers[0].user


def _keep(saved: SavedValues, found: _Found, known: dict[str, Value], maker: Node) -> SavedValues:
    """`saved`, where the backward has what was found; `known` has it then."""
    for name, value in found.numbers.items():
        saved, known[name] = saved.keeping(value)
    for name, (value, place) in found.instead.items():
        saved, known[name] = saved.keeping(value, place)
    for name, (value, place) in found.small.items():
        saved, known[name] = saved.keeping_copy(value, maker, place)
    return saved


def _keep_dtype(saved: SavedValues, value: Value, argument: Value) -> SavedValues:
    """`saved`, where the backward has the dtype of `value`, instead of asking for that of `argument`: to ask
    what is computed there would part its group from that of the derivative."""
    asking = [use.user for use in argument.uses() if use.user.kind() == _DTYPE]
    if asking:
        dtype = saved.forward.create(_DTYPE, [value], 1).insertAfter(value.node()).output()
        dtype.setType(asking[0].output().type())
        saved, known = saved.keeping(dtype)
        for node in asking:
            node.output().replaceAllUsesWith(known)
    return saved
