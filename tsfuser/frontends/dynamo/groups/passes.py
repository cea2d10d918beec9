"""The passes that make groups in a graph of torch.compile: the shared ones, without profiles and guards.

In: a typed graph. Out: the same graph with `prim::CudaFusionGroup` nodes, which make a plan for each class of
calls. Values outside of groups have no types any more, because those were the types of one call.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from .... import log
from ....graph.matrix_room import allow_gaps, has_gaps
from ....graph.passes import run
from ....grouping.groups import Group
from ....grouping.passes import BEFORE_GROUPS, FINISH, MAKE_GROUPS, SETTLE, Work
from ....grouping.support import Refusals
from ....planning.compile import can_be_batched
from ....planning.planner import prepare
from ..rewrites import product_sums
from ..tracing import embeddings
from ..translation.translate import Translation
from .add_together import add_together
from .added_at import add_in_groups
from .batched_launches import make_batches
from .cheap_sums import recompute_sums
from .dead import mark_dead_inputs
from .expected import expected_calls
from .gradient_casts import gather_casts
from .in_place import Update, write_in_place
from .in_place_ops import update_in_place
from .lone_ops import group_lone_ops
from .order import free_early
from .parts_at_scalars import part_at_scalars
from .roundings import Pass
from .scalar_ops import group_scalar_ops
from .weight_casts import cast_at_front

PASSES = (*BEFORE_GROUPS, *MAKE_GROUPS, *SETTLE)


def fuse(
    translation: Translation,
    owns_inputs: bool = False,
    donated: Collection[int] = (),
    roundings: Sequence[Pass] = (),
) -> Refusals:
    """Makes the groups, and starts the compilers of their kernels in the background. Some groups do updates
    of the translation. Returns why nodes are in no group. `owns_inputs`: nobody else holds the inputs.
    `donated`: the inputs that nobody else has ever seen. `roundings`: passes that put roundings in groups."""
    graph, refusals = translation.graph, Refusals()
    if log.enabled("graph_fuser"):
        log.write("graph_fuser", "Before Fusion", str(graph))
    work = Work(graph, refusals, lone_reductions=True)
    allow_gaps(graph, translation.may_have_gaps)
    run(work, PASSES)
    for put_roundings in roundings:
        put_roundings(graph)
    work.groups = recompute_sums(graph, work.groups, owns_inputs)
    work.groups = part_at_scalars(graph, work.groups, can_be_batched)
    work.groups += [Group(node, written=False) for node in cast_at_front(graph, can_be_batched)]
    work.groups += group_scalar_ops(graph)
    work.groups += group_lone_ops(graph, can_be_batched)
    gather_casts(graph, can_be_batched)
    make_batches(graph, can_be_batched)
    add_in_groups(graph, translation.numbers, refusals)
    left = write_in_place(graph, translation.updates, translation.results, translation.numbers)
    _keep_only_updates(translation, left)
    run(work, FINISH)
    if owns_inputs:
        free_early(graph)
    left = update_in_place(graph, translation.updates, translation.results, refusals)
    _keep_only_updates(translation, left)
    add_together(graph, refusals)
    embeddings.add_in_place(graph, refusals)
    product_sums.add_in_place(graph, refusals)
    translation.donated = mark_dead_inputs(graph, donated)
    if log.enabled("graph_fuser"):
        log.write("graph_fuser", "Before Compilation", str(graph))
    for group_id, args in expected_calls(graph, translation.numbers):
        prepare(group_id, args)
    _note_gaps(translation)
    torch._C._jit_pass_erase_shape_information(graph)
    return refusals


def _note_gaps(translation: Translation) -> None:
    """Notes the strides of outputs whose rows have gaps between them."""
    outputs = list(translation.graph.outputs())
    for k, name in translation.may_have_gaps.items():
        if has_gaps(outputs[k]):
            translation.orders[k] = None
            translation.gaps[name] = tuple(outputs[k].type().strides())


def _keep_only_updates(translation: Translation, left: list[Update]) -> None:
    """Keeps these updates for the end of the graph. The outputs of the other updates are now the inputs
    themselves, in their layout."""
    for update in translation.updates:
        if update not in left:
            translation.orders[update[1]] = None
    translation.updates = left
