"""The callable of one FX graph.

In: the graph's module. Out: a function of a list of arguments. It empties the list, as AOTAutograd requires.
It is one call of C++ if the whole graph could be translated; else Python runs the pieces, and the nodes
between them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from ... import _C, log
from ...grouping.support import Refusals
from ...planning import failures
from . import by_inductor, logs, watch
from .fx.kept import Kept
from .fx.types import is_nested_int
from .groups.passes import fuse
from .groups.roundings import Pass
from .joint_graph.saved_gaps import SavedGaps
from .pieces import in_order
from .rewrites.parts import compute_parts
from .rewrites.product_sums import add_as_made
from .rewrites.ranges import make_ranges
from .rewrites.simplify import simplify
from .rewrites.traced_layouts import copy_where_needed, settle_layouts
from .settings import Settings, applied
from .translation.split import split
from .translation.translate import Translation, translate

#: The rewrites of each graph, in order.
REWRITES = (simplify, compute_parts, add_as_made, make_ranges, settle_layouts)


def compile_graph(
    module: fx.GraphModule,
    settings: Settings,
    origin: watch.Origin | None = None,
    donated: Collection[int] = (),
    roundings: Sequence[Pass] = (),
    gaps: SavedGaps | None = None,
    keep: Callable[[Compiled], object] | None = None,
) -> Callable[[list], Any]:
    """The boxed function. The module runs as it is if it takes lengths of nested tensors, or if this fails,
    with a warning. If the module has an `origin`, `watch` gets the outcome. `donated`: the positions of
    arguments over which the function may write, if it gets the last reference to them. `roundings`: those of
    `fuse`. `gaps` gets the strides of tensors that a forward saves with gaps, `keep` what runs."""
    kept = Kept(module)
    try:
        if origin is not None:
            logs.arrived(origin, module)
        if _takes_nested_ints(module):
            return _left_unfused(module, origin, "it computes with the lengths of nested tensors")
        compiled = _whole(module, settings, origin, donated, roundings)
        if gaps is not None:
            gaps.note(compiled.gaps)
        if keep is not None:
            keep(compiled)
        if origin is not None:
            _tell(watch.Outcome(origin, compiled.module, compiled.programs, compiled.foreign))
        return boxed(compiled.call)
    except Exception as error:  # a mistake of ours must not break the user's program
        reason = failures.gave_up("compile_graph", error, kept.line)
        return _left_unfused(kept.put_back(), origin, reason)


def _takes_nested_ints(module: fx.GraphModule) -> bool:
    given = (node.meta.get("val") for node in module.graph.find_nodes(op="placeholder"))
    return any(isinstance(value, torch.SymInt) and is_nested_int(value) for value in given)


def _left_unfused(module: fx.GraphModule, origin: watch.Origin | None, reason: str) -> Callable[[list], Any]:
    if origin is not None:
        _tell(watch.Outcome(origin, module, {}, {}, reason))
    copy_where_needed(module)
    return boxed(lambda args: _unfused(module, args))


def _tell(outcome: watch.Outcome) -> None:
    logs.done(outcome)
    watch.done(outcome)


def boxed(function: Callable[[list], Any]) -> Callable[[list], Any]:
    """The function, marked as one that empties its list of arguments. Its errors name the line of the program
    whose op raised them."""

    def call(args: list) -> Any:
        try:
            return function(args)
        except BaseException as error:
            _name_line(error, _C.take_failed_place())
            raise

    marked: Any = call
    marked._boxed_call = True
    return marked


def _name_line(error: BaseException, place: str | None) -> None:
    if place is None:
        return
    note = f"in the compiled program: {place}"
    if hasattr(error, "add_note"):
        error.add_note(note)
    elif len(error.args) == 1 and isinstance(error.args[0], str):  # Python 3.10
        error.args = (f"{error.args[0]}\n{note}",)


@dataclass
class Compiled:
    """The function that runs, the fields of its `watch.Outcome`, and what it saves with gaps."""

    module: fx.GraphModule
    call: Callable[[list], Any]
    programs: dict[str, tuple[Translation, Refusals]]
    foreign: dict[str, str]
    gaps: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    single: Collection[str] = ()  # pieces that return one value, not a tuple
    others: Collection[str] = ()  # pieces that another compiler runs


def _whole(
    module: fx.GraphModule,
    settings: Settings,
    origin: watch.Origin | None,
    donated: Collection[int],
    roundings: Sequence[Pass],
) -> Compiled:
    for rewrite in REWRITES:
        rewrite(module)
    translation = translate(module)
    if not translation.foreign:
        program, refusals = _program(translation, settings, origin, donated, roundings)
        return Compiled(module, program, {"": (translation, refusals)}, {}, translation.gaps)
    for node, reason in translation.foreign.items():
        log.write("partition", f"{node} is left to Python: {reason}", "")
    pieces = split(module, translation.foreign)
    if origin is not None:
        logs.cut(origin, pieces.module, translation.foreign)
    programs: dict[str, tuple[Translation, Refusals]] = {}
    calls: dict[str, Callable[[list], Any]] = {}
    single: set[str] = set()
    for name, piece in pieces.translatable():
        found = translate(piece)
        if not found.foreign:
            program, refusals = _program(found, settings, origin, (), roundings)
            single.update([name] if _is_single(piece) else [])
            calls[name] = piece_call(program, name in single)
            programs[name] = (found, refusals)
    reasons = dict(translation.foreign)
    for name, piece in pieces.left():
        if by_inductor.has_attention(piece) and (function := by_inductor.compiled(piece)) is not None:
            calls[name] = function
            reasons |= {node: by_inductor.REASON for node in reasons if by_inductor.is_attention(node)}
    foreign = {node.name: reason for node, reason in reasons.items()}
    call = in_order(pieces.module, calls)
    return Compiled(pieces.module, call, programs, foreign, {}, single, calls.keys() - programs.keys())


def piece_call(program: Callable[[list], tuple], single: bool) -> Callable[[list], Any]:
    """What runs in the place of a piece."""
    return partial(_only_result, program) if single else program


def _only_result(program: Callable[[list], tuple], args: list) -> Any:
    return program(args)[0]


def _program(
    translation: Translation,
    settings: Settings,
    origin: watch.Origin | None,
    donated: Collection[int],
    roundings: Sequence[Pass],
) -> tuple[_C.GraphProgram, Refusals]:
    """The program, and why nodes are in no group of it."""
    if origin is not None:
        logs.typed(origin, translation.graph)
    with applied(settings):
        owns_inputs = origin is not None and origin.role == "backward"
        refusals = fuse(translation, owns_inputs, donated, roundings)
    return native(translation), refusals


def native(translation: Translation) -> _C.GraphProgram:
    """What runs a graph with groups."""
    return _C.GraphProgram(
        translation.graph,
        translation.constants,
        translation.updates,
        translation.results,
        translation.orders,
        _modes_may_be_hidden,
        translation.donated,
    )


def _is_single(module: fx.GraphModule) -> bool:
    """Whether the module returns a single value, not a tuple."""
    (last,) = (node for node in module.graph.nodes if node.op == "output")
    return isinstance(last.args[0], fx.Node)


def _unfused(module: fx.GraphModule, args: list) -> Any:
    given = list(args)
    args.clear()
    return module(*given)


def _modes_may_be_hidden() -> bool:
    """Whether no dispatch mode of this thread needs to see the ops inside a compiled graph. For example, the
    mode with which AOTAutograd checks custom ops in the first call of a graph does not."""
    return all(
        getattr(mode, "ignore_compile_internals", lambda: False)()
        or type(mode).__name__ == "_AnalyzeCustomOpInputOutputMode"  # torch 2.11: without that method
        for mode in _get_current_dispatch_mode_stack()
    )
