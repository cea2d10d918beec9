"""The order that nodes of a block must keep, beyond who reads whose results.

In: the nodes of a block. Out: for each node the earlier nodes that must stay before it, and the nodes that
must not be fused because their results may share memory with something that is written. Only nodes that
write, that touch what is written somewhere, or that draw random numbers are held in order; everything else
may move freely, so a graph without writers costs no alias analysis. Example: in

    %y = aten::relu(%x);  %z = aten::add_(%x, %b, %1);  %w = aten::neg(%x)

`add_` stays after `relu`, and `neg` after `add_`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import zip_longest

import torch

from .. import _C
from ..ops import table, without_row
from .rows import row_of
from .wrapper import (
    Graph,
    Node,
    Value,
    all_nodes,
    blocks,
    constant_of,
    graph_outputs,
    inputs,
    is_constant,
    is_tensor,
    nodes_in,
    outputs,
    schema,
)

#: Kinds that neither write nor print nor raise. All other prim kinds are held in order.
_PURE = frozenset(
    f"prim::{name}"
    for name in """
        Constant ListConstruct ListUnpack TupleConstruct TupleUnpack TupleIndex TupleSlice DictConstruct
        NumToTensor dtype device layout is_cuda is_cpu is_sparse requires_grad itemsize data type
        isinstance min max abs rangelist unchecked_cast unchecked_unwrap_optional Uninitialized GetAttr
        TypeCheck ConstantChunk AutogradZero AutogradAdd AutogradAllZero AutogradAnyNonZero
        AutogradAllNonZero BroadcastSizes ReductionSizes ChunkSizes CudaFusionGuard
        FusionGroup TensorExprGroup
""".split()
) | {  # as they take any number of operands, schemas say nothing
    "tsfuser::counts",
    "tsfuser::asked_item",
    "tsfuser::joined_before",
    "tsfuser::joined_dim",
}
#: Kinds that do what their `Subgraph` does.
_WITH_GRAPH = frozenset(
    f"prim::{name}" for name in ("FallbackGraph", "DifferentiableGraph", "FunctionalGraph", "CudaFusionGroup")
)
#: Kinds that write to operands though their schemas do not say so: batch norm, to its running statistics.
_SECRET_WRITERS = frozenset(row.name for row in table.all_rows() if row.writes)
#: The attribute that tells them apart where they write to one tensor.
_NUMBER = "number"
#: Kinds that return a list of numbers that nothing else holds.
_NEW_LISTS = frozenset(("aten::mul", "aten::add", "prim::ListConstruct"))
#: Kinds that take tensors, but read nothing of their memory; or not before the graph ends.
_HOLDERS = frozenset(("prim::ListConstruct", "tsfuser::count"))
#: Kinds that may switch gradients on or off.
_SWITCHES = frozenset(("prim::Enter", "prim::Exit", "aten::set_grad_enabled"))
#: aten ops that may return an operand, or views of it, though their schemas do not say so.
SECRET_VIEWS = frozenset(row.name for row in table.all_rows() if row.secret_view).union(
    without_row.SECRET_VIEWS
)

#: Kinds that draw random numbers, set where these begin, or may do either, though torch does not say so.
_DRAWING = frozenset(
    f"aten::{name}" for name in ("manual_seed", "seed", "_no_grad_uniform_", "_no_grad_normal_")
) | frozenset(f"prim::{name}" for name in ("CallFunction", "CallMethod", "PythonOp", "fork"))

PURE, ACTS, WRITES = range(3)


def effect(node: Node) -> int:
    """PURE: may move wherever its operands are. ACTS: prints or raises. WRITES: may change memory, and
    nothing is known of which."""
    kind = node.kind()
    if kind in _PURE:
        return PURE
    if kind in without_row.ACTING or kind == "prim::RaiseException" or kind == "prim::Print":
        return ACTS
    if kind.startswith(("aten::", "tsfuser::")):
        its_schema = schema(node)
        return WRITES if its_schema is None or its_schema.writes or secretly_written(node) else PURE
    inner = [node.g("Subgraph")] if kind in _WITH_GRAPH else blocks(node)
    if inner:
        found = max((effect(n) for block in inner for n in nodes_in(block)), default=PURE)
        return PURE if found == WRITES and blocks(node) and _keeps_to_itself(node) else found
    return WRITES


def draws(node: Node) -> bool:
    """Whether the node, or one inside, takes random numbers, or may set where they begin."""
    kind = node.kind()
    inner = [node.g("Subgraph")] if kind in _WITH_GRAPH else blocks(node)
    if inner:
        return any(draws(n) for block in inner for n in nodes_in(block))
    return _may_draw(kind) and not _is_switched_off(node)


def _is_switched_off(node: Node) -> bool:
    """Whether the node draws nothing: it does not train, or a product of attention drops nothing."""
    found = schema(node)
    for name, value in zip(found.arguments, inputs(node)) if found else ():
        off = {"train": False, "training": False, "dropout": 0.0, "dropout_p": 0.0}.get(name)
        if off is not None and is_constant(value) and constant_of(value) == off:
            return True
    return False


@cache
def _may_draw(kind: str) -> bool:
    """Whether nodes of this kind may take random numbers, or set where they begin: torch says so of its ops.
    Other libraries' ops may do anything, and so may calls."""
    space, _, name = kind.partition("::")
    if space in ("prim", "tsfuser") or kind in _DRAWING:
        return kind in _DRAWING
    if space != "aten":
        return True
    packet = getattr(torch.ops.aten, name, None)  # None: an op of TorchScript's alone
    overloads = packet.overloads() if packet is not None else ()
    return any(torch.Tag.nondeterministic_seeded in getattr(packet, o).tags for o in overloads)


