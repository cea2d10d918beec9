"""Which scripted functions a program calls, and with what.

In: a program that runs inside of `collected()`. Out: a `Recorded` for each scripted function or module that
Python calls, with copies of the arguments of its first call (and of its first one under no_grad). Example:

    with collected() as calls:
        runpy.run_path("train.py")"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from .isolate import clones


@dataclass(frozen=True)
class Recorded:
    """A call: what, with copies of its arguments, and whether gradients were recorded."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    gradients: bool

    @property
    def name(self) -> str:
        return getattr(self.function, "original_name", None) or self.function.name

    def mode(self):
        """The gradient mode of the call, as a context."""
        return torch.set_grad_enabled(self.gradients)


@contextlib.contextmanager
def collected() -> Iterator[list[Recorded]]:
    """Collects within the block. A function that is called by a scripted one is part of that."""
    calls: dict[tuple[int, bool], Recorded] = {}
    kinds = (torch.jit.ScriptFunction, torch.jit.RecursiveScriptModule)
    before = [kind.__call__ for kind in kinds]

    def watched(call: Any) -> Any:
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            key = (id(self), torch.is_grad_enabled())
            if key not in calls and not torch.jit.is_tracing():
                given = clones([*args, *kwargs.values()])
                named = dict(zip(kwargs, given[len(args) :]))
                calls[key] = Recorded(self, tuple(given[: len(args)]), named, key[1])
            return call(self, *args, **kwargs)

        return run

    for kind, call in zip(kinds, before):
        kind.__call__ = watched(call)
    found: list[Recorded] = []
    try:
        yield found
    finally:
        for kind, call in zip(kinds, before):
            kind.__call__ = call
        found += calls.values()
