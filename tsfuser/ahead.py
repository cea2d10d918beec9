"""`tsfuser.warm`: kernels of a program before its first call.

In: a scripted or compiled function, and examples of its arguments. Out: plans and kernels for these, in this
process and on disk; the function itself has not run. Example:

    tsfuser.warm(model, (torch.empty(8, 128),), (torch.empty(32, 128),))
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch

from .debug.explain import CALLS
from .debug.isolate import Isolated, isolate
from .debug.isolate_compiled import compiled, isolate_compiled
from .debug.unfused_functions import unwarned


def warm(function: Any, *examples: tuple[Any, ...] | Mapping[str, Any], training: bool = False) -> None:
    """Plans and compiles kernels for calls like `examples`, each a tuple of arguments or a dict of keywords;
    with `training` for their backward, too. `function`: a scripted function, module or method, or what
    `torch.compile(..., backend="tsfuser")` has returned. Copies of it run a few times, on copies of the
    arguments, so their memory is needed twice. Its parameters, buffers, gradients and counts of calls stay as
    they are, and so do torch's random generators. Its own first calls then compile no kernel, nor do those of
    other processes with the same cache; they trace and optimise its graphs, as always. Raises TypeError for
    what is no example and for another function, and what the function raises."""
    if not examples:
        raise TypeError("warm wants an example of the arguments at least: tsfuser.warm(function, (x,))")
    for example in examples:
        if not isinstance(example, (tuple, Mapping)):
            said = type(example).__name__
            raise TypeError(
                f"an example is a tuple of arguments, or a dict of keywords, not {said}: "
                "write tsfuser.warm(function, (x,)) for a function of one argument"
            )
    for example in examples:
        args, kwargs = ((), dict(example)) if isinstance(example, Mapping) else (example, {})
        with _copied(function, args, kwargs) as copy:
            for _ in range(CALLS):
                if training:
                    copy.step()
                else:
                    with torch.no_grad():
                        copy.call(copy.arguments())


@contextlib.contextmanager
def _copied(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    by_torch = compiled(function)
    of_copy: contextlib.AbstractContextManager[Isolated]
    of_copy = (
        isolate(function, args, kwargs) if by_torch is None else isolate_compiled(by_torch, args, kwargs)
    )
    with of_copy as copy, unwarned(), torch.jit.fuser("fuser2"):
        yield copy