def secretly_written(node: Node) -> list[Value]:
    """The operands that the node changes though its schema does not say so."""
    if node.kind() not in _SECRET_WRITERS:
        return []
    found = schema(node)
    row = table.find(found.name, found.overload) if found else None
    written = []
    for target, switch in row.writes if row else ():
        value, flag = (node.inputsAt(found.arguments.index(name)) for name in (target, switch))
        off = is_constant(flag) and constant_of(flag) is False
        if not off and value.type().kind() != "NoneType":
            written.append(value)
    return written


def remove_dead_code(graph: Graph) -> None:
    """Drops nodes that nobody reads; ops that write, secretly or not, stay. torch's pass knows only what
    schemas say."""
    kept = [_keep(graph, node) for node in _secret_writers(graph)]
    torch._C._jit_pass_dce(graph)
    for node in kept:
        node.destroy()


def tell_writers_apart(graph: Graph) -> None:
    """Has torch's passes take no two ops for equal that write secretly to the same tensor: each gets a number
    as an attribute."""
    known: dict[int, int] = {}
    for node in _secret_writers(graph):
        for value in secretly_written(node)[:1]:
            node.i_(_NUMBER, known.setdefault(value.unique(), 0))
            known[value.unique()] += 1


def keep_writers(graph: Graph, read: Callable[[Node], list[Value]]) -> None:
    """Gives ops that write secretly, and of whose results no output is computed, a reader that stays: torch's
    passes are going to run on the graph. `read`: the operands that a node reads the elements of."""
    leading = {v.unique() for v in graph_outputs(graph)}
    for node in reversed(nodes_in(graph)):
        if any(v.unique() in leading for v in outputs(node)):
            leading.update(v.unique() for v in read(node))
    for node in _secret_writers(graph):
        if leading.isdisjoint(v.unique() for v in outputs(node)):
            _keep(graph, node)


def _keep(graph: Graph, node: Node) -> Node:
    """A reader of the node's result that torch does not take for dead."""
    reader = graph.create("tsfuser::kept", [node.outputsAt(0)], 0)
    return reader.insertAfter(node)


def _secret_writers(graph: Graph) -> list[Node]:
    """Nodes that write secretly, or inside, in their graphs."""
    found = [n for kind in sorted(_SECRET_WRITERS) for n in graph.findAllNodes(kind, True)]
    found = [n for n in found if secretly_written(n)]
    for kind in sorted(_WITH_GRAPH):
        nodes = graph.findAllNodes(kind, True)
        found += [n for n in nodes if n.outputsSize() and _secret_writers(n.g("Subgraph"))]
    return found


