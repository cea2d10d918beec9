"""Which functions a program calls that are scripted, or compiled with `backend="tsfuser"`, and with what.

In: a program that runs inside of `collected()`. Out: a `Recorded` for each such function or module that
Python calls, with copies of the arguments of its first call (and of its first one under no_grad). Example:

    with collected() as calls:
        runpy.run_path("train.py")"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from .isolate import clones
from .isolate_compiled import compiled, name_of


@dataclass(frozen=True)
class Recorded:
    """A call: what, with copies of its arguments, and whether gradients were recorded."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    gradients: bool

    @property
    def name(self) -> str:
        if compiled(self.function) is not None:
            return name_of(self.function)
        return getattr(self.function, "original_name", None) or self.function.name

    def mode(self):
        """The gradient mode of the call, as a context."""
        return torch.set_grad_enabled(self.gradients)


@contextlib.contextmanager
def collected() -> Iterator[list[Recorded]]:
    """Collects within the block. A function that is called by a scripted one is part of that."""
    calls: dict[tuple[int, bool], Recorded] = {}
    kinds = (torch.jit.ScriptFunction, torch.jit.RecursiveScriptModule)
    before, compile_it = [kind.__call__ for kind in kinds], torch.compile

    def record(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        key = (id(function), torch.is_grad_enabled())
        if key not in calls and not torch.jit.is_tracing() and not torch.compiler.is_compiling():
            given = clones([*args, *kwargs.values()])
            named = dict(zip(kwargs, given[len(args) :]))
            calls[key] = Recorded(function, tuple(given[: len(args)]), named, key[1])

    def watched(call: Any) -> Any:
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            record(self, args, kwargs)
            return call(self, *args, **kwargs)

        return run

    def watched_compile(model: Any = None, **choices: Any) -> Any:
        if model is None:
            return lambda function: watched_compile(function, **choices)
        made = compile_it(model, **choices)
        return _told(made, record) if choices.get("backend") == "tsfuser" else made

    torch.compile = watched_compile
    for kind, call in zip(kinds, before):
        kind.__call__ = watched(call)
    found: list[Recorded] = []
    try:
        yield found
    finally:
        torch.compile = compile_it
        for kind, call in zip(kinds, before):
            kind.__call__ = call
        found += calls.values()


def _told(made: Any, record: Callable[..., None]) -> Any:
    """What torch.compile returned, which tells `record` of each call."""
    if isinstance(made, torch.nn.Module):
        made.register_forward_pre_hook(
            lambda module, args, kwargs: record(module, args, kwargs), with_kwargs=True
        )
        return made

    @functools.wraps(made)
    def run(*args: Any, **kwargs: Any) -> Any:
        record(made, args, kwargs)
        return made(*args, **kwargs)

    return run
