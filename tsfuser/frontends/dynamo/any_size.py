"""`tsfuser.compile`: torch.compile with one graph for all sizes.

In: a module or function. Out: what `torch.compile` makes of it, traced from the first call on with symbols in
place of sizes, so that another size needs no new graph. `dynamic=True` alone makes symbols of floats as well,
such as a scale that a module keeps; TorchDynamo finds out that it needs their values, and all is traced and
compiled again. Here the first call takes floats as constants. Example:

    model = tsfuser.compile(model)
    for batch in batches:          # of any sizes
        model(batch)
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch


def compile(
    model: Callable[..., Any] | None = None,
    *,
    fullgraph: bool = False,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Any:
    """`model`, a module or function, compiled for all sizes of its arguments at once: what
    `torch.compile(model, backend="tsfuser", dynamic=True)` returns, with floats as constants. `fullgraph`,
    `mode` and `options` are those of `torch.compile`; without a model it is a decorator.

    Take it where sizes vary from call to call: the first call traces for longer, and no later size is traced
    (docs/guide.md, "Sizes that vary", has figures). Where sizes are fixed, `torch.compile` traces faster.
    Sizes of 0 and 1 have graphs of their own, and another value of a float argument makes one more graph, for
    all later values. Dims that the program itself compares with a number, or those of parameters, stay fixed.
    Raises what `torch.compile` raises."""
    if model is None:
        return functools.partial(compile, fullgraph=fullgraph, mode=mode, options=options)
    chosen = None if options is None else dict(options)
    made = torch.compile(
        model, backend="tsfuser", dynamic=True, fullgraph=fullgraph, mode=mode, options=chosen
    )
    _add_hook(made)
    return made


def context_of(fn: Any) -> Any:
    """torch's record of how `fn` was compiled."""
    found = getattr(fn, "dynamo_ctx", None)
    if found is None:
        function = fn.__func__ if inspect.ismethod(fn) else fn
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or ()))
        found = cells["self"].cell_contents if "self" in cells else None
    if not callable(getattr(found, "callback", None)):
        raise TypeError("a function is wanted that torch.compile compiles: this one is excluded from it")
    return found


def take_over(context: Any, made: Any) -> None:
    """Compiles `made` in the same way as the compiled function that has this context."""
    if any(isinstance(hook, _FirstCall) for hook in context.enter_exit_hooks):
        _add_hook(made)


def _add_hook(made: Any) -> None:
    try:
        context = context_of(made)
    except TypeError:  # TorchDynamo does not compile it, as what torch.compiler.disable has returned
        return
    context.enter_exit_hooks.append(_FirstCall())


class _FirstCall:
    """What torch calls before each call of a compiled function; it calls the result behind that. In the first
    call floats are constants. A later call that traces has another float, or it would have a graph: then all
    become symbols, so that the next values need no graph."""

    def __init__(self) -> None:
        self.is_over = False

    def __call__(self) -> Callable[[], None]:
        if self.is_over:
            return _nothing
        self.is_over = True
        from torch._dynamo import config

        return config._make_closure_patcher(specialize_float=True)()


def _nothing() -> None:
    pass