def _keeps_to_itself(node: Node) -> bool:
    """Whether all that happens in an If or Loop is that lists are filled which were made in it."""
    inner, waiting = [], blocks(node)
    while waiting:
        for n in nodes_in(waiting.pop()):
            inner.append(n)
            waiting += blocks(n)
    lists = {n.output().unique() for n in inner if n.kind() in _NEW_LISTS}
    acting = [n for n in inner if not blocks(n) and effect(n) != PURE]
    return all(n.kind() == "aten::_set_item" and n.inputsAt(0).unique() in lists for n in acting)


def may_return_operand(node: Node) -> bool:
    """Whether a result of the node may be its operand, or a view of it."""
    found = schema(node)
    return node.kind() in SECRET_VIEWS or (found is not None and found.aliases)


class Effects:
    """The effects of a whole graph: made once, asked for each block."""

    def __init__(self, graph: Graph):
        nodes = all_nodes(graph)
        found = set(map(effect, nodes))
        #: Whether anything in the graph may write.
        self.writes = writes = WRITES in found
        self._pure = found <= {PURE}  # and stays so: passes make pure nodes only
        secrets = [v for node in nodes for v in secretly_written(node)] if writes else []
        self._memory = _C.Memory(graph, secrets) if writes else None
        self._learned: dict[int, bool] = {}
        #: Whether statistics are written that the graph computes: their nodes may join groups, and be gone.
        self._of_any = any(v.node().kind().startswith("aten::") for v in secrets)
        #: Whether torch's passes would be wrong about what is written.
        self.misled = self._of_any or (self._memory is not None and self._memory.hides_writes())

    def is_written(self, value: Value) -> bool:
        """Whether anything in the graph may write to memory that the value may share. It may, of a value that
        was made after the analysis, if nobody has said how it is (`learn`)."""
        if self._memory is None or self._of_any:
            return self.writes
        learned = self._learned.get(value.unique())
        return self._memory.is_written(value) if learned is None else learned

    def is_changed(self, value: Value) -> bool:
        """Whether anything in the graph may change which items the list `value` has. What writes to items
        that are tensors does not."""
        return self.writes and (self._of_any or self._memory.is_changed(value))

    def learn(self, values: list[Value], written: bool) -> None:
        """Says whether values are written that were made after the analysis."""
        self._learned.update((v.unique(), written) for v in values)

    def may_return_written(self, node: Node) -> bool:
        """Whether a result of the node may be a view of a tensor that is written: a group would return a
        copy."""
        if not self.writes or not may_return_operand(node):
            return False
        found = row_of(node)
        names = found[1].arguments if found else ()
        operands = [
            v for v, name in zip_longest(inputs(node), names) if not found or name != found[0].dtype_from
        ]
        return any(self.is_written(v) for v in operands + outputs(node) if is_tensor(v))

    def order(self, nodes: list[Node]) -> dict[int, list[int]]:
        """Position of each node that is held in order -> positions of earlier nodes that it must follow.
        Writers and actors stand in a row; a node that touches written memory stays between its neighbours in
        that row. So do all nodes where one switches gradients on or off, or enters a `with` that might. What
        draws random numbers stands in a row of its own: else other groups, of the same program without
        gradients, say, would draw other numbers from the same state of the generator."""
        drawing = [i for i, node in enumerate(nodes) if draws(node)]
        after: dict[int, list[int]] = {i: [before] for before, i in zip(drawing, drawing[1:])}
        if self._pure:
            return after
        last: int | None = None
        readers: list[int] = []
        switched = any(node.kind() in _SWITCHES for node in nodes)
        for i, node in enumerate(nodes):
            kind = effect(node)
            if kind == PURE and not switched and not self._touches_written(node):
                continue
            held = after.setdefault(i, [])
            held += [] if last is None else [last]
            if kind == PURE:
                readers.append(i)
            else:
                held += readers
                last, readers = i, []
        return after

    def _touches_written(self, node: Node) -> bool:
        if not self.writes or node.kind() == "prim::Constant" or node.kind() in _HOLDERS:
            return False
        if node.kind() == "prim::GetAttr":  # which reads what the module holds, not what is in a tensor
            return self.is_changed(node.inputsAt(0))
        if any(self.is_written(v) for v in inputs(node)):
            return True
        return any(self._touches_written(inner) for block in blocks(node) for inner in nodes_in(block))
