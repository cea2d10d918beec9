"""Logs of the graphs of torch.compile, by torch's own switch.

In: graphs on their way through program.py. Out: with `TORCH_LOGS=tsfuser`, or
`torch._logging.set_logs(modules={"tsfuser": logging.INFO})`, for each graph how much of it is fused, and
which nodes Python runs, with the lines of the program. `TORCH_LOGS=+tsfuser` adds the graphs: from
AOTAutograd, cut, typed, with groups. `TORCH_TRACE`, whose files tlparse reads, has the graphs with groups as
artifacts, and the sources of kernels (planning/dumps.py). Example:

    graph 1, forward: 5 of 9 ops in 2 groups
"""

from __future__ import annotations

import logging
from collections import Counter
from functools import partial
from typing import Any

from torch import fx

from ...graph.wrapper import CONSTANT, GROUP
from ...planning import dumps
from .fx.places import place_of
from .watch import Origin, Outcome

_log = logging.getLogger(__name__)
#: Of lists and of layouts: nothing is computed.
_NO_OPS = (CONSTANT, "prim::ListConstruct", "prim::ListUnpack", "tsfuser::in_order")


def shows_graphs() -> bool:
    """Whether the log has the graphs on their way."""
    return _log.isEnabledFor(logging.DEBUG)


def arrived(origin: Origin, module: fx.GraphModule) -> None:
    """Logs AOTAutograd's graph."""
    if _log.isEnabledFor(logging.DEBUG):
        _log.debug("%s, as it came:\n%s", origin, module.print_readable(print_output=False).strip())


def cut(origin: Origin, module: fx.GraphModule, foreign: dict[fx.Node, str]) -> None:
    """Logs the graph that is cut around the nodes that Python runs."""
    for node, reason in foreign.items():
        place = place_of(node)
        where = f" at {place[0]}:{place[1]}: {place[2]}" if place else ""
        _log.info("%s: Python runs %s%s, as %s", origin, node, where, reason)
    if _log.isEnabledFor(logging.DEBUG):
        _log.debug("%s, cut:\n%s", origin, module.print_readable(print_output=False).strip())


def typed(origin: Origin, graph: Any) -> None:
    """Logs a typed graph before groups are made."""
    if _log.isEnabledFor(logging.DEBUG):
        _log.debug("%s, typed:\n%s", origin, str(graph).rstrip())


def done(outcome: Outcome) -> None:
    """Logs a graph with its groups."""
    for name, (translation, _) in outcome.programs.items():
        title = "_".join(
            ["tsfuser", *str(outcome.origin).replace(",", "").split(), *([name] if name else [])]
        )
        dumps.trace(title, partial(str, translation.graph))
    if not _log.isEnabledFor(logging.INFO):
        return
    if outcome.failure:
        _log.info("%s runs unfused: %s", outcome.origin, outcome.failure)
        return
    counts: Counter[str] = Counter()
    for translation, _ in outcome.programs.values():
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug("%s, with groups:\n%s", outcome.origin, str(translation.graph).rstrip())
        for node in translation.graph.nodes():
            if node.kind() == GROUP:
                counts["groups"] += 1
                counts["fused"] += _ops(node.g("Subgraph"))
        counts["ops"] += _ops(translation.graph)
    total = counts["ops"] + counts["fused"] + len(outcome.foreign)
    groups = counts["groups"]
    plural = "" if groups == 1 else "s"
    _log.info("%s: %d of %d ops in %d group%s", outcome.origin, counts["fused"], total, groups, plural)


def _ops(graph: Any) -> int:
    return sum(node.kind() not in (*_NO_OPS, GROUP) for node in graph.nodes())
