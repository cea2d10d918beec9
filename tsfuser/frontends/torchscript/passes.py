"""The graph pass: from TorchScript's profiled graph to one with guarded fusion groups.

In: a graph with `prim::profile` nodes, as the profiling executor hands it to the pre-pass in inference, in
the forward and the backward of a differentiable graph, and in fallbacks. Out: a new graph, or the same
object if nothing is to be fused. Example:

    %2 = prim::profile[...](%x);  %3 = aten::add(%2, 1.0, 1);  %4 = aten::relu(%3)
becomes
    %7 = prim::CudaFusionGuard[types=[...]](%x)
    %8 = prim::If(%7) block0: prim::CudaFusionGroup(%x)  block1: prim::FallbackGraph(%x)

`PASSES` are the shared ones of `grouping/passes.py` with four of this front end: `remove_profile_nodes`
comes first, since profile nodes stand between producers and consumers and carry the types that all else
needs; `make_sums` before what groups take is looked for; `guard_groups` after all changes of the groups'
outputs, since a fallback copies the subgraph; `move_views_out` after the views are where they stay.

The types that stay on values of the outer graph are wiped by the executor, later; those in subgraphs stay.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from ... import log
from ...graph.passes import Pass, run
from ...graph.wrapper import Graph
from ...grouping.passes import BEFORE_GROUPS, FINISH, MAKE_GROUPS, SETTLE, Work, give_back
from ...grouping.support import Refusals
from ...planning import failures
from ...planning.progress import progress
from . import guard, stored_passes
from .placed_sums import make_sums
from .profile import remove_profile_nodes
from .stored_passes import Made, Place
from .strict_fusion import move_views_out


@dataclass(frozen=True)
class Outcome:
    """A graph as the pass has left it, and why nodes are not in groups."""

    graph: Graph
    refusals: Refusals


_watchers: list[list[Outcome]] = []  # registry: where outcomes go while someone is `watching`


def _guard_groups(work: Work) -> None:
    guarded = []
    for group in work.groups:
        reason = guard.guard(work.graph, group.node)
        if reason is None:
            guarded.append(group)
        else:
            work.refusals.add(group.node, reason)
            give_back(work, group, reason)
    work.groups = guarded


PASSES = (
    Pass("remove_profile_nodes", lambda work: remove_profile_nodes(work.graph)),
    Pass("make_sums", lambda work: make_sums(work.graph)),
    *BEFORE_GROUPS,
    *MAKE_GROUPS,
    Pass("guard_groups", _guard_groups),
    *SETTLE,
    Pass("move_views_out", lambda work: move_views_out(work.graph)),
    *FINISH,
)


@contextlib.contextmanager
def watching() -> Iterator[list[Outcome]]:
    """Collects the outcomes of all graphs that the pass sees within the block, in whatever thread."""
    seen: list[Outcome] = []
    _watchers.append(seen)
    try:
        yield seen
    finally:
        _watchers[:] = [other for other in _watchers if other is not seen]


def fuse(graph: Graph, into: Refusals | None = None) -> Graph:
    """A new graph with fusion groups, or `graph` itself, unchanged, if there is nothing to fuse or a pass
    fails; the latter is reported (`planning.failures`)."""
    stored = stored_passes.place_of("graph_pass", [graph]) if into is None and not _watchers else None
    found = stored.find() if stored else None
    if found is not None:
        return found.graphs[0] if found.graphs else graph
    refusals = Refusals() if into is None else into
    with progress.working("making groups of a graph's ops"):
        result = _fuse(graph, refusals, stored)
    for seen in tuple(_watchers):
        seen.append(Outcome(result, refusals))
    return result


def _fuse(graph: Graph, refusals: Refusals, stored: Place | None) -> Graph:
    if log.enabled("graph_fuser"):
        log.write("graph_fuser", "Before Fusion", str(graph))
    try:
        work = Work(graph.copy(), refusals, profiled=True)
        run(work, PASSES)
    except Exception as error:
        failures.gave_up("graph_pass", error, failures.line_of(graph))
        return graph
    changes = bool(work.groups or work.has_products)
    if stored:
        stored.keep(Made([work.graph] if changes else []))
    if not changes:
        return graph
    if log.enabled("graph_fuser"):
        log.write("graph_fuser", "Before Compilation", str(work.graph))
    return work.graph
