"""The pipeline in one screen: Fusion -> segments -> schedules -> Loop IR -> source -> binary -> Plan.

In: a Fusion and the call it was built for. Out: a Plan that serves every call of the same class. Example:
`compile_fusion(call, fusion, "cuda:0")`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from .. import log, options
from ..codegen import emit
from ..codegen.batched import batched_form
from ..graph.passes import no_collection
from ..ir.budgets import with_fast_forms
from ..ir.call import Call
from ..ir.extremes import compares_extremes
from ..ir.fusion import Fusion
from ..ir.size import Size
from ..lower.kernel import Kernel, Param
from ..lower.pipeline import lower
from ..schedule import fusion_stages
from ..schedule.loops import Schedule
from ..schedule.machine import PORTABLE_CLUSTER_BLOCKS, Machine
from ..schedule.proposal import Stage
from ..schedule.reuse import reuses
from ..segment import Allocations, Segment
from ..target.cuda import CudaTarget
from ..target.disk_cache import DiskCache
from ..target.function import Function, RecentFunctions, source_digest
from . import compilers, dumps, interrupts, targets
from .describe import Allocated, described
from .plan import MOST_DEAD_INPUTS, Launch, Plan, Program
from .torch_casts import with_torchs_casts

_functions = RecentFunctions(1024)  # cache: `_key` -> loaded kernel


@dataclass(frozen=True)
class Compiled:
    """One kernel, all the way: for dumps and `explain`. `part`: the number of the fusion's segment that it
    belongs to; `segment`: what of it this kernel does."""

    part: int
    params: object
    segment: Segment
    schedule: Schedule
    kernel: Kernel
    source: str
    function: Function


@dataclass(frozen=True)
class Lowered:
    """What `fusion` becomes for calls like `call`, up to the source of each kernel: all of its Compiled but
    the functions."""

    call: Call
    fusion: Fusion
    device: str
    kernels: list[tuple[int, object, Segment, Schedule, Kernel, str]]
    allocations: Allocations


def compile_fusion(call: Call, fusion: Fusion, device: str, batched: bool = False) -> Plan:
    """The plan of `fusion` for calls like `call`; `batched` as of `lower_fusion`. Raises Refusal or
    CompileError."""
    return finish(lower_fusion(call, fusion, device, batched))


def finish(lowered: Lowered) -> Plan:
    """The plan, once its kernels are compiled. Raises Refusal or CompileError."""
    start = time.perf_counter()
    call, fusion, device = lowered.call, lowered.fusion, lowered.device
    compiled = _loaded(lowered)
    plan = _plan(call, fusion, lowered.allocations.temporaries, compiled, device)
    took = 1e3 * (time.perf_counter() - start)
    log.write(
        "kernel_cache",
        f"planned {len(compiled)} kernel{'s' * (len(compiled) != 1)} in {took:.1f} ms",
        plan,
        log.UPDATE,
    )
    dumps.show("launch_param", "plan", plan)
    return plan


def kernels_of(call: Call, fusion: Fusion, device: str) -> tuple[list[Compiled], Allocations]:
    """The kernels of `fusion`, loaded, in the order of their launches, and what they want allocated. Raises
    Refusal or CompileError."""
    lowered = lower_fusion(call, fusion, device)
    return _loaded(lowered), lowered.allocations


@no_collection()
def lower_fusion(call: Call, fusion: Fusion, device: str, batched: bool = False) -> Lowered:
    """The fusion with its kernels' sources, in the order of their launches; `batched`: of kernels that one
    launch can run for several calls, where that is possible. Raises Refusal."""
    machine = _machine(device)
    if machine.has_fast_forms:
        fusion = with_fast_forms(fusion, everywhere=options.enabled("fast_math"))
    dumps.show("fusion_ir", "fusion", fusion)
    for word in ("fusion_args", "kernel_args", "print_args"):
        dumps.show(word, "arguments of the first call of a class", *call.args, between="\n")
    stages, allocations = fusion_stages(call, fusion, machine)
    contract = not compares_extremes(fusion)
    lowered = []
    for part, stage in stages:
        interrupts.check()
        most = machine.parameter_bytes if batched else 0
        lowered.append((part, stage.params, *_lower(stage.segment, stage.schedule, device, most, contract)))
        dumps.show("scheduler_params", stage.segment.name, stage.params, stage.schedule)
    return Lowered(call, fusion, device, lowered, allocations)


def start(lowered: Lowered, beside: bool = False) -> list[Future]:
    """Has its kernels compiled in the background, by the time that `finish` wants them. `beside` as of
    `compilers.start`."""
    device = lowered.device
    missing = [
        (s, kernel.name) for *_, kernel, s in lowered.kernels if _functions.get(_key(s, device)) is None
    ]
    return compilers.start(_target(device, options.host_launch()), missing, device, beside)


def _loaded(lowered: Lowered) -> list[Compiled]:
    sources = [(source, kernel.name) for *_, kernel, source in lowered.kernels]
    loaded = functions(sources, lowered.device)
    return [Compiled(*fields, function) for fields, function in zip(lowered.kernels, loaded)]


def can_be_batched(device: str) -> bool:
    """Whether one launch can run a kernel for this device for several calls: not for CPU tensors, whose
    launches cost next to nothing."""
    return _machine(device).has_threads


def _machine(device: str) -> Machine:
    """What schedulers plan for."""
    machine = targets.chosen(device, options.host_launch()).machine(device)
    if not machine.has_clusters or options.disabled("clusters"):
        return machine
    every = options.enabled("clusters")
    return replace(machine, cluster_blocks=PORTABLE_CLUSTER_BLOCKS, any_clusters=every)


def _lower(segment: Segment, schedule, device: str, batch_bytes: int, contract: bool) -> tuple:
    """All of a Compiled but its function."""
    kernel = batched_form(lower(segment, schedule, segment.name), batch_bytes)
    source = with_torchs_casts(emit.source(kernel, contract))
    dumps.show("segmented_fusion", kernel.name, segment)
    dumps.show("kernel_ir", kernel.name, kernel)
    dumps.trace(f"tsfuser_kernel_{kernel.name}", lambda: source)
    if dumps.wants_kernels():
        dumps.kernel(
            kernel.name, source, device, None if device == "cpu" else _target(device, options.host_launch())
        )
    return segment, schedule, kernel, source


def functions(kernels: Sequence[tuple[str, str]], device: str) -> list[Function]:
    """The loaded kernels of (source, name) pairs; each source is compiled once in this process, and once on
    this disk. Raises Refusal, CompileError, Interrupted."""
    target = _target(device, options.host_launch())
    known = {source: _functions.get(_key(source, device)) for source, _ in kernels}
    missing = [kernel for kernel in kernels if known[kernel[0]] is None]
    for (source, name), stored in zip(missing, compilers.binaries(target, missing, device)):
        known[source] = _functions.add(_key(source, device), target.load(stored, name, device))
    return [known[source] for source, _ in kernels]


def functions_on_disk(kernels: Sequence[tuple[str, str]], device: str) -> list[Function] | None:
    """The loaded kernels of (digest of the source, name) pairs; None where one is not on disk. Raises Refusal
    or CompileError."""
    target = _target(device, options.host_launch())
    found = []
    for digest, name in kernels:
        key = _key_of(digest, device)
        function = _functions.get(key)
        if function is None:
            stored = target.find_made_of(digest, device)
            if stored is None:
                return None
            function = _functions.add(key, target.load(stored, name, device))
        found.append(function)
    return found


def identity(device: str) -> tuple | None:
    """What kernels, and the choices of schedulers, depend on besides a fusion and a call; None where kernels
    can neither be compiled nor found. Raises Refusal."""
    made_by = _target(device, options.host_launch()).identity(device)
    return made_by and (made_by, repr(_machine(device)))


def disk_cache(device: str) -> DiskCache:
    """Where kernels for `device` are kept."""
    return _target(device, options.host_launch()).cache


def _key(source: str, device: str) -> tuple[str, str]:
    """By what a loaded kernel is found; the whole source would be kept as long as the kernel."""
    return _key_of(source_digest(source), device)


def _key_of(digest: str, device: str) -> tuple[str, str]:
    return f"{device} {options.host_launch()}", digest


@cache
def expect_cuda() -> None:
    """Starts the compiler for CUDA as soon as CUDA is in use: now, or when torch initialises it. Only the
    first call does anything."""
    if torch.version.cuda:
        torch.cuda._lazy_call(start_cuda_compiler)


def start_cuda_compiler() -> None:
    """Starts the compiler for CUDA, in a thread of its own. No graph has come yet, so nothing asks for the
    options of kernels."""
    CudaTarget(cache_in(options.cache_dir())).start()


def forget() -> None:
    """Drops the kernels that are loaded; those on disk stay."""
    _functions.clear()
    compilers.forget()


@cache
def cache_in(directory: Path) -> DiskCache:
    """The disk cache in a folder."""
    return DiskCache(directory, options.get("cache_limit"))


@cache
def _target(device: str, launch: str):
    return targets.chosen(device, launch).compiler(cache_in(options.cache_dir()))


def _plan(call: Call, fusion: Fusion, temporaries, compiled: list[Compiled], device: str) -> Plan:
    program = Program(call)
    program.check_decisions()
    tensors: list[tuple[str, Sequence[Size | int], Sequence[Size | int]]]
    tensors = [(o.value.dtype.name, o.sizes, o.strides) for o in fusion.outputs]
    tensors += [(t.value.dtype.name, t.sizes, t.strides) for t in temporaries]
    empties = list(dict.fromkeys(str(what) for kind, what in fusion.results if kind == "empty"))
    spots = {dtype: len(tensors) + k for k, dtype in enumerate(empties)}
    tensors += [(dtype, (0,), (1,)) for dtype in empties]
    seeds = len(tensors)
    tensors += [("int64", (length,), (1,)) for length in fusion.seeds]
    allocations = tuple(
        (d, tuple(map(program.position, s)), tuple(map(program.position, st))) for d, s, st in tensors
    )
    rooms = tuple(
        (k, program.position(o.room.elements), o.room.dim)
        for k, o in enumerate(fusion.outputs)
        if o.room is not None
    )
    launches = tuple(_launch(program, c, device, seeds) for c in compiled)
    place: dict[str, Callable[[Any], int]]  # among the allocations
    place = {"output": lambda i: i, "seed": lambda i: seeds + i, "empty": spots.__getitem__}
    results = tuple(
        ("allocation", place[kind](i)) if kind in place else (kind, int(i)) for kind, i in fusion.results
    )
    updates = tuple((u.index, u.counted) for u in fusion.updates)
    reused = _reuses(program, fusion, compiled)
    drawn = -1 if fusion.drawn is None else program.position(fusion.drawn)
    keepalive = tuple(c.function for c in compiled)
    return Plan(
        len(call.leaves),
        tuple(program.instructions),
        tuple(program.checks),
        allocations,
        launches,
        results,
        "",
        len(fusion.drawing),
        updates,
        drawn,
        tuple(call.limits),
        reused,
        rooms,
        keepalive,
        tuple(source_digest(c.source) for c in compiled),
        lambda: described(call, _allocated(fusion, tensors, temporaries), compiled),
    )


def _reuses(program: Program, fusion: Fusion, compiled: list[Compiled]) -> tuple:
    """As a plan has them."""
    found = reuses(fusion, [Stage(c.segment, c.schedule, c.params) for c in compiled])
    return tuple(
        (r.allocation, r.argument, tuple(tuple(map(program.position, sizes)) for sizes in r.alike))
        for r in found
        if r.argument < MOST_DEAD_INPUTS
    )


def _allocated(fusion: Fusion, tensors: list, temporaries) -> list[Allocated]:
    """What the plan allocates, with names for `describe`."""
    names = [o.value.name for o in fusion.outputs] + [t.value.name for t in temporaries]
    return [Allocated(name, *t) for name, t in zip([*names, *["empty"] * len(tensors)], tensors)]


def _launch(program: Program, compiled: Compiled, device: str, seeds: int) -> Launch:
    """`seeds`: the number of the first allocation that is a seed."""
    kernel = compiled.kernel
    offsets, size = emit.struct_layout(kernel.params)
    args = tuple((offset, *_argument(program, p, seeds)) for offset, p in zip(offsets, kernel.params))
    sizes = (kernel.grid, kernel.block_x, kernel.block_y, kernel.shared, kernel.grain)
    overlaps = kernel.combines_partials and compiled.function.waits and not options.disabled("overlap")
    kind = "host" if device == "cpu" else "overlapped" if overlaps else "cuda"
    cluster = program.position(kernel.cluster) if kernel.cluster else -1
    grid, x, y, shared, grain = map(program.position, sizes)
    handle, name, capacity = compiled.function.handle, kernel.name, kernel.batch_capacity
    return Launch(kind, handle, name, grid, x, y, shared, grain, size, args, cluster, capacity)


_NUMBER_KINDS = {"bool": "bool", "int64": "int64_number", "float64": "float64", "complex128": "complex128"}


def _argument(program: Program, param: Param, seeds: int) -> tuple[str, int]:
    """How C++ fills a field: kind and index. `seeds` as of `_launch`."""
    kind, *what = param.source
    if kind == "seed":
        return "allocation", seeds + what[0]
    if kind == "size":
        return ("int64" if param.ctype == "int64_t" else "int32"), program.position(what[0])
    if kind == "number":
        return _NUMBER_KINDS[what[1]], what[0]
    return kind, what[0] if what else 0
