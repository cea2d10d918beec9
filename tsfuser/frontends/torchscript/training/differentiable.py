"""What is done about a `prim::DifferentiableGraph`: the one place where forward and backward are seen
together (csrc_stubs/torchscript/differentiable.cpp).

In: the two graphs, as autodiff has made them, and the numbers of what the forward keeps for the backward
(`Kept`). Out: both, changed, with the numbers that then hold; None where they are not what torch is known to
make. Each graph is optimised, and fused, on its own after that.
"""

from __future__ import annotations

from collections.abc import Sequence

from .... import log, options
from ....graph.wrapper import Graph
from . import formulas, recompute
from . import relu_mask as signs
from .gradient_layout import lay_out
from .saved import Kept


def rewrite(
    forward: Graph,
    backward: Graph,
    real: int,
    gradients: Sequence[int],
    kept_inputs: Sequence[int],
    kept_outputs: Sequence[int],
    orders: Sequence[Sequence[int]] = (),
) -> tuple[Graph, Graph, list[int], list[int]] | None:
    """`forward` and `backward`, and `gradients` and `outputs` of what is kept now (`Kept`). `orders`: for
    each result of the backward the order in memory, outermost first, of the dims of what it is the gradient
    of; empty where that is row-major, unknown, or given to the program."""
    kept = Kept(forward, backward, real, gradients, kept_inputs, kept_outputs)
    if not list(backward.nodes()) or not kept.is_whole():
        return None
    if kept.gives_nothing():  # torch would have what it keeps, and views of that, ask for gradients
        return forward, backward, *kept.drop_all()
    kept.join()
    formulas.put_right(kept)
    again: set[int] = set()
    if not options.disabled("recompute"):
        kept = signs.ask_operands(kept)
        again = recompute.compute_again(kept)
    lay_out(backward, orders)
    dropped = again | kept.unused()
    if dropped:
        log.write(
            "graph_fuser",
            f"The backward needs {len(dropped)} of {len(kept_outputs)} kept results no more",
            str(backward),
        )
    return forward, backward, *kept.drop(dropped)
