"""Whether a run of a group gave what its nodes give one by one.

In: a `Run` with the results of both. Out: the first result that differs by more than roundings explain.
Example: `compare(run)` -> None, or a `Difference` whose str() has the group's graph and arguments.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from .. import _C
from ..ir.dtypes import DTYPES
from .arguments import described
from .observe import Run

_STORED = {name: dtype for name, dtype in DTYPES.items() if not dtype.computes}
#: Both sides may be off by some ulps an op (libm, CUDA's functions, another order of sums).
_ULPS = 16


@dataclass(frozen=True)
class Difference:
    """A result of a group that is not what its nodes give one by one. `result`: its number; `worst`: the
    largest difference, `allowed` what there may be; `text` says it all. `group` is -1 where the groups are
    right, and a result or gradient of the whole program, counted together, is not eager's."""

    group: int
    result: int
    worst: float
    allowed: float
    text: str

    def __str__(self) -> str:
        return self.text

    def of_group(self, number: int) -> Difference:
        """The same, with another number of the group."""
        return replace(
            self, group=number, text=self.text.replace(f"group {self.group} ", f"group {number} ", 1)
        )


def compare(run: Run) -> Difference | None:
    """The first result that differs."""
    for k, (fused, plain) in enumerate(zip(run.results, run.unfused)):
        found = _difference(fused, plain, _terms(run))
        if found is not None:
            worst, allowed, what = found
            return Difference(run.group, k, worst, allowed, _describe(run, k, what))
    return None


def widened(value: Any) -> Any:
    """A tensor in a dtype that has arithmetic, with the same numbers; packed ones are bytes."""
    if not isinstance(value, torch.Tensor) or str(value.dtype)[6:] not in _STORED:
        return value
    dtype = _STORED[str(value.dtype)[6:]]
    if not dtype.converts:
        return value.view(torch.uint8)
    return value.to(torch.float64 if dtype.is_floating else torch.int64)


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
    a, b = (widened(x).detach().to(wide) for x in (fused, plain))
    same = (a == b) | (a.isnan() & b.isnan())
    finite = b.abs()[b.isfinite()]
    scale = max(1.0, finite.max().item() if finite.numel() else 1.0)
    allowed = _relative(plain.dtype, terms) * scale
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


def _relative(dtype: torch.dtype, terms: int) -> float:
    """The error that a result of that dtype may have, relative to the largest result. A result of 8 bits may
    be a neighbour of eager's, where the unrounded value lies between the two."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return 0.0
    return torch.finfo(dtype).eps * (_ULPS * terms if dtype.itemsize > 1 else 1)


def _describe(run: Run, k: int, what: str) -> str:
    arguments = [f"  argument {i}: {described(a)}" for i, a in enumerate(run.arguments)]
    lines = [f"group {run.group} differs from its nodes in result {k}: {what}", *arguments]
    return "\n".join([*lines, str(_C.group_graph(run.group)).rstrip()])
