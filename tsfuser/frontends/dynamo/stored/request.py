"""One compilation of a graph of TorchDynamo, and its record on disk.

In: what torch compiles. Out: the record's function, if a process has kept one; else the graphs are noted as
they are compiled, and kept once AOTAutograd knows all of them: after the first backward, in training. What
goes wrong is a miss. Example, by torch_cache:

    call = request.find(module, args, aot_config)
    if call is None:
        ...                      # torch traces; our compilers call request.note(role, compiled)
        request.keep(entry)
"""

from __future__ import annotations

import hashlib
import marshal
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx

from .... import log, options
from ....errors import Refusal
from ....graph.wrapper import GROUP
from ....grouping.support import Refusals
from ....planning import background, compile, interrupts
from ....target import counters
from .. import counts, logs, watch
from ..program import Compiled
from ..settings import Settings, applied
from . import custom_ops, record
from .graph_text import arguments_text, graph_text
from .surroundings import lasting, surroundings
from .symbols import holds, symbols_text

_SUFFIX = ".graph"
_MOST = 8  # records of one key, whose sizes gave other answers; the latest come first


class Key(str):
    """The digest of all that a compiled graph depends on, which torch returns to us with the graph it
    keeps."""

    request: Request


class Request:
    """`source`: the graph of TorchDynamo, for logs. `kept`: the record, once it was read or made. `reason`:
    why there is none."""

    def __init__(self, settings: Settings, source: watch.Source) -> None:
        self.settings, self._source = settings, source
        self.key: Key | None = None
        self.kept: bytes | None = None
        self.reason = ""
        self.custom_ops: dict[str, str] = {}  # as of `custom_ops.of_module`
        self._lasting: tuple = ()
        self._programs: dict[str, record.Program | record.Pieces] = {}

    def find(self, module: Any, args: list[Any], aot_config: Any) -> Callable[..., Any] | None:
        """The function of AOTAutograd, from disk."""
        try:
            self.key = self._key(module, args, aot_config)
            found = next((content for guard, content in _records(self.key) if holds(guard, args)), None)
            if found is None:
                return None
            call, made = record.read(found, args, aot_config)
        except Exception as error:
            self.say_why("no compiled graph could be read from disk", error)
            return None
        self.kept = found
        counters.count("graphs_read")
        mark_groups(self.settings, made.values())
        for role, of_role in made.items():
            origin = watch.Origin(self._source, role)
            graphs = {name: (graph, Refusals()) for name, graph in of_role.graphs.items()}
            logs.done(watch.Outcome(origin, module, graphs, of_role.foreign))
            counts.count(of_role.foreign.values(), "")
        return call

    def note(self, role: str, made: Compiled) -> None:
        """Takes what was compiled for a role."""
        try:
            if self.key is None:
                return
            if self._lasting != lasting(self.settings):
                raise Refusal("options have changed since the forward was compiled")
            self._programs[role] = record.written(made)
        except Exception as error:
            self.say_why("a compiled graph is not kept on disk", error)

    def keep(self, entry: Any) -> None:
        """Puts the record on disk."""
        try:
            roles = {"inference"} if entry.compiled_bw is None else {"forward", "backward"}
            if self.key is not None and set(self._programs) == roles:
                self.kept = record.write(entry, self._programs)
                others = [other for other in _records(self.key) if other[0] != entry.guards_expr]
                all_kept = [(entry.guards_expr, self.kept), *others][:_MOST]
                _cache().put(self.key, _SUFFIX, marshal.dumps(all_kept))
        except Exception as error:
            self.say_why("a compiled graph is not kept on disk", error)
        self._programs.clear()  # torch holds the request as long as the function

    def _key(self, module: Any, args: list[Any], aot_config: Any) -> Key:
        """Raises Refusal."""
        if not isinstance(module, fx.GraphModule):
            raise Refusal("its inputs are lists")
        self._lasting = lasting(self.settings)
        self.custom_ops = custom_ops.of_module(module)
        of_arguments = arguments_text(args), symbols_text(args)
        devices = {str(value.device) for value in args if isinstance(value, torch.Tensor)}
        of_torch = (
            aot_config.num_params_buffers,
            aot_config.keep_inference_input_mutations,
            aot_config.dynamic_shapes,
            aot_config.is_export,
            aot_config.no_tangents,
            aot_config.pre_dispatch,
            tuple(aot_config.static_input_indices or ()),
        )
        written = repr((surroundings(self.settings, devices), of_torch, of_arguments, graph_text(module)))
        key = Key(hashlib.sha256(written.encode()).hexdigest())
        key.request = self
        return key

    def say_why(self, what: str, error: Exception) -> None:
        """Writes into the log what is not done, and why."""
        interrupts.pass_on(error)
        self.reason = str(error) if isinstance(error, Refusal) else f"{type(error).__name__}: {error}"
        log.write("kernel_cache", what, f"graph {self._source.number}: {self.reason}")


def mark_groups(settings: Settings, found: Iterable[record.Made]) -> None:
    """Says of the groups whether calls wait for their plans, as is said where groups are made."""
    with applied(settings):
        wanted = options.in_background()
    for translation in (graph for made in found for graph in made.graphs.values()):
        for node in translation.graph.findAllNodes(GROUP, True):
            background.mark(node.i("cache_id"), wanted)


def wanted(graphs_of_cuda: bool) -> bool:
    """Whether compiled graphs are kept: not where somebody wants to see how they are made, nor where a CUDA
    graph is made of them."""
    return (
        options.get("stored_graphs")
        and not graphs_of_cuda
        and not watch.is_watched()
        and not logs.shows_graphs()
        and not options.get("dump")
        and not any(log.enabled(name) for name in ("graph_fuser", "partition", "parser"))
        and not log.enabled("kernel_cache", log.UPDATE)
    )


def _records(key: Key) -> list[tuple[str | None, bytes]]:
    """Each with the guard that the sizes of a call have to meet."""
    content = _cache().read(key, _SUFFIX)
    return marshal.loads(content) if content else []


def _cache() -> Any:
    return compile.disk_cache("cpu")
