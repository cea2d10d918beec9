"""What the forward of a `prim::DifferentiableGraph` keeps for its backward.

In: both graphs, as autodiff has made them, and the numbers that tie them. Out: `SavedValues`, which says
which value is which, and drops what the backward needs no more. Example, of a forward that returns (%y, %x,
%n) and keeps the last two:

    backward(%grad_y, %grad_n, %x, %n)    and after `drop({2})`    backward(%grad_y, %x)
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from ....graph.effects import may_return_operand, remove_dead_code
from ....graph.wrapper import (
    Graph,
    Node,
    Value,
    all_nodes,
    blocks,
    constant_before,
    graph_inputs,
    graph_outputs,
    inputs,
    insert,
    is_tensor,
    nodes_in,
    operands,
    outputs,
    schema,
    use_count,
)

_ASKS_FOR_DTYPE = (("prim::dtype", 0), ("aten::type_as", 1))


@dataclass(frozen=True)
class SavedValues:
    """What the backward gets. Its inputs are a gradient for each of `gradients`, then the forward's inputs
    `inputs`, then its outputs `outputs`: numbers all. The program sees the first `real` outputs."""

    forward: Graph
    backward: Graph
    real: int
    gradients: Sequence[int]
    inputs: Sequence[int]
    outputs: Sequence[int]

    def is_whole(self) -> bool:
        """Whether the numbers account for all that the backward gets."""
        return len(graph_inputs(self.backward)) == len(self.gradients) + len(self.inputs) + len(self.outputs)

    def of_inputs(self) -> Iterator[tuple[Value, Value]]:
        """(value of the forward, what stands for it in the backward) for its inputs."""
        given, arguments = graph_inputs(self.forward), graph_inputs(self.backward)[len(self.gradients) :]
        return zip((given[i] for i in self.inputs), arguments)

    def of_outputs(self) -> Iterator[tuple[int, Value, Value]]:
        """(number of the output, value of the forward, what stands for it in the backward)."""
        results = graph_outputs(self.forward)
        arguments = graph_inputs(self.backward)[len(self.gradients) + len(self.inputs) :]
        return ((j, results[j], argument) for j, argument in zip(self.outputs, arguments))

    def exposed(self, written: Collection[int]) -> set[str]:
        """Names of the forward's values whose memory the program may write to before the backward: inputs,
        the results `written`, and what may share memory with these."""
        results, nodes = graph_outputs(self.forward), nodes_in(self.forward)
        names = _names(graph_inputs(self.forward)) | _names(results[j] for j in written)
        sharing = [(_names(operands(n)), _names(outputs(n))) for n in nodes if _may_share(n)]
        # Backwards every view leads to what it is of, then forwards that to all its views.
        for read, made in reversed(sharing):
            names |= read if made & names else set()
        for read, made in sharing:
            names |= made if read & names else set()
        return names

    def in_results(self) -> set[str]:
        """Names of what the program gets, and of what that may be a view of: they are in memory whatever is
        kept."""
        names = set()
        for value in graph_outputs(self.forward)[: self.real]:
            names.add(value.debugName())
            while may_return_operand(value.node()):
                value = value.node().inputsAt(0)
                names.add(value.debugName())
        return names

    def join(self) -> None:
        """Has the backward read a value that is kept several times, as both operands of `x * x` are, in one
        place. The others are `unused` then."""
        first = {value.unique(): argument for value, argument in self.of_inputs()}
        for _, value, argument in self.of_outputs():
            other = first.setdefault(value.unique(), argument)
            if other.unique() != argument.unique():
                argument.replaceAllUsesWith(other)

    def gives_nothing(self) -> bool:
        """Whether no input of the forward gets a gradient."""
        results = [result.node() for result in graph_outputs(self.backward)]
        return all(node.kind() == "prim::TupleConstruct" and node.inputsSize() == 0 for node in results)

    def drop_all(self) -> tuple[list[int], list[int]]:
        """Takes from both graphs all that is kept, of a backward that gives nothing. Returns the numbers
        `gradients` and `outputs` of what is left: none."""
        for node in reversed(nodes_in(self.backward)):
            if not node.hasUses():
                node.destroy()
        given = len(self.gradients) + len(self.inputs)
        for k in reversed((*range(len(self.gradients)), *range(given, given + len(self.outputs)))):
            self.backward.eraseInput(k)
        for j in reversed(range(self.real, len(graph_outputs(self.forward)))):
            self.forward.eraseOutput(j)
        return [], []

    def without_gradients(self, idle: Collection[int], still: Collection[int]) -> SavedValues:
        """The same, whose backward gets no gradients for the outputs `idle`: they are zero, and so is what is
        computed of them alone, which leaves the backward. So does what is computed of the zeros that autodiff
        writes, as for the second operand of `type_as`. What is kept for that has no gradient either. But what
        the rest of the backward reads has one where the backward is differentiated, also if the program has
        none for it; unless it is of `still`, which have none in eager."""
        idle = {*idle, *still}
        written = self.zeros()
        if not written and not idle.intersection(self.gradients):
            return self
        arguments = graph_inputs(self.backward)
        moving = {k for k, j in enumerate(self.gradients) if j < self.real and j not in idle}
        never = {k for k, j in enumerate(self.gradients) if j in still}
        while more := self._read_with(moving) - moving - never:
            moving |= more
        zero = self._zero()
        for k in reversed(range(len(self.gradients))):
            if k not in moving:
                arguments[k].replaceAllUsesWith(zero)
                self.backward.eraseInput(k)
        zeros = {zero.unique(), *written}
        for node in nodes_in(self.backward):
            given = [value for value in inputs(node) if value.unique() not in zeros]
            if node.kind() == "prim::GradOf" and not given:
                for value in outputs(node):
                    value.replaceAllUsesWith(zero)
            elif node.kind() == "prim::AutogradAdd" and len(given) < 2:
                node.output().replaceAllUsesWith(given[0] if given else zero)
        return replace(self, gradients=[self.gradients[k] for k in sorted(moving)])

    def _read_with(self, moving: Collection[int]) -> set[int]:
        """The gradients of what is kept and read by the part of the backward that the gradients `moving`
        reach. Also of what nobody reads and that part has a gradient of: a later step may have the backward
        compute something of it, which then has second derivatives."""
        arguments = graph_inputs(self.backward)[: len(self.gradients)]
        zeros = {value.unique() for k, value in enumerate(arguments) if k not in moving} | self.zeros()
        read: set[int] = set()
        reached: set[int] = set()  # gradients to which another is added
        for node in nodes_in(self.backward):
            given = {value.unique() for value in inputs(node)}
            if node.kind() in ("prim::GradOf", "prim::AutogradAdd") and given <= zeros:
                zeros.update(value.unique() for value in outputs(node))
                continue
            read.update(given)
            if node.kind() == "prim::AutogradAdd":
                reached.update(given)
            for block in blocks(node):
                for inner in all_nodes(block):
                    read.update(value.unique() for value in inputs(inner))
        places = list(self.of_outputs())
        kept = {value.unique() for _, value, argument in places if argument.unique() in read}
        unread = {value.unique() for _, value, argument in places if not use_count(argument)}
        results = graph_outputs(self.forward)
        return {
            k
            for k, (j, gradient) in enumerate(zip(self.gradients, arguments))
            if results[j].unique() in kept or (results[j].unique() in unread and gradient.unique() in reached)
        }

    def zeros(self) -> set[int]:
        """The gradients that are zero whatever the backward gets."""
        nodes = self.backward.findAllNodes("prim::AutogradZero", False)
        return {node.output().unique() for node in nodes}

    def _zero(self) -> Value:
        """A gradient of zeros at the beginning of the backward."""
        node = self.backward.create("prim::AutogradZero", [], 1)
        return node.insertBefore(nodes_in(self.backward)[0]).output()

    def without_idle(self) -> SavedValues:
        """The same, where what is kept for the backward alone has a gradient only if that is part of what
        the backward gives. Torch has any tensor that has a gradient require one, and with it the results of
        the program that are the same tensor, or a view of it. What reaches no result leaves the backward."""
        self._drop_what_reaches_nothing()
        arguments = graph_inputs(self.backward)
        idle = [k for k, j in enumerate(self.gradients) if j >= self.real and not use_count(arguments[k])]
        for k in reversed(idle):
            self.backward.eraseInput(k)
        return replace(self, gradients=[j for k, j in enumerate(self.gradients) if k not in idle])

    def _drop_what_reaches_nothing(self) -> None:
        """Takes from the backward what no result of it is computed of. Torch's pass alone would keep a node
        that calls a function, as the backward of `permute` does, and what that reads; it drops a node's
        single outputs, too."""
        remove_dead_code(self.backward)
        while dead := [node for node in nodes_in(self.backward) if not any(map(use_count, outputs(node)))]:
            for node in reversed(dead):
                node.destroy()
            remove_dead_code(self.backward)

    def without_unread_results(self) -> SavedValues:
        """The same, where nothing is kept of a result of the program that the backward does not read: the
        program may write to it."""
        place = len(self.gradients) + len(self.inputs)
        unread = [
            k
            for k, (j, _, argument) in enumerate(self.of_outputs())
            if j < self.real and not use_count(argument)
        ]
        for k in reversed(unread):
            self.backward.eraseInput(place + k)
        return replace(self, outputs=[j for k, j in enumerate(self.outputs) if k not in unread])

    def without_unread_numbers(self) -> SavedValues:
        """The same, where of what the backward does not read only tensors are kept. Autodiff asks many a
        tensor for its device, which nobody reads in the end: a group would have to store the tensor only so
        that it can be asked."""
        unread = {j for j, value, _ in self.of_outputs() if not is_tensor(value)} & self.unused()
        gradients, kept = self.drop(unread)
        remove_dead_code(self.forward)
        return replace(self, gradients=gradients, outputs=kept)

    def keeping(self, value: Value, place: Value | None = None) -> tuple[SavedValues, Value]:
        """The same, where the forward also keeps `value`, and what stands for it in the backward. `place`:
        its gradient in the backward, to which that of what is kept is added; None if it has none."""
        self.forward.setInsertPoint(self.forward.return_node())
        number = self.forward.registerOutput(value)
        argument = self.backward.addInput()
        argument.setType(value.type())
        gradients = list(self.gradients)
        if place is not None:
            gradient, first = self.backward.addInput(), len(gradients)
            last = len(graph_inputs(self.backward)) - 1
            self.backward.permuteInputs([*range(first), last, *range(first, last)])
            whole = self.backward.create("prim::AutogradAdd", [gradient, place], 1)
            whole.insertAfter(place.node())
            place.replaceAllUsesAfterNodeWith(whole, whole.output())
            gradients.append(number)
        return replace(self, gradients=gradients, outputs=[*self.outputs, number]), argument

    def keeping_copy(
        self, value: Value, before: Node, place: Value | None = None
    ) -> tuple[SavedValues, Value]:
        """`keeping`, of a copy, which the forward makes before the node `before`: the program may write to
        the value."""
        nothing = constant_before(self.forward, before, None)
        return self.keeping(insert(self.forward, before, "aten::clone", [value, nothing]).output(), place)

    def unused(self) -> set[int]:
        """The outputs that only the backward might read, and does not."""
        return {j for j, _, argument in self.of_outputs() if j >= self.real and not use_count(argument)}

    def drop(self, dropped: Collection[int]) -> tuple[list[int], list[int]]:
        """Takes the outputs `dropped` from the forward, and all that belongs to them from the backward's
        inputs. Returns the numbers `gradients` and `outputs` of what is left."""
        for numbers, start in ((self.outputs, len(self.gradients) + len(self.inputs)), (self.gradients, 0)):
            for k in reversed([k for k, j in enumerate(numbers) if j in dropped]):
                argument = graph_inputs(self.backward)[start + k]
                if use_count(argument):
                    assert start == 0, "what the backward still reads is dropped"
                    argument.replaceAllUsesWith(self._zero())
                self.backward.eraseInput(start + k)
        for j in sorted(dropped, reverse=True):
            self.forward.eraseOutput(j)
        left = {
            j: j - sum(d < j for d in dropped) for j in (*self.gradients, *self.outputs) if j not in dropped
        }
        return [left[j] for j in self.gradients if j in left], [left[j] for j in self.outputs if j in left]


def _names(values: Iterable[Value]) -> set[str]:
    """Names of those that are tensors, or may have some in them."""
    return {v.debugName() for v in values if is_tensor(v) or "Tensor" in v.type().annotation_str}


def _may_share(node: Node) -> bool:
    """Whether a result of the node may share memory with an operand. A node without a schema, such as one
    that takes tensors from a list, may."""
    return schema(node) is None or may_return_operand(node)


def gradient_outside(derivative: Node, result: int) -> Value | None:
    """The gradient that the backward has of the result of `derivative`, which is in a formula of autodiff's;
    None where it is not asked for."""
    made, block = derivative.outputsAt(result), derivative.owningBlock()
    found = zip(outputs(block.owningNode()), block.outputs())
    return next((given for given, inner in found if inner.unique() == made.unique()), None)


def asks_for_dtype(use: torch._C.Use) -> bool:
    """Whether the node that reads a tensor there asks it for its dtype only."""
    return (use.user.kind(), use.offset) in _ASKS_FOR_DTYPE


def source(value: Value) -> Value:
    """What the value may be a view of, or that itself."""
    while may_return_operand(value.node()):
        value = value.node().inputsAt(0)
    return value


def is_of_an_input(value: Value) -> bool:
    """Whether the value may be an input of its graph, or a view of one: the program may write to it."""
    return source(value).node().kind() == "prim::Param"
