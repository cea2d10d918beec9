"""Whether torch runs a compiled function in eager mode, as it has compiled it for too many kinds of calls.

`explain` and `check` compile a copy, which has no graphs yet. In: what torch.compile returned, and the
arguments of a call. Out: a sentence, "" where the copy speaks for the function. Example:

    beyond_limit(fn, (x, 9), {})  # "block itself runs this call in eager mode: torch has compiled 8..."
"""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ..frontends.dynamo.any_size import context_of
from .isolate_compiled import TORCH_COMPILE, name_of, original_of

_WHAT_TO_DO = (
    "TORCH_LOGS=recompiles says what differs from call to call; with dynamic=True or "
    "torch._dynamo.mark_dynamic one graph serves all sizes. Or raise torch._dynamo.config.recompile_limit, "
    "and call torch._dynamo.reset()"
)


def beyond_limit(fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """To be asked before a copy is compiled."""
    limit, first = _limit(context_of(fn).callback), _first_frame(fn)
    if not isinstance(first, (types.FunctionType, types.MethodType)):
        return ""
    entries = _entries(first.__code__)
    if len(entries) >= limit:
        given = _locals(first, args, kwargs)
        wanted = [_mismatch(entry, given) for entry in entries]
        if all(wanted):
            return (
                f"{name_of(fn)} itself runs this call in eager mode: torch has compiled {len(entries)} "
                "graphs of it and compiles no more, and none of them serves this call (the last one: "
                f"{wanted[0]}). {_WHAT_TO_DO}"
            )
    for code in _later_frames(fn, first.__code__):
        if (count := len(_entries(code))) >= limit:
            return (
                f"{name_of(fn)} itself may run in eager mode in part: torch has compiled {count} graphs of "
                f"{code.co_name} ({code.co_filename}:{code.co_firstlineno}) and compiles no more. Calls that "
                f"none of them serves run in eager mode. {_WHAT_TO_DO}"
            )
    return ""


def _limit(callback: Any) -> int:
    """How many graphs torch compiles of one function; torch.compile may have been given another number."""
    from torch._dynamo import config

    while callback is not None and not hasattr(callback, "_recompile_limit"):
        callback = getattr(callback, "_torchdynamo_orig_backend", None)
    own = getattr(callback, "_recompile_limit", None)
    return min(own or config.recompile_limit, config.accumulated_recompile_limit)


def _entries(code: types.CodeType) -> list[Any]:
    """What torch has compiled of a function, the last graph that served a call first."""
    return torch._C._dynamo.eval_frame._debug_get_cache_entry_list(code)


def _first_frame(fn: Any) -> Any:
    """The function whose frame torch compiles first when `fn` is called."""
    found = getattr(fn.forward if hasattr(fn, "_orig_mod") else fn, TORCH_COMPILE)
    owner = getattr(found, "__self__", getattr(fn, "__self__", None))
    if isinstance(owner, torch.nn.Module):
        return owner.forward if getattr(found, "__name__", "").endswith("call_impl") else found
    return found


def _locals(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The variables of the function's frame when it begins."""
    function, bound = getattr(function, "__func__", function), getattr(function, "__self__", None)
    own = () if bound is None else (bound,)
    given = inspect.signature(function, follow_wrapped=False).bind(*own, *args, **kwargs)
    given.apply_defaults()
    cells = zip(function.__code__.co_freevars, function.__closure__ or ())
    outer = {name: cell.cell_contents for name, cell in cells if cell != types.CellType()}
    return {**outer, **given.arguments}


def _mismatch(entry: Any, values: Mapping[str, Any]) -> str:
    """Why a graph does not serve a call, as torch says it; "" where it does."""
    found = entry.guard_manager.check_verbose(values)
    if found.result:
        return ""
    said = next(iter(found.verbose_code_parts), "its guards fail")
    return re.sub(r"L\['(\w+)'\]", r"\1", said.partition("#")[0].strip())


def _later_frames(fn: Any, first: types.CodeType) -> Iterator[types.CodeType]:
    """What torch may compile by itself in a call: what follows a graph break, and forwards of modules."""
    from torch._dynamo.resume_execution import ContinueExecutionCache

    original = original_of(fn)
    owner = getattr(original, "__self__", original)
    modules = owner.modules() if isinstance(owner, torch.nn.Module) else ()
    forwards = (getattr(module.forward, "__code__", None) for module in modules)
    waiting = [first, *dict.fromkeys(code for code in forwards if code is not None and code != first)]
    while waiting:
        code = waiting.pop(0)
        if code is not first:
            yield code
        if code in ContinueExecutionCache.cache:
            waiting += ContinueExecutionCache.cache[code].values()
