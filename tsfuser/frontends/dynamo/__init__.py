"""`torch.compile(model, backend="tsfuser")`: AOTAutograd's FX graphs in, one callable per graph out.

In the order in which a graph meets them (each folder's `__init__.py` lists its files):

any_size.py    tsfuser.compile: torch.compile with one graph for all sizes
door.py        how torch finds the backend by its name
compile.py     what torch.compile calls; settings.py: its options; cuda_graphs.py: mode="reduce-overhead"
tracing/       what AOTAutograd is told before it traces
joint_graph/   passes over forward and backward together, and what the forward saves
typed_joint/   the same as a joint graph of typed ops: an experiment
program.py     the steps for one graph, forward or backward, and the callable, which torch's interpreter runs:
rewrites/      cheaper forms of nodes
translation/   the FX graph as a typed torch._C.Graph
groups/        groups are made in that graph, ordered and told where to write
fx/            what the passes over FX graphs share
stored/        compiled graphs on disk, for other processes
by_inductor.py attention by functions of the program, which inductor compiles
watch.py       tells explain what was made of each graph; logs.py, counts.py: logs and counters
"""

from .cuda_graphs import forget

__all__ = ["backend"]


def backend(module, inputs, **choices):
    """What the entry point names: see `compile.py`, which is imported when the first graph comes."""
    from .compile import backend as compile_module

    return compile_module(module, inputs, **choices)


backend.reset = forget  # type: ignore[attr-defined]  # torch._dynamo.reset() calls it
