"""What is done about a `prim::DifferentiableGraph`: the one place where forward and backward are seen
together (csrc_stubs/torchscript/differentiable.cpp).

In: the two graphs, as autodiff has made them, with the program's ops in their plain forms, and the numbers of
what the forward keeps for the backward (`Kept`). Out: both, changed, with the numbers that then hold; None
where they are not what torch is known to make. Each graph is optimised, and fused, on its own after that.
Order of `STEPS`, and why:

  keep_nothing          first: a backward without gradients has nothing for the others
  join                  before all that asks who reads what is kept, which may be kept several times
  choose_gradients      autodiff's formulas put right, before anything is computed again or kept in place of
  share_ties              another: for that it counts what they read in the end
  exclude_bounds
  cast_in_place
  ask_others_for_dtypes behind these: a cast asks for the device of its operand, and then only for its dtype
  ask_norms             before `compute_again`: then a relu's result is only asked for its dtype
  compute_again         behind all that changes what the backward reads of what is kept
  lay_out               behind all that changes the gradients
  drop                  last: the numbers of what is kept change
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from .... import log, options
from ....graph.passes import Pass, run
from ....graph.wrapper import Graph
from . import formulas, recompute, relu_mask
from .gradient_layout import lay_out
from .saved import Kept


@dataclass
class Work:
    """What the steps share. `orders`: for each result of the backward the order in memory, outermost first,
    of the dims of what it is the gradient of; empty where that is row-major, unknown, or given to the
    program. `again`: the kept outputs that the backward computes. `numbers`: `gradients` and `outputs` of
    what is kept in the end."""

    kept: Kept
    orders: Sequence[Sequence[int]]
    again: set[int] = field(default_factory=set)
    numbers: tuple[list[int], list[int]] | None = None

    @property
    def is_done(self) -> bool:
        """Whether it is settled what is kept."""
        return self.numbers is not None

    def __str__(self) -> str:
        return f"{self.kept.forward}{self.kept.backward}"


def rewrite(
    forward: Graph,
    backward: Graph,
    real: int,
    gradients: Sequence[int],
    kept_inputs: Sequence[int],
    kept_outputs: Sequence[int],
    orders: Sequence[Sequence[int]] = (),
) -> tuple[Graph, Graph, list[int], list[int]] | None:
    """`forward` and `backward`, and `gradients` and `outputs` of what is kept now (`Kept`); `orders` as in
    `Work`."""
    kept = Kept(forward, backward, real, gradients, kept_inputs, kept_outputs)
    if not list(backward.nodes()) or not kept.is_whole():
        return None
    work = Work(kept, orders)
    run(work, STEPS)
    return forward, backward, *work.numbers


def _keep_nothing(work: Work) -> None:
    """Torch would have what such a graph keeps, and views of that, ask for gradients."""
    if work.kept.gives_nothing():
        work.numbers = work.kept.drop_all()


def _ask_norms(work: Work) -> None:
    if not options.disabled("recompute"):
        work.kept = relu_mask.ask_operands(work.kept)


def _compute_again(work: Work) -> None:
    if not options.disabled("recompute"):
        work.again = recompute.compute_again(work.kept)


def _drop(work: Work) -> None:
    kept, dropped = work.kept, work.again | work.kept.unused()
    if dropped:
        log.write(
            "graph_fuser",
            f"The backward needs {len(dropped)} of {len(kept.outputs)} kept results no more",
            str(kept.backward),
        )
    work.numbers = kept.drop(dropped)


def _on_kept(step: Callable[[Kept], object]) -> Pass:
    return Pass(step.__name__, lambda work: step(work.kept))


STEPS = (
    Pass("keep_nothing", _keep_nothing),
    _on_kept(Kept.join),
    _on_kept(formulas.choose_gradients),
    _on_kept(formulas.share_ties),
    _on_kept(formulas.exclude_bounds),
    _on_kept(formulas.cast_in_place),
    _on_kept(formulas.ask_others_for_dtypes),
    Pass("ask_norms", _ask_norms),
    Pass("compute_again", _compute_again),
    Pass("lay_out", lambda work: lay_out(work.kept.backward, work.orders)),
    Pass("drop", _drop),
)
