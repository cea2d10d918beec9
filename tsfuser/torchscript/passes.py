"""The graph pass: from TorchScript's profiled graph to one with guarded fusion groups.

In: a graph with `prim::profile` nodes, as the profiling executor hands it to the pre-pass in inference, in
the forward and the backward of a differentiable graph, and in fallbacks. Out: a new graph, or the same
object if nothing is to be fused. Example:

    %2 = prim::profile[...](%x);  %3 = aten::add(%2, 1.0, 1);  %4 = aten::relu(%3)
becomes
    %7 = prim::CudaFusionGuard[types=[...]](%x)
    %8 = prim::If(%7) block0: prim::CudaFusionGroup(%x)  block1: prim::FallbackGraph(%x)

Order of `PASSES`, and why:
  remove_profile_nodes  first: they stand between producers and consumers, and carry the types all else needs
  lower_simple_tuples   before anything asks who reads a value: a tuple hides the readers of its items
  drop_idle_casts       before groups: what gives back its operand would stand between its neighbours
  functionalize         before types are inferred: it makes ops whose results were never profiled
  pack_operands         before types are inferred, too: it makes copies, for groups to make
  infer_missing_types   before groups: a node with an untyped value is not fused
  split_biases          where an option asks for it; after the types, since it looks at sizes
  move_chunks           after the types too; a node behind a chunk may be grouped with what reads the chunk
  split_views           before groups: a view with two readers could not be inside and outside
  make_groups           the choice of nodes, with all types known
  clean_groups          before size arithmetic is made, and before the fallback is copied from the subgraph
  drop_size_only        after cleaning (fewer nodes to follow), before guards: a fallback has the outputs
  inline_small_groups   what cleaning left with nothing to win returns to the graph
  replace_dtype_only    after size-only outputs, which may be asked for their dtypes, too
  guard_groups          after all changes of the groups' outputs, since the fallback copies the subgraph
  merge_views           after all groups are final: what is outside now stays there
  move_views_out        after that, since it moves views that stay outside
  tidy                  drops wishes for layouts that no group heeds, and what has no reader any more
  name_groups           last: the cache id stands for the final text

The types that stay on values of the outer graph are wiped by the executor, later; those in subgraphs stay.
"""

from __future__ import annotations

import contextlib
import time
import traceback
import warnings
from dataclasses import dataclass, field
from typing import Iterator

import torch

from .. import _C, log, options
from ..errors import TsfuserWarning
from ..runtime import interrupts
from . import cleanup, guard, sizes
from .bias import split_biases
from .chunks import move_chunks
from .effects import Effects, remove_dead_code
from .functionalize import drop_idle_casts, functionalize
from .gradients import drop_wishes
from .graph import CONSTANT, GROUP, Graph, Value, facts, is_tensor
from .grouping import Group, make_groups
from .operands import pack_operands
from .outline import inline
from .partition import Refusals
from .profile import remove_profile_nodes
from .shapes import infer_missing_types
from .strict_fusion import move_views_out
from .views import Split, merge_views, split_views


@dataclass
class Work:
    """What the passes share: the graph, its groups from the last to the first (inner blocks before outer
    ones), and where the refusals go."""

    graph: Graph
    refusals: Refusals
    groups: "list[Group]" = field(default_factory=list)
    effects: "Effects | None" = None
    split: Split = field(default_factory=Split)


@dataclass(frozen=True)
class Outcome:
    """A graph as the pass has left it, and why nodes are not in groups."""

    graph: Graph
    refusals: Refusals


_watchers: "list[list[Outcome]]" = []  # registry: where outcomes go while someone is `watching`
_warned: set[str] = set()  # registry: failures of the pass that were reported


def _make_groups(work: Work) -> None:
    work.effects = Effects(work.graph)
    work.groups = make_groups(work.graph, work.effects, work.refusals)


def _split_views(work: Work) -> None:
    work.split = split_views(work.graph, Effects(work.graph))


def _clean_groups(work: Work) -> None:
    for group in work.groups:
        cleanup.clean(group.node.g("Subgraph"), merge=not group.written)
        cleanup.merge_equal_outputs(group.node)
        if not group.written:
            cleanup.release_idle_casts(work.graph, group.node)
        cleanup.drop_unused_inputs(group.node)


def _drop_size_only(work: Work) -> None:
    queries = sizes.Queries(work.graph, work.effects)
    work.groups = [g for g in work.groups if sizes.drop_size_only_outputs(work.graph, g.node, queries)]


def _inline_small_groups(work: Work) -> None:
    least = 1 if options.state.single_node_mode else 2
    small = [g for g in work.groups if cleanup.size_of_work(g.node.g("Subgraph")) < least]
    work.groups = [g for g in work.groups if g not in small]
    for group in small:
        _give_back(work, group, "once dead and repeated work was gone, its group had less than two ops")


def _give_back(work: Work, group: Group, reason: str) -> None:
    """Puts the group's nodes back into the graph, with the reason."""
    for node in group.node.g("Subgraph").nodes():
        if node.kind() != CONSTANT:
            work.refusals.add(node, reason)
    inline(work.graph, group.node)


