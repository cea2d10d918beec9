"""Plans on disk: what one process has planned, the next one does not plan again.

In: a group, and a call of it. Out: the plan that serves such calls, with its kernels loaded, if a process has
made one with the same tsfuser, torch, options, compiler and device. Example:

    shelf = shelf_of(group_id, call, device, batched=False)
    plan = shelf.find(call)
    if plan is None:
        plan = compile_fusion(call, fusion, device)
        shelf.keep(plan)

A shelf is one file of the disk cache: plans of one graph, for arguments of the same dtypes, ranks and
devices. Its graph has no sizes. Which plan serves a call is decided by the plan's own checks, as it is when
the same process calls the group again.
"""

from __future__ import annotations

import contextlib
import hashlib
import marshal
import os
import sys
from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace
from pathlib import Path

import torch

from .. import _C, log, options
from ..errors import Refusal
from ..ir.call import Call
from ..ir.limits import Limit
from ..ir.size import OPERATIONS
from ..target.disk_cache import DiskCache
from ..target.function import headers_digest
from . import ahead, compile, interrupts
from .plan import Launch, Plan

_MOST = 16  # plans of a shelf; the latest come first
_SUFFIX = ".plans"

#: The options that no plan depends on.
_APART = frozenset(
    "log_levels on_at_import use_nnc no_fallback trace library_path cache_dir cache_limit compile "
    "compile_timeout progress stored_plans stored_graphs".split()
)


@dataclass(frozen=True)
class Shelf:
    """The plans on disk that may serve a call. `key`: all that they depend on."""

    cache: DiskCache
    key: tuple
    device: str

    def find(self, call: Call) -> Plan | None:
        """The plan that serves `call`, its kernels loaded; None where there is none, or a kernel is gone."""
        try:
            for plan in self._plans():
                if serves(plan, call.leaves):
                    return self._loaded(plan)
        except Exception as error:  # it is planned, then
            interrupts.pass_on(error)
            log.write("kernel_cache", "no plan could be read from disk", error)
        return None

    def keep(self, plan: Plan) -> None:
        """Puts a plan there. What goes wrong costs the next process some time only."""
        try:
            kept = [replace(plan, launches=tuple(replace(x, function=0) for x in plan.launches))]
            kept += [other for other in self._plans() if other != kept[0]]
            self.cache.put(self.key, _SUFFIX, marshal.dumps([_plain(p) for p in kept[:_MOST]]))
        except Exception as error:
            interrupts.pass_on(error)
            log.write("kernel_cache", "a plan was not kept on disk", error)

    def _plans(self) -> Iterator[Plan]:
        content = self.cache.read(self.key, _SUFFIX)
        return map(_plan, marshal.loads(content)) if content else iter(())

    def _loaded(self, plan: Plan) -> Plan | None:
        names = [launch.name for launch in plan.launches]
        functions = compile.functions_on_disk(list(zip(plan.sources, names)), self.device)
        if functions is None:
            return None
        launches = (replace(x, function=f.handle) for x, f in zip(plan.launches, functions))
        return replace(plan, launches=tuple(launches), keepalive=tuple(functions))


def shelf_of(group_id: int, call: Call, device: str, batched: bool) -> Shelf | None:
    """Where plans of the group for such calls are; None where they are not kept. `batched` as of
    `compile.lower_fusion`."""
    if not options.get("stored_plans") or _is_watched():
        return None
    graph = _text(_C.group_graph(group_id))
    try:
        made_by = compile.identity(device)
    except (Refusal, OSError):  # no compiler, or no driver: planning says so
        return None
    if graph is None or made_by is None:
        return None
    chosen = chosen_options()
    arguments = tuple(ahead.structure(call))
    settings = tuple(map(str, ahead.settings()))
    key = ("plans", VERSIONS, repr(chosen), made_by, settings, graph, arguments, call.varies, batched)
    return Shelf(compile.disk_cache(device), key, device)


def chosen_options() -> dict[str, object]:
    """The options that the stored plans depend on."""
    return {option.name: options.get(option.name) for option in options.TABLE if option.name not in _APART}


def serves(plan: Plan, leaves: list[int]) -> bool:
    """Whether the plan serves a call with such leaves, as C++ asks of each call."""
    if plan.leaf_count != len(leaves):
        return False
    values = list(leaves)
    for count, position, expected in plan.checks:
        for op, a, b in plan.instructions[len(values) - len(leaves) : count]:
            values.append(a if op == "const" else OPERATIONS[op](values[a], values[b]))
        if values[position] != expected:
            return False
    return True


def _is_watched() -> bool:
    """Whether somebody wants to see how plans are made."""
    return bool(options.get("dump")) or log.enabled("parser") or log.enabled("kernel_cache", log.UPDATE)


def _text(graph: torch._C.Graph) -> str | None:
    """A graph without its sizes and without places in source files; None where its text does not tell it from
    others: torch does not print the signs of both parts of a complex number."""
    graph = graph.copy()
    torch._C._jit_pass_erase_shape_information(graph)
    text = graph.str(False)
    return None if "complex = prim::Constant" in text or "complex[] = prim::Constant" in text else text


def _versions() -> tuple:
    """What tells one tsfuser, torch and Python from another."""
    folder = Path(__file__).parent.parent
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        with contextlib.suppress(OSError):  # an editor's, gone by now
            digest.update(f"{path.relative_to(folder)} ".encode() + path.read_bytes())
    extension = os.stat(_C.__file__)
    built = extension.st_size, extension.st_mtime_ns
    python = sys.version, marshal.version
    return digest.hexdigest(), headers_digest(), built, torch.__version__, torch.version.git_version, python


#: Of the code that has been imported, whatever becomes of its files.
VERSIONS = _versions()


def _plain(plan: Plan) -> tuple:
    """Numbers, strings and tuples; `_plan` makes the plan of them again."""
    launches = tuple(map(astuple, plan.launches))
    limits = tuple((index, astuple(limit)) for index, limit in plan.limits)
    return (plan.leaf_count, plan.instructions, plan.checks, plan.allocations, launches, plan.results,
            plan.random, plan.updates, plan.drawn, limits, plan.reuses, plan.rooms, plan.sources)  # fmt: skip


def _plan(plain: tuple) -> Plan:
    (leaf_count, instructions, checks, allocations, launches, results,
     random, updates, drawn, limits, reuses, rooms, sources) = plain  # fmt: skip
    return Plan(
        leaf_count,
        instructions,
        checks,
        allocations,
        tuple(Launch(*x) for x in launches),
        results,
        random=random,
        updates=updates,
        drawn=drawn,
        limits=tuple((index, Limit(*x)) for index, x in limits),
        reuses=reuses,
        rooms=rooms,
        sources=sources,
    )
