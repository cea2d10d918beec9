"""Which nodes can be fused, and for which device.

In: a node whose values carry types. Out: a `Verdict`: the device of the group it could join, or the reason,
as a sentence, why it cannot. Example: `examine(node, horizon).reason` -> "aten::polar is not in the op
table".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from .. import log, options
from ..errors import Refusal
from ..graph.evaluate import CONTROL, OPERATIONS, QUESTIONS, is_number, is_plain
from ..graph.rows import Knowledge, arguments, row_of
from ..graph.wrapper import (
    CONSTANT,
    LIST,
    Block,
    Graph,
    Node,
    Schema,
    Value,
    blocks,
    inputs,
    is_constant,
    is_plain_list,
    is_tensor,
    is_tensor_list,
    nodes_in,
    nodes_with_blocks,
    operands,
    outputs,
    schema,
    used_outputs,
    with_items,
)
from ..ir.dtypes import DTYPES
from ..ops import table, unsupported
from ..planning import eager_random

MAX_RANK = 8

#: Types, as schemas write them, of values that a group can take as inputs, besides tensors.
_PASSABLE = frozenset(
    """
    int float bool complex number str NoneType List[int] List[bool] Optional[int] Optional[float]
    Optional[bool] Optional[number] Optional[List[int]] Optional[List[bool]] Optional[str]
