"""`torch.compile(model, backend="tsfuser")`: AOTAutograd's FX graphs in, one callable a graph out.

compile.py    what torch.compile calls: AOTAutograd, partitioner, and what compiles one FX graph
settings.py   `options={...}` of torch.compile
partition.py  what the forward saves for the backward; recomputable.py, repeats.py, norms.py, dropout.py:
               and what not
decompositions.py, foreach.py, embeddings.py, simplify.py, ranges.py   which ops are taken apart, and
               simpler forms of others
translate.py  an FX graph of ATen ops as a typed torch._C.Graph; arguments.py, sizes.py, types.py,
               places.py: its parts
updates.py    inputs that the program changes; in_place.py: groups that write there
split.py      cuts a graph around nodes that cannot be translated
passes.py     the passes that make groups, those of the other front ends without guards
expected.py   the calls that groups are planned for before they run
program.py    the callable: torch's interpreter runs the graph
cuda_graphs.py   mode="reduce-overhead"
watch.py      what became of each graph, for explain; logs.py and counts.py: for logs and counters
door.py       how torch finds the backend by its name
"""

from .cuda_graphs import forget

__all__ = ["backend"]


def backend(module, inputs, **choices):
    """What the entry point names: see `compile.py`, which is imported when the first graph comes."""
    from .compile import backend as compile_module

    return compile_module(module, inputs, **choices)


backend.reset = forget  # type: ignore[attr-defined]  # torch._dynamo.reset() calls it
