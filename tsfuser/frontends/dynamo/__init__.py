"""`torch.compile(model, backend="tsfuser")`: AOTAutograd's FX graphs in, one callable per graph out.

The files, in the order in which a graph meets them:

door.py        how torch finds the backend by its name
compile.py     what torch.compile calls; settings.py: its options; cuda_graphs.py: mode="reduce-overhead"

while AOTAutograd traces:
decompositions.py   which ops are decomposed; foreach.py, embeddings.py: two of the decompositions
whole_ops.py   ops that stay whole

the joint graph of forward and backward:
partition.py   the steps below, and what the forward saves for the backward
channels_last.py   the layout of convolutions; layout_choice.py: whether it changes
dropout.py, norms.py, softmaxes.py, from_results.py   forms of which the forward saves less
repeats.py     equal ops are computed once
recomputable.py    which ops the backward may compute again

each graph, forward or backward:
program.py     the steps below, and the callable, which torch's interpreter runs
simplify.py, ranges.py, indexing.py, late_casts.py, parts.py, product_sums.py   cheaper forms of nodes
translate.py   an FX graph as a typed torch._C.Graph; arguments.py, sizes.py, types.py, places.py: its parts
split.py       cuts a graph around nodes that cannot be translated
passes.py      makes groups, by the passes that all front ends share, and then runs these steps:
joint.py, weight_casts.py, gradient_casts.py   groups that are launched together
updates.py     inputs that the program changes; in_place.py, in_place_ops.py, add_together.py: writers
order.py       the order of nodes, by the memory that they free; memory.py: that memory
dead.py        inputs of groups over which results may be stored
expected.py    the calls for which groups are planned before they run

watch.py       tells explain what was made of each graph; logs.py, counts.py: logs and counters
"""

from .cuda_graphs import forget

__all__ = ["backend"]


def backend(module, inputs, **choices):
    """What the entry point names: see `compile.py`, which is imported when the first graph comes."""
    from .compile import backend as compile_module

    return compile_module(module, inputs, **choices)


backend.reset = forget  # type: ignore[attr-defined]  # torch._dynamo.reset() calls it
