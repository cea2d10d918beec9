"""What passes have made of scripted programs, on disk: a second process does not group and rewrite again.

In: a pass by name, the graphs it is given, and its other arguments. Out: the graphs and numbers that it makes
of them, if a process has kept these. Example:

    stored = stored_passes.place_of("graph_pass", [graph])
    made = stored.find() if stored else None
    if made is None:
        made = Made([grouped(graph)])
        if stored:
            stored.keep(made)

A pass is a function of its graphs, its arguments, the options and the default dtype, all of which are in the
key (tests/pure/test_trials.py sees to the rows of ops). What the key cannot tell, such as a function that the
graph calls, is not kept. Lines of source are those of the graphs at hand: errors name the program as it is.
"""

from __future__ import annotations

import hashlib
import marshal
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ... import _C, log, options
from ...graph.wrapper import GROUP, Graph
from ...planning import background, compile, interrupts, stored_plans
from ...target import counters

_SUFFIX = ".pass"
_VERSIONS = repr(stored_plans.VERSIONS).encode()
_MOST = 256  # that are remembered; the latest
_LOGS = ("graph_fuser", "partition", "parser")


_remembered: dict[tuple[Path, str], bytes] = {}  # cache: what was read or written last, of equal layers


@dataclass(frozen=True)
class Made:
    """What a pass returns. No graphs: it changes nothing. `numbers`: tuples and lists of ints."""

    graphs: list[Graph]
    numbers: Any = field(default_factory=tuple)


@dataclass(frozen=True)
class Place:
    """Where it is kept. `graphs`: as the pass gets them, or copies."""

    folder: Path
    key: str
    graphs: list[Graph]

    def find(self) -> Made | None:
        """What a process has kept there."""
        try:
            content = _remembered.get((self.folder, self.key))
            if content is None:
                content = compile.cache_in(self.folder).read(self.key, _SUFFIX)
            if content is None:
                return None
            self._remember(content)
            written, numbers = marshal.loads(content)
            made = Made(_C.read_made(written, self.graphs), numbers)
        except Exception as error:
            _say_why("no graph could be read from disk", error)
            return None
        counters.count("graphs_read")
        for graph in made.graphs:
            for node in graph.findAllNodes(GROUP, True):
                background.mark(node.i("cache_id"), options.in_background())
        return made

    def keep(self, made: Made) -> None:
        """Puts it there. What goes wrong costs the next process some time only."""
        try:
            content = marshal.dumps((_C.write_made(made.graphs, self.graphs), made.numbers))
            self._remember(content)
            compile.cache_in(self.folder).put(self.key, _SUFFIX, content)
        except Exception as error:
            _say_why("a graph is not kept on disk", error)

    def _remember(self, content: bytes) -> None:
        _remembered.pop((self.folder, self.key), None)
        _remembered[self.folder, self.key] = content
        for oldest in list(_remembered)[:-_MOST]:
            _remembered.pop(oldest, None)


def forget() -> None:
    """Drops what is remembered, as `reset` does with plans."""
    _remembered.clear()


def place_of(name: str, graphs: Sequence[Graph], given: Any = (), changed: bool = False) -> Place | None:
    """None where nothing is kept, or the key could not tell these graphs from others. `given`: the pass's
    other arguments, numbers. `changed`: the pass changes the graphs."""
    if not options.get("stored_graphs") or _is_watched() or options.enabled("eager_random"):
        return None  # whether random ops are fused as eager's is asked of the GPU
    try:
        digest = hashlib.sha256(_VERSIONS)
        digest.update(repr((name, _state(), given)).encode())
        digest.update(_C.graphs_text(graphs))
        kept = [graph.copy() for graph in graphs] if changed else list(graphs)
        return Place(options.cache_dir(), digest.hexdigest(), kept)
    except Exception as error:
        _say_why("a graph is not looked for on disk", error)
        return None


def _is_watched() -> bool:
    """Whether somebody wants to see how graphs are made."""
    return (
        bool(options.get("dump")) or any(map(log.enabled, _LOGS)) or log.enabled("kernel_cache", log.UPDATE)
    )


def _state() -> tuple:
    state = options.state
    return (
        stored_plans.chosen_options(),
        (state.single_node_mode, state.horizontal_mode, state.guard_mode, sorted(state.skip_kinds)),
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
    )


def _say_why(what: str, error: Exception) -> None:
    interrupts.pass_on(error)
    log.write("kernel_cache", what, f"{type(error).__name__}: {error}")
