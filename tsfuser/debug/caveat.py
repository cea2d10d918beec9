"""Whether the findings of `explain` and `check` about a copy are true of the function itself.

They run a copy, which torch optimises anew. The function itself keeps what torch made of it in its first
calls, and all modules of one class share that: where fusion was off then, it stays unfused. In: the copy,
once it has run. Out: a sentence, "" where the copy speaks for the function. Example:

    caveat(isolated, fused=True)  # -> "block itself runs unfused: torch optimised it when fusion was off..."
"""

from __future__ import annotations

import threading

from .. import _C
from ..errors import warn
from .isolate import IsolatedScript
from .plans import plans_of

_lock = threading.Lock()
_told: set[int] = set()  # registry: hashes of the warnings that were given


def caveat(isolated: IsolatedScript, fused: bool) -> str:
    """`fused`: whether groups of the copy ran fused. Warns as well, once a function."""
    if not fused or _C.optimised(isolated.method, _trains(isolated)) != "unfused":
        return ""
    owned = hasattr(isolated.method, "owner")
    everywhere = ", for all modules of this class" if owned else ""
    said = (
        f"{isolated.name} itself runs unfused: torch optimised it when fusion was off, or for arguments of "
        f"which nothing could be fused, and keeps what it made{everywhere}. Switch fusion on before its "
        "first call, or have torch forget what it made: call "
        f"{f'{isolated.method.name}.' if owned else ''}_debug_flush_compilation_cache() of it"
    )
    key = hash((said, str(isolated.graph)))
    with _lock:
        new = key not in _told
        _told.add(key)
    if new:
        warn(said)
    return said


def _trains(isolated: IsolatedScript) -> bool:
    """Whether autodiff has a part in the call, or joint graphs."""
    plans = list(plans_of(isolated.function.get_debug_state()))
    return any(
        plan.graph.findAllNodes("prim::DifferentiableGraph", True) or _C.joint_graphs(plan.code)
        for plan in plans
    )
