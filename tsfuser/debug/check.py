"""`tsfuser.check`: runs a scripted function fused and unfused, and compares group by group.

In: a scripted function and arguments. Out: a `Report`; its str() names the first group whose results differ,
with its graph and arguments. Example:

    report = tsfuser.check(scripted, x)
    assert report, report
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .. import _C, options
from .arguments import described
from .caveat import caveat
from .explain import CALLS, explain
from .isolate import isolate
from .observe import Run, observing
from .table import UNREACHED, count, left_out

_EPSILON = {
    torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7, torch.float32: 2.0**-23, torch.float64: 2.0**-52,
    torch.complex64: 2.0**-23, torch.complex128: 2.0**-52,
}  # fmt: skip
#: Both sides may be off by some ulps an op (libm, CUDA's functions, another order of sums).
_ULPS = 16


@dataclass(frozen=True)
class Difference:
    """A result of a group that is not what its nodes give one by one. `result`: its number; `worst`: the
    largest difference, `allowed` what there may be; `text` says it all."""

    group: int
    result: int
    worst: float
    allowed: float
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Report:
    """True where groups ran fused and nothing differs. `compared`: groups that ran fused and were compared;
    `random`: groups that were not, as fused random numbers are others than eager's, unless these are asked
    for; `unfused`: reasons of those that did not run fused; `nothing`: why no group ran fused at all, ""
    where one did; `caveat`: why the function itself runs unfused, "" where it does not."""

    name: str
    compared: tuple[int, ...]
    random: tuple[int, ...]
    unfused: tuple[tuple[int, str], ...]
    difference: Difference | None
    nothing: str = ""
    caveat: str = ""

    def __bool__(self) -> bool:
        return self.difference is None and not self.nothing

    def __str__(self) -> str:
        if self.difference:
            return str(self.difference)
        equal = f"{count(len(self.compared), 'group')} compared, all equal within their dtypes' precision"
        parts = [f"{self.name}: {self.nothing or (equal if self.compared else 'no group was compared')}"]
        parts += [f"but {self.caveat}; a copy was compared"] if self.caveat else []
        parts += [f"group {g} has random numbers and was not compared" for g in self.random]
        parts += [f"group {g} ran unfused: {reason}" for g, reason in self.unfused]
        return "\n".join(parts)


def check(fn: Any, *args: Any, **kwargs: Any) -> Report:
    """Runs `fn(*args)`, forward and, where results require gradients, backward, on copies, until it is fused.
    Then each group runs twice in one more call, fused and node by node, from equal arguments and random
    states. Nothing of the caller's changes but the counters of `tsfuser.stats()`. Raises what `fn` raises,
    and TypeError for arguments that it does not take; warns as `explain` does."""
    compared, random, unfused = {}, {}, {}
    differences: list[Difference] = []

    def look(run: Run) -> None:
        if run.reason:
            unfused[run.group] = run.reason
        elif _is_random(run.group) and not options.enabled("eager_random"):
            random[run.group] = None
        else:
            compared[run.group] = None
            difference = compare(run)
            if difference:
                differences.append(difference)

    with isolate(fn, args, kwargs) as twin, torch.jit.fuser("fuser2"):
        for _ in range(CALLS):
            twin.step()
        with observing(look, unfused=True):
            twin.step()
    first = differences[0] if differences else None
    ran = bool(compared or random)
    nothing = "" if ran else _why_nothing(bool(unfused), fn, args, kwargs)
    return Report(
        twin.name, tuple(compared), tuple(random), tuple(unfused.items()), first, nothing, caveat(twin, ran)
    )


def _why_nothing(unfused: bool, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Why no group ran fused: what `explain` says, unless there were groups that ran `unfused`."""
    if unfused:
        return "nothing was compared: no group ran fused"
    found = explain(fn, *args, **kwargs)
    if found.groups:
        return f"nothing was compared: its {count(len(found.groups), 'group')} {UNREACHED}"
    left = [line for graph in found.graphs for line in left_out(graph)]
    return "\n".join(["nothing was compared: it has no group", *left])


def _is_random(group: int) -> bool:
    """Whether a node of the group draws random numbers."""
    return any(node.isNondeterministic() for node in _C.group_graph(group).nodes())


def compare(run: Run) -> Difference | None:
    """The first result that differs."""
    for k, (fused, plain) in enumerate(zip(run.results, run.unfused)):
        found = _difference(fused, plain, _terms(run))
        if found is not None:
            worst, allowed, what = found
            return Difference(run.group, k, worst, allowed, _describe(run, k, what))
    return None


def _terms(run: Run) -> int:
    """How many roundings may add up: ops, and the square root of the terms of the longest sum."""
    nodes = sum(1 for _ in _C.group_graph(run.group).nodes())
    sizes = [a.numel() for a in run.arguments if isinstance(a, torch.Tensor)]
    return nodes + int(max(sizes, default=1) ** 0.5)


def _difference(fused: Any, plain: Any, terms: int) -> tuple[float, float, str] | None:
    """Worst difference, what is allowed, and a sentence; None where they agree."""
    if not isinstance(plain, torch.Tensor) or not isinstance(fused, torch.Tensor):
        same = fused == plain or (fused is None and plain is None)
        return None if same else (float("inf"), 0.0, f"{fused!r} instead of {plain!r}")
    if (fused.dtype, fused.shape, fused.device) != (plain.dtype, plain.shape, plain.device):
        kinds = [f"{x.dtype}{list(x.shape)} on {x.device}" for x in (fused, plain)]
        return float("inf"), 0.0, f"it is {kinds[0]} instead of {kinds[1]}"
    wide = torch.complex128 if plain.is_complex() else torch.float64
    a, b = fused.detach().to(wide), plain.detach().to(wide)
    same = (a == b) | (a.isnan() & b.isnan())
    finite = b.abs()[b.isfinite()]
    scale = max(1.0, finite.max().item() if finite.numel() else 1.0)
    allowed = _EPSILON[plain.dtype] * _ULPS * terms * scale if plain.dtype in _EPSILON else 0.0
    apart = (a - b).abs().nan_to_num(nan=float("inf"))
    wrong = ~same & ~(apart <= allowed)
    if not bool(wrong.any()):
        return None
    where = wrong.nonzero()[0].tolist()
    sample = f"at {where} {fused[tuple(where)].item()!r} instead of {plain[tuple(where)].item()!r}"
    return (
        apart[wrong].max().item(),
        allowed,
        f"{int(wrong.sum())} of {wrong.numel()} elements differ, {sample}",
    )


def _describe(run: Run, k: int, what: str) -> str:
    arguments = [f"  argument {i}: {described(a)}" for i, a in enumerate(run.arguments)]
    lines = [f"group {run.group} differs from its nodes in result {k}: {what}", *arguments]
    return "\n".join([*lines, str(_C.group_graph(run.group)).rstrip()])
