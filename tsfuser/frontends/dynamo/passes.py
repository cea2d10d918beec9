"""The passes that make groups in a graph of torch.compile: the shared ones, with neither profile nor guard.

In: a typed graph. Out: the same graph with `prim::CudaFusionGroup` nodes, each of which makes a plan for
whatever comes, and no types on values outside of groups, which were those of one call.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ... import log
from ...graph.passes import run
from ...graph.wrapper import Graph
from ...grouping.passes import BEFORE_GROUPS, FINISH, MAKE_GROUPS, SETTLE, Work
from ...grouping.support import Refusals
from ...planning.planner import prepare
from .expected import expected_calls

PASSES = (*BEFORE_GROUPS, *MAKE_GROUPS, *SETTLE, *FINISH)


def fuse(graph: Graph, numbers: Mapping[int, int]) -> Refusals:
    """Makes the groups, and has their kernels compiled in the background; returns why nodes are in none.
    `numbers`: what sizes were in the traced call, by `unique()` of their values."""
    refusals = Refusals()
    if log.enabled("graph_fuser"):
        log.write("graph_fuser", "Before Fusion", str(graph))
    run(Work(graph, refusals, lone_reductions=True), PASSES)
    if log.enabled("graph_fuser"):
        log.write("graph_fuser", "Before Compilation", str(graph))
    for group_id, args in expected_calls(graph, numbers):
        prepare(group_id, args)
    torch._C._jit_pass_erase_shape_information(graph)
    return refusals