""".split()
)


@dataclass(frozen=True)
class Verdict:
    """`device` is where the node runs. `loose`: it sees nothing but 0-dim CPU tensors, so it is as good on
    any device as long as its results stay inside. `reason` is None for a fusible node, "" for one that no
    one would ask about (no tensor op)."""

    device: str | None = None
    loose: bool = False
    reason: str | None = None


_UNASKED = Verdict(reason="")  # of a constant


@dataclass
class Refusals:
    """Why nodes of one graph are not fused, as (node text, sentence); `explain` asks for the `reason` of a
    node that is still there when the graph is done."""

    entries: list[tuple[str, str]] = field(default_factory=list)
    _exactly: dict[tuple, str] = field(default_factory=dict)
    _roughly: dict[tuple, str] = field(default_factory=dict)

    def add(self, node: Node, sentence: str) -> None:
        text, _, place = str(node).partition("\n")[0].partition(" # ")
        self.entries.append((text.strip(), sentence))
        made = node.outputsAt(0).unique() if node.outputsSize() else None
        self._exactly[node.kind(), place, made] = sentence
        self._roughly[node.kind(), place] = sentence
        if log.enabled("partition", log.UPDATE):
            log.write("partition", f"{node.kind()} is not fused: {sentence}", str(node).rstrip(), log.UPDATE)

    def reason(self, node: Node) -> str:
        """What was said last of the node or, where passes have made it anew, of one of its kind from its
        place in the source; "" for nothing."""
        place = str(node).partition("\n")[0].partition(" # ")[2]
        made = node.outputsAt(0).unique() if node.outputsSize() else None
        known = self._exactly.get((node.kind(), place, made))
        return known if known is not None else self._roughly.get((node.kind(), place), "")


def examine(node: Node, knowledge: Knowledge, skip_kinds: frozenset[str] | set[str] = frozenset()) -> Verdict:
    """Whether the node can be fused. Looks at the node alone; order and aliasing are the matter of
    `effects` and `cluster`."""
    kind = node.kind()
    if kind == CONSTANT:
        return _UNASKED
    if kind in CONTROL:
        return _control(node, knowledge)
    found = row_of(node)
    if found is None:
        return Verdict(reason=_foreign(node))
    row, its_schema = found
    if (row.writes or its_schema.writes) and not node.hasUses():
        return Verdict(reason=f"nobody reads a result of {row.name}, which changes its operands")
    if row.name in skip_kinds:
        return Verdict(reason=f"{row.name} is in the skip set")
    if row.not_empty and 0 in (node.inputsAt(0).type().sizes() or ()):
        return Verdict(reason=f"{row.name} of no elements has no statistics")
    if reason := _left(row, its_schema, node, knowledge):
        return Verdict(reason=reason)
    given, made = inputs(node), used_outputs(node)
    alike = (row.name, its_schema.overload, *map(knowledge.sign, given), None, *map(knowledge.sign, made))
    verdict = knowledge.verdicts.get(alike)
    if verdict is None:
        verdict, holds_for_all = _judge(node, given, made, found, knowledge)
        if holds_for_all:
            knowledge.verdicts[alike] = verdict
    return verdict


def _judge(
    node: Node, given: list[Value], made: list[Value], found: tuple[table.Row, Schema], knowledge: Knowledge
) -> tuple[Verdict, bool]:
    """The verdict on a node that reads `given` and makes `made`, and whether all nodes whose values have the
    same signs have it."""
    row, its_schema = found
    values = with_items([v for name, v in zip(its_schema.arguments, given) if name not in row.ignored])
    reason = _passable(given, its_schema) or _typed(values + made, knowledge)
    if reason:
        return Verdict(reason=reason), False  # which names the value
    device, loose, reason = _device([v for v in values + made if is_tensor(v)], knowledge)
    if reason is not None:
        return Verdict(device, loose, reason), False
    places = with_items([v for name, v in zip(its_schema.arguments, given) if name == row.places])
    if any(knowledge.facts(v).device != device for v in places if is_tensor(v)):
        return Verdict(device, loose, f"its `{row.places}` is on another device"), False
    eager = None
    if row.family == "random" and options.enabled("eager_random") and node.isNondeterministic():
        eager = eager_random.grid_of
        try:
            eager(device)
        except Refusal as refusal:
            return Verdict(device, loose, f"{row.name} is left to torch: {refusal}"), False
    result, holds_for_all = row.outcome(arguments(node, its_schema, knowledge), device, eager=eager)
    reason = _other_dtype(row, outputs(node), result, knowledge) if isinstance(result, tuple) else result
    return Verdict(device, loose, reason), holds_for_all and row.family != "random"


def _left(row: table.Row, its_schema: Schema, node: Node, knowledge: Knowledge) -> str | None:
    """Why the node had better be left to torch, for the sizes that were profiled."""
    if row.left is None:
        return None
    read = [v for v in outputs(node) if v.uses()]  # of others no sizes are profiled
    tensors = [v for v in (*inputs(node), *read) if is_tensor(v)]
    device, sizes = knowledge.facts(tensors[0]).device, [v.type().sizes() for v in tensors]
    reason = None
    if None in sizes and row.left_unsized is not None:
        reason = row.left_unsized(arguments(node, its_schema, knowledge))
    elif device is not None and None not in sizes:
        reason = row.left(device, *sizes)
    return f"{row.name} is left to torch: {reason}" if reason else None


def _control(node: Node, knowledge: Knowledge) -> Verdict:
    """Whether an If or Loop can be carried out while a plan is made: it chooses views, by integers that a
    plan can know, or computes one way or another by a tensor's rank, which the guard has tested."""
    results = [v for v in outputs(node) if v.uses()]
    used = operands(node)
    if not results or not all(map(is_tensor, results)):
        return Verdict(reason="")
    reason = _unplanned(node, knowledge, _asks_for_rank(node))
    if reason is None and not all(is_tensor(v) or is_constant(v) or is_plain(v.type()) for v in used):
        reason = f"{node.kind()} depends on more than integers"
    reason = reason if reason is not None else _typed(used + results, knowledge)
    if reason is not None:
        return Verdict(reason=reason)
    return Verdict(*_device([v for v in used + results if is_tensor(v)], knowledge))


def _asks_for_rank(node: Node) -> bool:
    """Whether the node is an If on the rank of a tensor."""
    test = node.inputsAt(0).node()
    return (
        node.kind() == "prim::If"
        and test.kind() == "aten::eq"
        and test.inputsAt(0).node().kind() == "aten::dim"
        and test.inputsAt(1).node().kind() == CONSTANT
    )


def separate_blocks(graph: Graph, knowledge: Knowledge) -> Iterator[Graph | Block]:
    """The blocks that have groups of their own: not those of an If or Loop that can be part of a group."""
    waiting: list[Graph | Block] = [graph]
    while waiting:
        block = waiting.pop()
        yield block
        for node in nodes_with_blocks(block):
            if node.kind() not in CONTROL or examine(node, knowledge).reason is not None:
                waiting += blocks(node)