def _replace_dtype_only(work: Work) -> None:
    for group in work.groups:
        guard.replace_dtype_only_outputs(work.graph, group.node)


def _guard_groups(work: Work) -> None:
    guarded = []
    for group in work.groups:
        reason = guard.guard(work.graph, group.node)
        if reason is None:
            guarded.append(group)
        else:
            work.refusals.add(group.node, reason)
            _give_back(work, group, reason)
    work.groups = guarded


def _tidy(work: Work) -> None:
    drop_wishes(work.graph)
    remove_dead_code(work.graph)


def _name_groups(work: Work) -> None:
    for node in work.graph.findAllNodes(GROUP, True):
        subgraph = node.g("Subgraph")
        node.i_("cache_id", _C.group_id(subgraph, identity(subgraph)))


PASSES = (
    ("remove_profile_nodes", lambda work: remove_profile_nodes(work.graph)),
    ("lower_simple_tuples", lambda work: _C.lower_simple_tuples(work.graph)),
    ("drop_idle_casts", lambda work: drop_idle_casts(work.graph)),
    ("functionalize", lambda work: functionalize(work.graph)),
    ("pack_operands", lambda work: pack_operands(work.graph)),
    ("infer_missing_types", lambda work: infer_missing_types(work.graph)),
    ("split_biases", lambda work: split_biases(work.graph)),
    ("move_chunks", lambda work: move_chunks(work.graph)),
    ("split_views", _split_views),
    ("make_groups", _make_groups),
    ("clean_groups", _clean_groups),
    ("drop_size_only", _drop_size_only),
    ("inline_small_groups", _inline_small_groups),
    ("replace_dtype_only", _replace_dtype_only),
    ("guard_groups", _guard_groups),
    ("merge_views", lambda work: merge_views(work.graph, work.split)),
    ("move_views_out", lambda work: move_views_out(work.graph)),
    ("tidy", _tidy),
    ("name_groups", _name_groups),
)


@contextlib.contextmanager
def watching() -> "Iterator[list[Outcome]]":
    """Collects the outcomes of all graphs that the pass sees within the block, in whatever thread."""
    seen: "list[Outcome]" = []
    _watchers.append(seen)
    try:
        yield seen
    finally:
        _watchers[:] = [other for other in _watchers if other is not seen]


def fuse(graph: Graph, into: "Refusals | None" = None) -> Graph:
    """A new graph with fusion groups, or `graph` itself, unchanged, if there is nothing to fuse or a pass
    fails; the latter is reported by one TsfuserWarning."""
    refusals = Refusals() if into is None else into
    result = _fuse(graph, refusals)
    for seen in tuple(_watchers):
        seen.append(Outcome(result, refusals))
    return result


def _fuse(graph: Graph, refusals: Refusals) -> Graph:
    if log.enabled("graph_fuser"):
        log.write("graph_fuser", "Before Fusion", str(graph))
    try:
        work = Work(graph.copy(), refusals)
        _run(work)
    except Exception as error:
        interrupts.pass_on(error)
        _give_up(error)
        return graph
    if not work.groups:
        return graph
    if log.enabled("graph_fuser"):
        log.write("graph_fuser", "Before Compilation", str(work.graph))
    return work.graph


def _run(work: Work) -> None:
    """Runs the passes, up to the one that leaves no group; dumps the graph after each at level `>`, and its
    time at `>>`."""
    for name, run in PASSES:
        start = time.perf_counter()
        run(work)
        if log.enabled("graph_fuser", log.DEBUG):
            log.write(
                "graph_fuser", f"{name} took {(time.perf_counter() - start) * 1e3:.1f} ms", "", log.DEBUG
            )
        if log.enabled("graph_fuser", log.UPDATE):
            log.write("graph_fuser", f"After {name}", str(work.graph), log.UPDATE)
        if name in _AFTER_GROUPS and not work.groups:
            return


_NAMES = [name for name, _ in PASSES]
_AFTER_GROUPS = frozenset(_NAMES[_NAMES.index("make_groups"):])


def identity(subgraph: Graph) -> str:
    """The text under which groups share their plans: the nodes under canonical names, without sizes and
    source lines, and dtype, device and rank of each input."""
    canonical = torch._C._jit_pass_canonicalize(subgraph, False)
    torch._C._jit_pass_erase_shape_information(canonical)
    types = [_describe(v) for v in subgraph.inputs()]
    return f"# {', '.join(types)}\n{canonical.str(False)}"


def _describe(value: Value) -> str:
    """An input's type as `float32[2 dims] on cpu`, or `int`."""
    if not is_tensor(value):
        return str(value.type())
    dtype, device, rank = facts(value.type())
    return f"{dtype}[{rank} dims] on {device}"


def _give_up(error: Exception) -> None:
    """Warns, once for each kind of failure."""
    text = f"{type(error).__name__}: {error}".split("\n")[0]
    log.write("graph_fuser", "The pass failed", traceback.format_exc())
    if text not in _warned:
        _warned.add(text)
        warnings.warn(
            f"the fusion pass gave up on a graph, which runs unfused ({text}); please report it",
            TsfuserWarning,
            stacklevel=2,
        )
