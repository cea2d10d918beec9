"""What the forward saves for the backward: torch's partitioners, and a correction of one of their mistakes.

In: AOTAutograd's joint graph. Out: the forward and the backward. A partitioner may save an input that the
program changes in place, or a view of it. The forward changes it at its end, so the backward would read the
new value. So a copy is saved instead. Before:

    copy_(primals_1, sigmoid);  return (y, primals_1)
becomes
    clone = clone(primals_1);  copy_(primals_1, sigmoid);  return (y, clone)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from .... import log, options
from ....errors import Refusal
from ....planning import failures
from ..fx.kept import Kept
from ..fx.recomputed import name_recomputed
from ..fx.updates import sharing, updates
from ..rewrites.simplify import without_detach
from . import norms, sizes_only, softmaxes
from .attention import part_plans
from .channels_last import channels_last
from .discontinuous import save_compared
from .dropout import seed_dropouts
from .from_results import read_results
from .pool_offsets import save_offsets
from .recomputable import recomputable
from .repeats import merge_repeats
from .saved_gaps import mark_gaps
from .statistics import trace_as_computed

aten = torch.ops.aten

#: In the `meta` of an input of the backward: an op from outside torch may still read it.
LENT = "tsfuser_lent"
_TORCH = ("aten", "prims", "tsfuser")


def partition(
    joint: fx.GraphModule,
    inputs: Any,
    *,
    recompute: bool,
    layout: bool | None,
    num_fwd_outputs: int,
    **others: Any,
):
    """The forward and the backward. `recompute`: the cheapest cut decides what is saved, else autograd does.
    `layout`: `wanted` of `channels_last`. If a pass of ours fails, torch's partitioner does all."""
    from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition

    kept = Kept(joint)
    try:
        forward, backward = _cut(joint, inputs, recompute, layout, num_fwd_outputs, others)
    except Exception as error:
        failures.gave_up("partition", error, kept.line)
        partitioner = min_cut_rematerialization_partition if recompute else default_partition
        forward, backward = partitioner(kept.put_back(), inputs, num_fwd_outputs=num_fwd_outputs, **others)
    save_old_values(forward, num_fwd_outputs)
    mark_lent(forward, backward)
    mark_gaps(forward, backward, num_fwd_outputs)
    return forward, backward


def _cut(
    joint: fx.GraphModule,
    inputs: Any,
    recompute: bool,
    layout: bool | None,
    num_fwd_outputs: int,
    others: Mapping[str, Any],
) -> tuple[fx.GraphModule, fx.GraphModule]:
    from torch._functorch import config
    from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition

    trace_as_computed(joint)
    if recompute:
        without_detach(joint)
        seed_dropouts(joint)
    channels_last(joint, layout, inference=False)
    part_plans(joint)
    norms.drop_running_statistics(joint)
    if recompute and options.enabled("typed_joint"):
        kept = Kept(joint)
        try:
            return _by_typed_joint(joint, num_fwd_outputs)
        except Refusal as refusal:
            log.write("partition", f"torch chooses what the forward saves: {refusal}")
            kept.put_back()
    if recompute:
        norms.expand(joint)
        softmaxes.expand(joint)
        read_results(joint)
        save_offsets(joint)
        sizes_only.forget_values(joint)
        if config.cse:
            merge_repeats(joint)
        save_compared(joint, num_fwd_outputs)
        with recomputable(), config.patch(cse=False):
            forward, backward = min_cut_rematerialization_partition(
                joint, inputs, num_fwd_outputs=num_fwd_outputs, **others
            )
        name_recomputed(forward, backward)
        norms.collapse(forward)
        norms.keep_unrounded(backward)
        softmaxes.collapse(forward)
        sizes_only.read_inputs_instead(backward)
    else:
        save_compared(joint, num_fwd_outputs)
        forward, backward = default_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs, **others)
        name_recomputed(forward, backward)
    return forward, backward


def _by_typed_joint(joint: fx.GraphModule, results: int) -> tuple[fx.GraphModule, fx.GraphModule]:
    from ..typed_joint.divide import divide

    save_offsets(joint)
    sizes_only.forget_values(joint)
    forward, backward = divide(joint, results)
    sizes_only.read_inputs_instead(backward)
    return forward, backward


def mark_lent(forward: fx.GraphModule, backward: fx.GraphModule) -> None:
    """Marks the saved tensors that an op from outside torch may have seen: it may still read them on another
    stream, long after the forward."""
    foreign = [node for node in forward.graph.nodes if _is_foreign(node)]
    touched = {node for op in foreign for node in (op, *op.all_input_nodes)}
    everything = any(not op.all_input_nodes for op in foreign)  # it may be another stream that all goes to
    roots = {_root(node) for node in touched}
    names = {node.name for node in forward.graph.nodes if everything or _root(node) in roots}
    for node in backward.graph.find_nodes(op="placeholder"):
        if node.name in names:
            node.meta[LENT] = True


def _is_foreign(node: fx.Node) -> bool:
    if node.op != "call_function":
        return node.op not in ("placeholder", "get_attr", "output")
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target.namespace not in _TORCH
    return isinstance(node.target, torch._ops.HigherOrderOperator)


def _root(node: fx.Node) -> fx.Node:
    """The node in whose memory `node` may be: views and items of lists are in that of their first operand."""
    while node.op == "call_function" and node.all_input_nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is not None and all(r.alias_info is None for r in schema.returns):
            break
        node = node.all_input_nodes[0]
    return node


def save_old_values(forward: fx.GraphModule, results: int) -> None:
    """Saves copies of the tensors that the forward changes. What is saved are the outputs after the first
    `results`."""
    graph = forward.graph
    copies = updates(graph)
    if not copies:
        return
    changed = sharing(graph, [copy.args[0] for copy in copies])
    (last,) = (node for node in graph.nodes if node.op == "output")
    returned = list(last.args[0])
    for k in range(results, len(returned)):
        if returned[k] in changed:
            with graph.inserting_before(copies[0]):
                clone = graph.call_function(aten.clone.default, (returned[k],))
            clone.meta = dict(returned[k].meta)
            returned[k] = clone
    if any(a is not b for a, b in zip(returned, last.args[0])):
        last.args = (tuple(returned),)
        forward.recompile()