def _unplanned(node: Node, knowledge: Knowledge, computes: bool) -> str | None:
    """Why what the blocks of an If or Loop do cannot be done while a plan is made; None if it can. They may
    hold views and integer arithmetic and, if `computes`, other ops; those that did not run while profiling
    are not looked at."""
    for inner in (n for block in blocks(node) for n in nodes_in(block)):
        kind, results = inner.kind(), outputs(inner)
        if kind in CONTROL:
            reason = _unplanned(inner, knowledge, computes)
        elif kind == CONSTANT or (kind == LIST and is_plain(inner.output().type())):
            continue
        elif any(is_tensor(v) for v in results):
            found = row_of(inner)
            if (
                found is None
                or found[0].family == "random"
                or found[0].table
                or not (found[0].is_view or computes)
            ):
                reason = ""
            else:
                seen = not found[0].is_view and all(knowledge.facts(v).known for v in results if is_tensor(v))
                reason = examine(inner, knowledge).reason if seen else None
        else:
            asks = kind in QUESTIONS
            plain = all(is_number(v.type()) or asks and is_tensor(v) for v in inputs(inner) + results)
            reason = None if (asks or kind in OPERATIONS) and plain else ""
        if reason is not None:
            return reason
    return None


def refusal(node: Node, device: str) -> str | None:
    """Why the node cannot be part of a group on `device`; None if it can."""
    verdict = examine(node, Knowledge())
    if verdict.reason is not None:
        return verdict.reason
    if verdict.device != device and not verdict.loose:
        return f"{node.kind()} runs on {verdict.device}, the group on {device}"
    return None


def _foreign(node: Node) -> str:
    """The reason for a node without a row; nothing is said of constants, control flow, what other passes have
    made of nodes, and the like."""
    known = unsupported.sentence(node.kind())
    if known is not None:
        return known
    if node.kind().startswith(("prim::", "tsfuser::")) or not any(is_tensor(v) for v in outputs(node)):
        return ""
    found = schema(node)
    if found and found.writes and table.find(found.name.rstrip("_"), found.overload):
        return f"{found.name} changes its operand in place, where something else than its readers can see it"
    overload = f".{found.overload}" if found and found.overload else ""
    return f"{node.kind()}{overload} is not in the op table (docs/ops.md lists what is)"


def _passable(values: list[Value], found: Schema) -> str | None:
    """Why an argument cannot enter a group."""
    for name, value in zip(found.arguments, values):
        if is_tensor(value) or is_constant(value) or is_plain_list(value) or is_tensor_list(value):
            continue
        type_ = str(value.type().annotation_str)
        if type_ not in _PASSABLE:
            return f"`{name}` of {found.name} is a {type_} that is not a constant"
    return None


def _typed(values: list[Value], knowledge: Knowledge) -> str | None:
    """Why a tensor's type does not do."""
    for value in values:
        if not is_tensor(value):
            continue
        found = knowledge.facts(value)
        if not found.known:
            return f"%{value.debugName()} was not seen while profiling: its dtype, device or rank is unknown"
        if found.dtype not in DTYPES:
            return f"%{value.debugName()} is of the unsupported dtype {found.dtype}"
        if found.rank > MAX_RANK:
            return f"%{value.debugName()} has {found.rank} dims, more than {MAX_RANK}"
    return None


def _other_dtype(
    row: table.Row,
    made: list[Value],
    results: tuple[tuple[str, int | None] | None, ...],
    knowledge: Knowledge,
) -> str | None:
    """Why the first result that is read is not of the dtype that the op gives by itself: under autocast,
    operators whose casts stand in no graph compute in another one, as aten::square does on CUDA, which is
    aten::pow inside. The others may have been traced with a dtype that eager does not give: the statistics of
    a layer norm of 16 bits whose weight has 32, on the CPU."""
    for value, result in zip(made, results):
        seen = knowledge.facts(value) if value.uses() and is_tensor(value) else None
        if seen and result and seen.known:
            other = f"{row.name} gave {seen.dtype} while profiling, not {result[0]}: autocast is on"
            return other if seen.dtype != result[0] else None
    return None


def _device(tensors: list[Value], knowledge: Knowledge) -> tuple[str | None, bool, str | None]:
    """Device, looseness, and the reason if there is no single device that can be served."""
    seen = dict.fromkeys(knowledge.facts(v)[1:] for v in tensors)
    firm = {device for device, rank in seen if device != "cpu" or rank}
    if not firm and seen:
        return "cpu", True, None
    if len(firm) != 1:
        return (
            None,
            False,
            f"its tensors are on different devices: {', '.join(sorted(firm))}"
            if firm
            else "it has no tensors",
        )
    (device,) = firm
    if not device.startswith(("cuda", "cpu")):
        return None, False, f"it runs on {device}"
    return device, False, None
