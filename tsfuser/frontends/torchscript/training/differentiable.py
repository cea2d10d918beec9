"""What is done about a `prim::DifferentiableGraph`: the one place where forward and backward are seen
together (csrc_stubs/torchscript/differentiable.cpp).

In: the two graphs, as autodiff has made them, with the program's ops in their plain forms, and the numbers of
what the forward keeps for the backward (`SavedValues`). Out: both, changed, with the numbers that then hold;
None where they are not what torch is known to make. Each graph is optimised, and fused, on its own after
that. Order of `STEPS`, and why:

  keep_nothing          first: a backward without gradients has nothing for the others
  leave_idle            before all that asks what has a gradient, or what the backward reads
  leave_zeros           behind it, which makes more of them
  copy_repeats          anywhere; it looks at what the program gets
  join                  before all that asks who reads what is kept, which may be kept several times
  choose_gradients      these, up to cast_gradients, correct autodiff's formulas. They come before the steps
  share_ties            that count what the backward reads, which is what the corrected formulas read
  ask_derivatives
  choose_inside
  leave_zero_bases
  multiply_as_eager
  read_rows
  multiply_at_once
  save_operands
  cast_first
  cast_in_place
  invert_orders
  leave_dividends
  leave_biases
  cast_gradients
  read_dtypes_elsewhere behind these: a cast asks for the device of its operand, and then only for its dtype
  save_stand_ins        behind it: there are others that stand for a dtype, then
  leave_numbers         before `compute_again`, which asks who reads what is kept
  copy_operands         behind all that changes who reads what is kept
  ask_norms             before `compute_again`: then a relu's result is only asked for its dtype
  compute_again         behind all that changes which saved tensors the backward reads
  compute_norms         beside it; the statistics that it asks for are kept by norms
  save_operand_instead  behind those two: it computes from the tensors that are saved then
  draw_again            behind `compute_again`, which would not know its nodes
  cast_results          behind all that changes the gradients
  save_rows             behind all that changes what is kept
  add_layout_hints      behind all that changes the gradients
  use_room              behind all that looks for products
  round_saved           behind all that changes what is kept
  drop                  last: the numbers of what is kept change
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from .... import log, options
from ....graph.operand_room import may_be_parts
from ....graph.passes import Pass, run
from ....graph.roundings import round_saved
from ....graph.wrapper import Graph, nodes_in, use_count
from ....planning import failures
from .. import stored_passes
from . import dropout, formulas, kept_instead, norm_operands, norm_results, recompute, relu_mask
from .gradient_dtypes import cast_gradients, cast_results
from .gradient_layout import add_layout_hints
from .operands import save_operands
from .repeats import copy_repeats
from .saved import SavedValues
from .saved_rows import save_rows
from .stand_ins import save_stand_ins
from .still_outputs import leave_zeros, still_outputs


@dataclass
class Work:
    """What the steps share. `orders`: for each result of the backward the order in memory, outermost first,
    of the dims of what it is the gradient of; empty where that is row-major, unknown, or given to the
    program. `written`: results that the program may write to. `narrow`: for each result of the backward the
    number of the input that it is for, where that has 16 bits, else -1; empty where gradients have those
    bits anyway. Of the inputs of the forward, `own` are those that the program has made and leaves as they
    are, `small` those that are small beside others, `moving` those that get gradients, `half` those that have
    16 bits. `again`: the kept outputs that the backward computes. `numbers`: `gradients` and `outputs` of
    what is kept in the end."""

    saved: SavedValues
    orders: Sequence[Sequence[int]]
    written: Sequence[int]
    narrow: Sequence[int] = ()
    own: Sequence[int] = ()
    small: Sequence[int] = ()
    moving: Sequence[int] = ()
    half: Sequence[int] = ()
    again: set[int] = field(default_factory=set)
    numbers: tuple[list[int], list[int]] | None = None

    @property
    def is_done(self) -> bool:
        """Whether it is settled what is kept."""
        return self.numbers is not None

    def __str__(self) -> str:
        return f"{self.saved.forward}{self.saved.backward}"


def rewrite(
    forward: Graph,
    backward: Graph,
    real: int,
    gradients: Sequence[int],
    saved_inputs: Sequence[int],
    saved_outputs: Sequence[int],
    orders: Sequence[Sequence[int]] = (),
    idle: Sequence[int] = (),
    written: Sequence[int] = (),
    narrow: Sequence[int] = (),
    own: Sequence[int] = (),
    given: Sequence[int] = (),
    small: Sequence[int] = (),
    moving: Sequence[int] = (),
    half: Sequence[int] = (),
) -> tuple[Graph, Graph, list[int], list[int]] | bool | None:
    """`forward` and `backward`, and `gradients` and `outputs` of what is kept now (`SavedValues`); `orders`,
    `written` to `half` as in `Work`, `idle`: results that no gradient comes for, `given`: inputs that the
    program does not write to, but its caller may. None where nothing changes; False where a pass fails: the
    graph runs op by op then, as torch's own may save what the program writes to."""
    saved = SavedValues(forward, backward, real, gradients, saved_inputs, saved_outputs)
    if not nodes_in(backward) or not saved.is_whole():
        return None
    own = (*own, *given) if options.enabled("keep_inputs") else own
    numbers = (real, gradients, saved_inputs, saved_outputs)
    facts = (orders, idle, written, narrow, own, small, moving, half)
    stored = stored_passes.place_of("differentiable", [forward, backward], (numbers, facts), changed=True)
    found = stored.find() if stored else None
    if found is not None:
        return (*found.graphs, *found.numbers)
    work = Work(
        saved.without_gradients(idle, still_outputs(forward)),
        orders,
        written,
        narrow,
        own,
        small,
        moving,
        half,
    )
    try:
        run(work, STEPS)
    except Exception as error:
        failures.gave_up("differentiable_graph", error, failures.line_of(forward))
        return False  # C++ has copied the graphs
    if stored:
        stored.keep(stored_passes.Made([forward, backward], work.numbers))
    return forward, backward, *work.numbers


