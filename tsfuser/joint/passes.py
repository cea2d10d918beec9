"""From a joint graph to forward and backward: the passes, in order.

In: a `Joint`. Out: a `Cut`. Order of `PASSES`, and why:

  drop_idle_sums    first: less for all others to do
  write_loss_heads  before note_types: what it writes gets types, too
  note_types        before others, which ask for sizes
  part_one_by_one   before all that asks which ops are in groups
  note_eager        before equal ops are one: eager's derivative of x / y computes x / y again, and saves x
                    and y, though a result of the forward equals that
  merge_equal_ops   before the cut: rules ask twice for the same, and the cut counts bytes
  lay_out_gradients behind note_types: it asks for ranks
  read_results      behind note_eager: it asks what eager saves
  pack_operands     behind merge_equal_ops: products of forward and backward read one copy; before the cut,
                    which saves that, not what it is made of
  copy_inputs       behind note_eager: it asks what eager saves; before the cut, which chooses
  write_norms       behind it: an op that reads a norm twice is one by now
  write_softmaxes   behind note_types: it asks for sizes
  note_written      types of the nodes that these have written, as the cut counts bytes
  cut               behind all that changes what the backward reads
  round_saved       behind it: it asks what is saved
  compute_late      before ops in place, which have an order of their own
  write_to_new      behind the cut: that and what comes before see no op in place
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

import torch

from ..graph.matmul_operands import pack_operands
from ..graph.passes import Pass, run
from ..graph.roundings import round_saved
from ..graph.rows import row_of
from ..graph.wrapper import (
    Graph,
    Node,
    Value,
    graph_outputs,
    inputs,
    insert,
    is_tensor,
    nodes_in,
    outputs,
    schema,
    use_count,
)
from ..ops import without_row
from .copies import copy_inputs
from .cut import cut
from .divide import Cut, Written
from .equal_ops import merge_equal_ops
from .example_types import note_types
from .layouts import lay_out_gradients
from .loss_heads import write_loss_heads
from .norms import write_norms
from .order import compute_late
from .parts import part_one_by_one
from .results import read_results
from .reverse import Joint
from .roles import Roles
from .sizes import drop_idle_sums
from .softmaxes import is_filled, write_softmaxes


@dataclass
class Work:
    """What the passes share. `keep_inputs`: that of `cut`; `filled`: that of `write_softmaxes`;
    `leave_results`, `merged`: that of `merge_equal_ops`, and what it gives; `written`: what the backward may
    compute again; `by_eager`: what eager saves (`Roles.read_directly`); `parts`: what the cut gives."""

    joint: Joint
    keep_inputs: bool = False
    leave_results: bool = False
    filled: Callable[[Value, int], bool] = is_filled
    merged: dict[int, int] = field(default_factory=dict)
    written: list[Written] = field(default_factory=list)
    by_eager: dict[int, frozenset[int]] = field(default_factory=dict)
    parts: Cut | None = None
    is_done: bool = False

    def __str__(self) -> str:
        return str(self.joint.graph) if self.parts is None else f"{self.parts.forward}{self.parts.backward}"


def divide(joint: Joint, keep_inputs: bool = False) -> Cut:
    """Forward and backward of a joint graph, which is changed. Raises Refusal as `cut` does."""
    work = Work(joint, keep_inputs)
    run(work, PASSES)
    assert work.parts is not None
    return work.parts


def _write(forms: Callable[[Graph], list[Written]]) -> Pass:
    return Pass(forms.__name__, lambda work: work.written.extend(forms(work.joint.graph)))


def _note_types(work: Work) -> None:
    note_types(work.joint.graph, work.joint.numbers)


def _note_written(work: Work) -> None:
    if work.written:
        _note_types(work)
    for made in work.written:
        kept = None if made.parts else work.by_eager.get(made.instead.unique())
        if kept is not None:  # eager saves the same numbers
            work.by_eager.setdefault(made.value.unique(), kept)


def _note_eager(work: Work) -> None:
    work.by_eager = Roles(work.joint).read_directly()


def _read_results(work: Work) -> None:
    roles = cache(Roles)  # most graphs ask nothing

    def is_saved(value: Value, derivative: Node) -> bool:
        kept = work.by_eager.get(value.unique())
        return kept is not None and roles(work.joint).served(derivative.inputsAt(0)) <= kept

    if read_results(work.joint.graph, is_saved):
        _note_types(work)


def _merge_equal_ops(work: Work) -> None:
    work.merged.update(merge_equal_ops(work.joint, work.leave_results))


def _write_softmaxes(work: Work) -> None:
    work.written.extend(write_softmaxes(work.joint.graph, work.filled))


def _copy_inputs(work: Work) -> None:
    if not work.keep_inputs:
        work.written.extend(copy_inputs(work.joint, work.by_eager))


def _cut(work: Work) -> None:
    work.parts = cut(work.joint, work.by_eager, work.keep_inputs, work.written)


def _round_saved(work: Work) -> None:
    assert work.parts is not None
    made = graph_outputs(work.parts.forward)
    round_saved(work.parts.forward, [made[j] for j in work.parts.saved_outputs])


def _compute_late(work: Work) -> None:
    assert work.parts is not None
    compute_late(work.parts.backward, len(work.parts.asked))


def _write_to_new(work: Work) -> None:
    assert work.parts is not None
    write_to_new(work.parts.backward)


def write_to_new(graph: Graph) -> None:
    """Ops that are not fused write to the zeros that were made for them, which they would copy else. Before:
    `%z = aten::new_zeros(...); %g = aten::index_put(%z, ...)`; after: `%g = aten::index_put_(%z, ...)`."""
    for node in nodes_in(graph):
        if row_of(node) is None and node.inputsSize() and _is_read_once(node.inputsAt(0)):
            if _writes_alike(node):
                made = insert(graph, node, f"{node.kind()}_", inputs(node)).output()
                made.setType(node.output().type())
                node.output().replaceAllUsesWith(made)
                node.destroy()


def _is_read_once(value: Value) -> bool:
    """Whether the value is zeros that one op reads."""
    return is_tensor(value) and value.node().kind() in without_row.ZEROS and use_count(value) == 1


def _writes_alike(node: Node) -> bool:
    """Whether the form in place takes the same arguments, and gives what it writes to."""
    found = schema(node)
    if found is None or len(outputs(node)) != 1:
        return False
    return any(
        [(a.name, a.real_type.annotation_str) for a in other.arguments]
        == list(zip(found.arguments, found.types))
        for other in torch._C._jit_get_schemas_for_operator(f"{node.kind()}_")
    )


PASSES = (
    Pass("drop_idle_sums", lambda work: drop_idle_sums(work.joint)),
    _write(write_loss_heads),
    Pass("note_types", _note_types),
    Pass("part_one_by_one", lambda work: part_one_by_one(work.joint.graph)),
    Pass("note_eager", _note_eager),
    Pass("lay_out_gradients", lambda work: lay_out_gradients(work.joint.graph)),
    Pass("read_results", _read_results),
    Pass("merge_equal_ops", _merge_equal_ops),
    Pass("pack_operands", lambda work: pack_operands(work.joint.graph)),
    Pass("copy_inputs", _copy_inputs),
    _write(write_norms),
    Pass("write_softmaxes", _write_softmaxes),
    Pass("note_written", _note_written),
    Pass("cut", _cut),
    Pass("round_saved", _round_saved),
    Pass("compute_late", _compute_late),
    Pass("write_to_new", _write_to_new),
)
