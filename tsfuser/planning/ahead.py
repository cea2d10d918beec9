"""Groups that have not run yet: what the planner has made of them ahead of their first call.

In: a group, the arguments that its first call is expected to have, and the kernels' sources for such calls.
Out: the same, once a call of that class comes. Another call is planned from the beginning, as always: a wrong
guess costs a compile. Example:

    keep(3, Call((TensorArg("float32", "cpu", (4, 8), (8, 1), 64),)), lowered)
    take(3, call)  # `lowered`, or None: not of the expected class
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .. import options
from ..ir import size as sz
from ..ir.call import Arg, Call, ListArg, OtherArg, ScalarArg, TensorArg
from .compile import Lowered

_MOST = 16  # classes of one group that are remembered


@dataclass
class _Expected:
    """A class of calls. `lowered`: until it is taken."""

    call: Call
    settings: tuple
    lowered: Lowered | None

    def serves(self, call: Call) -> bool:
        """Whether the call is of this class, as C++ will ask of the plan."""
        return self.settings == settings() and serves(self.call, call)


_expected: dict[int, list[_Expected]] = {}  # registry: by group


def knows(group_id: int, call: Call) -> bool:
    """Whether calls of this class were expected before; or the group has had enough."""
    known = _expected.get(group_id, [])
    return len(known) >= _MOST or any(expected.serves(call) for expected in known)


def keep(group_id: int, call: Call, lowered: Lowered) -> None:
    """Keeps `lowered` for calls like this one."""
    _expected.setdefault(group_id, []).append(_Expected(call, settings(), lowered))


def take(group_id: int, call: Call) -> Lowered | None:
    """What was kept for calls like this one, once."""
    for expected in _expected.get(group_id, ()):
        if expected.lowered is not None and expected.serves(call):
            lowered, expected.lowered = expected.lowered, None
            return lowered
    return None


def forget() -> None:
    """Drops all, as `reset` does with plans."""
    _expected.clear()


def serves(planned: Call, call: Call) -> bool:
    """Whether the plan for one call serves the other."""
    memo: dict[sz.Size, int] = {}
    decided = planned.decisions.items()
    return structure(planned) == structure(call) and all(
        sz.evaluate(size, call.leaves, memo) == value for size, value in decided
    )


def structure(call: Call) -> list[tuple]:
    """What calls of one class share, apart from decisions."""
    return [_kind(arg) for arg in call.args]


def _kind(arg: Arg) -> tuple:
    if isinstance(arg, TensorArg):
        return ("tensor", arg.dtype, arg.device, arg.rank)
    if isinstance(arg, ScalarArg):
        return ("scalar", arg.kind)
    if isinstance(arg, ListArg):
        return ("list", arg.kind, len(arg.values))
    assert isinstance(arg, OtherArg)
    return ("other", arg.value)


def settings() -> tuple:
    """What else a plan is made for."""
    return torch.get_default_dtype(), options.host_launch()
