"""Runs a module fused and unfused, call by call, and compares each call.

In: three copies of a scripted module, and a way to use one: a function of a module and arguments that returns
tensors. Out: a `Record` for the table; an AssertionError names the first call whose results differ. Example:

    record = Record("torchani: ANI", "inference", "cpu")
    run(copies(make, program, "cpu"), inference, program, "cpu", record)
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from zoo import Program

import tsfuser
from kit.support import CALLS, EPSILON, ULPS

Way = Callable[[Any, tuple], Any]
#: Operations that follow each other in the longest of the programs, about.
STEPS = 50


@dataclass
class Record:
    """What the table shows of a program in one way of use."""

    program: str
    way: str
    target: str
    calls: int = 0
    groups: int = 0
    #: compiled kernels, after the calls of each size
    kernels: list[int] = field(default_factory=list)
    fallbacks: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    unfused_seconds: float = 0.0
    differences: int = 0
    #: calls that raise, unfused and fused
    raised: int = 0
    #: the largest error, as a part of the tolerance
    error: float = 0.0
    #: whose roundings are allowed; None: those of each result's dtype
    precision: torch.dtype | None = None


@dataclass
class Copies:
    """The module that runs fused, one that runs unfused, and one in float64, if the module can be that."""

    fused: Any
    plain: Any
    exact: Any | None


def copies(make: Callable[[], Any], program: Program, device: str) -> Copies:
    """Copies of `make()`, which shares its class with no other: a class has one graph for each method."""
    if program.loads:
        stored = io.BytesIO()
        torch.jit.save(make(), stored)
        made = [torch.jit.load(io.BytesIO(stored.getvalue()), map_location=device) for _ in range(3)]
    else:
        made = [make().to(device) for _ in range(3)]
    return Copies(made[0], made[1], made[2].double() if program.in_double else None)


def unfused():
    """Inside, the same TorchScript runs without any fuser."""
    return torch.jit.fuser("none")


def run(found: Copies, way: Way, program: Program, device: str, record: Record, sizes=None) -> None:
    """Each size several times, as what is fused depends on how often a function was called."""
    in_double = program.chooses and found.plain.training  # a frozen module has no such attribute
    for module in (found.fused, found.plain) if in_double else ():
        module.double()
        record.precision = torch.float32
    try:
        for k, size in enumerate(sizes or program.sizes):
            for call in range(CALLS if k == 0 else 2):
                given = moved(program.inputs(size), device)
                given = widened(given) if in_double else given
                _call(found, way, given, record, f"{record.way}, size {size}, call {call + 1}")
                record.calls += 1
            record.kernels.append(tsfuser.stats()["kernels_compiled"] + tsfuser.stats()["disk_hits"])
    finally:
        stats = tsfuser.stats()
        record.groups, record.fallbacks = stats["groups"], dict(stats["fallbacks"])
    assert record.raised <= record.calls // 2, f"{plain_error(found, way, program, device)!r}"


def _call(found: Copies, way: Way, given: tuple, record: Record, where: str) -> None:
    begun = time.perf_counter()
    with tsfuser.fuser():
        mine = outcome(way, found.fused, given)
    record.seconds += time.perf_counter() - begun
    begun = time.perf_counter()
    with unfused():
        plain = outcome(way, found.plain, given)
    record.unfused_seconds += time.perf_counter() - begun
    with unfused():
        exact = outcome(way, found.exact, widened(given)) if found.exact is not None else plain
    difference = compare(mine, plain, exact, record)
    record.differences += difference is not None
    assert difference is None, f"{where}: {difference}"


def outcome(way: Way, module: Any, given: tuple) -> list[Tensor] | Exception:
    """The tensors of a call, or what it raised."""
    try:
        return tensors(way(module, tuple(copied(x) for x in given)))
    except Exception as error:
        return error


def plain_error(found: Copies, way: Way, program: Program, device: str) -> Any:
    """What the unfused module raises for the first size."""
    with unfused():
        return outcome(way, found.plain, moved(program.inputs(program.sizes[0]), device))


def compare(mine, plain, exact, record: Record) -> str | None:
    """What differs, as a sentence. What the unfused module raises, the fused one has to raise, too."""
    if isinstance(plain, Exception) or isinstance(mine, Exception):
        same = type(mine) is type(plain)
        record.raised += same
        return None if same else f"fused: {mine!r:.2000}, unfused: {plain!r:.2000}"
    assert not isinstance(exact, Exception), f"the module does not run in float64: {exact!r:.2000}"
    if len(mine) != len(plain):
        return f"{len(mine)} results, unfused {len(plain)}"
    sizes = [largest(x) for x in exact if x.is_floating_point()]
    for k, (a, b, c) in enumerate(zip(mine, plain, exact)):
        difference = _compare_tensors(a, b, c, max(sizes, default=0.0), record)
        if difference is not None:
            return f"result {k} of {len(mine)}, {tuple(b.shape)}: {difference}"
    return None


def _compare_tensors(mine, plain, exact, scale, record) -> str | None:
    """Errors are at most three times those of the unfused module in the mean of their squares, and five times
    at one place, beside roundings of the tensor's largest value. Those of one fused norm are up to 1.3 times
    eager's; fifty norms of two images each amplify that. The largest value counts as at least a thousandth of
    the call's largest one: sums that cancel leave such a rest. Where nothing but roundings is left (the
    gradient of a bias before a norm), ten times the unfused module's are allowed. TorchScript's formulas for
    gradients have NaN where eager has none, so what is not finite is so unfused, or in float64."""
    said = [(str(t.dtype), tuple(t.shape), t.device.type) for t in (mine, plain)]
    if said[0] != said[1]:
        return f"is {said[0]}, unfused {said[1]}"
    if not plain.is_floating_point():
        return None if torch.equal(mine, plain) else "differs"
    if not same_where_not_finite(mine, plain) and not same_where_not_finite(mine, exact):
        return f"is not finite in {_not_finite(mine)} places, unfused {_not_finite(plain)}"
    finite = torch.isfinite(mine) & torch.isfinite(exact)
    if not finite.any():
        return None
    a, b, c = (t.double()[finite] for t in (mine, plain, exact))
    b = torch.where(torch.isfinite(b), b, c)
    rounding = EPSILON[record.precision or plain.dtype] * ULPS * STEPS * max(largest(exact), scale * 1e-3)
    rest = largest(exact) < mean_square(b - c)  # which is of no value, rounded in another order
    for size, times in ((mean_square, 10 if rest else 3), (largest, 10 if rest else 5)):
        error, allowed = size(a - c), times * size(b - c) + rounding
        record.error = max(record.error, error / allowed) if allowed else record.error
        if error > allowed:
            return f"is off by {error:.3g}, unfused by {size(b - c):.3g}, of {largest(exact):.3g}"
    return None


def same_where_not_finite(mine: Tensor, other: Tensor) -> bool:
    """Whether both are NaN, and infinite, at the same places."""
    rest = ~torch.isfinite(other)
    return torch.equal(rest, ~torch.isfinite(mine)) and torch.equal(
        other[rest].double().nan_to_num(), mine[rest].double().nan_to_num()
    )


def _not_finite(x: Tensor) -> int:
    return int((~torch.isfinite(x)).sum())


def mean_square(x: Tensor) -> float:
    """The root of the mean square."""
    return x.square().mean().sqrt().item()


def largest(x: Tensor) -> float:
    """The largest magnitude of finite elements."""
    return x[torch.isfinite(x)].abs().max().item() if torch.isfinite(x).any() else 0.0


def tensors(out) -> list[Tensor]:
    """All tensors of a nest of results, without their histories."""
    if isinstance(out, Tensor):
        return [out.detach()]
    if isinstance(out, dict):
        out = [out[key] for key in sorted(out)]
    return [x for part in out for x in tensors(part)] if isinstance(out, (list, tuple)) else []


def copied(x):
    return x.detach().clone() if isinstance(x, Tensor) else x


def moved(given: tuple, device: str) -> tuple:
    return tuple(x.to(device) if isinstance(x, Tensor) else x for x in given)


def widened(given: tuple) -> tuple:
    return tuple(x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in given)