def _keep_nothing(work: Work) -> None:
    """Torch would have what such a graph keeps, and views of that, ask for gradients."""
    if work.saved.gives_nothing():
        work.numbers = work.saved.drop_all()


def _leave_idle(work: Work) -> None:
    work.saved = work.saved.without_idle()


def _save_operands(work: Work) -> None:
    work.saved = save_operands(work.saved, work.written)


def _cast_first(work: Work) -> None:
    work.saved = formulas.cast_first(work.saved)


def _save_stand_ins(work: Work) -> None:
    work.saved = save_stand_ins(work.saved)


def _leave_numbers(work: Work) -> None:
    work.saved = work.saved.without_unread_numbers()


def _ask_norms(work: Work) -> None:
    if not options.disabled("recompute"):
        work.saved = relu_mask.ask_operands(work.saved)


def _cast_results(work: Work) -> None:
    work.saved = cast_results(work.saved, work.narrow)


def _compute_again(work: Work) -> None:
    if not options.disabled("recompute"):
        work.again = recompute.compute_again(work.saved, work.written, work.own, work.half)


def _compute_norms(work: Work) -> None:
    if not options.disabled("recompute"):
        work.saved, again = norm_results.compute_again(work.saved)
        work.again |= again


def _save_operand_instead(work: Work) -> None:
    if not options.disabled("recompute"):
        work.saved, again = kept_instead.compute_again(
            work.saved, work.written, work.own, work.small, work.moving, work.again
        )
        work.again |= again


def _use_room(work: Work) -> None:
    seen = work.saved.in_results() | work.saved.exposed(range(work.saved.real))
    may_be_parts(work.saved.forward, lambda value: value.debugName() not in seen)


def _draw_again(work: Work) -> None:
    if not options.disabled("recompute") and not options.enabled("eager_random"):
        dropout.draw_again(work.saved)


def _round_saved(work: Work) -> None:
    if not work.half:
        return
    read = [v for j, v, argument in work.saved.of_outputs() if use_count(argument) and j not in work.again]
    round_saved(work.saved.forward, read)


def _drop(work: Work) -> None:
    saved = work.saved.without_unread_results()
    dropped = work.again | saved.unused()
    if dropped:
        log.write(
            "graph_fuser",
            f"The backward no longer needs {len(dropped)} of {len(saved.outputs)} saved results",
            str(saved.backward),
        )
    work.numbers = saved.drop(dropped)


def _on_saved(step: Callable[[SavedValues], object]) -> Pass:
    return Pass(step.__name__, lambda work: step(work.saved))


STEPS = (
    Pass("keep_nothing", _keep_nothing),
    Pass("leave_idle", _leave_idle),
    _on_saved(leave_zeros),
    _on_saved(copy_repeats),
    _on_saved(SavedValues.join),
    _on_saved(formulas.choose_gradients),
    _on_saved(formulas.share_ties),
    _on_saved(formulas.ask_derivatives),
    _on_saved(formulas.choose_inside),
    _on_saved(formulas.leave_zero_bases),
    _on_saved(formulas.multiply_as_eager),
    _on_saved(formulas.read_rows),
    _on_saved(formulas.multiply_at_once),
    Pass("save_operands", _save_operands),
    Pass("cast_first", _cast_first),
    _on_saved(formulas.cast_in_place),
    _on_saved(formulas.invert_orders),
    _on_saved(formulas.leave_dividends),
    _on_saved(formulas.leave_biases),
    _on_saved(cast_gradients),
    _on_saved(formulas.read_dtypes_elsewhere),
    Pass("save_stand_ins", _save_stand_ins),
    Pass("leave_numbers", _leave_numbers),
    _on_saved(norm_operands.copy_operands),
    Pass("ask_norms", _ask_norms),
    Pass("compute_again", _compute_again),
    Pass("compute_norms", _compute_norms),
    Pass("save_operand_instead", _save_operand_instead),
    Pass("draw_again", _draw_again),
    Pass("cast_results", _cast_results),
    _on_saved(formulas.hand_gradients_on),
    Pass("save_rows", lambda work: save_rows(work.saved, work.again)),
    Pass("add_layout_hints", lambda work: add_layout_hints(work.saved.backward, work.orders)),
    Pass("use_room", _use_room),
    Pass("round_saved", _round_saved),
    Pass("drop", _drop),
)
