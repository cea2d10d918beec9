"""Whether a compiled program gives what eager mode gives.

In: a copy of a compiled program. Out: the first of its results and gradients that is not eager's, and how
many were compared. torch's own criterion decides, which its accuracy minifier uses: a result may be as far
from that in float64 as eager's is, a few times. Example:

    difference, count = differs_from_eager(isolated)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._dynamo.utils import same

from .compare import Difference, widened
from .isolate import generators_of, tensors
from .isolate_compiled import IsolatedCompiled


def differs_from_eager(isolated: IsolatedCompiled) -> tuple[Difference | None, int]:
    """Runs the first step of the copy, and one of eager copies. Nothing is compared where random numbers are
    drawn: compiled code draws others than eager's."""
    eager, values = isolated.eager(False), (*isolated.owner, *isolated.given)
    devices = {x.device for x in tensors(values) if x.is_cuda}
    with generators_of(values):
        before = _states(devices)
        ours = isolated.step()
        if any(not torch.equal(a, b) for a, b in zip(before, _states(devices))):
            return None, 0
    plain, exact = eager.step(), _exactly(isolated)
    names = [f"{kind} {k}" for kind, found in zip(("result", "gradient"), plain) for k in range(len(found))]
    flat = [_flat(found) for found in (ours, plain, exact or plain)]
    for k, (name, a, b, c) in enumerate(zip(names, *flat)):
        difference = _difference(k, name, a, b, c, exact is not None)
        if difference is not None:
            return difference, len(names)
    return None, len(names)


def _states(devices: set[torch.device]) -> list[torch.Tensor]:
    """Of the random generators."""
    return [torch.random.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in devices)]


def _exactly(isolated: IsolatedCompiled) -> Any:
    """Results and gradients in float64; None for a program that does not run in it."""
    try:
        return isolated.eager(True).step()
    except Exception:
        return None


def _flat(found: tuple[Sequence[Any], Sequence[Any]]) -> list[Any]:
    return [*found[0], *found[1]]


def _difference(k: int, name: str, ours: Any, plain: Any, exact: Any, known: bool) -> Difference | None:
    said: list[str] = []
    comparable = _shape(ours) == _shape(plain)
    tolerance = torch.finfo(plain.dtype).eps ** 0.5 if _is_float(widened(plain)) else 0.0
    if comparable and same(
        widened(plain),
        widened(ours),
        widened(exact) if known else None,
        tol=tolerance,
        equal_nan=True,
        log_error=lambda text, *values, **_: said.append(text % values if values else text),
    ):
        return None
    worst = float("inf")
    if comparable and _is_float(widened(plain)):
        wide = torch.complex128 if plain.is_complex() else torch.float64
        worst = (widened(ours).to(wide) - widened(plain).to(wide)).abs().max().item()
    what = said or [f"it has the shape {_shape(ours)}, and eager's {_shape(plain)}"]
    text = f"{name} of the program is not eager's: {'; '.join(what)}"
    return Difference(-1, k, worst, tolerance, text)


def _shape(value: Any) -> list[int] | None:
    return list(value.shape) if isinstance(value, torch.Tensor) else None


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
