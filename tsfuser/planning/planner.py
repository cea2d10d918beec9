"""What C++ calls when no plan serves a call.

In: a group and the description of its arguments. Out: a native plan; a refusal or a failed compile gives a
plan that sends the class to the fallback, warned about once. Example: `plan(3, (("tensor", "float32",
"cuda:0", (4, 8), (8, 1), 256),))`.
"""

from __future__ import annotations

import traceback
from functools import partial

from .. import _C, log
from ..errors import CompileError, Refusal
from ..ir.call import Arg, Call, ListArg, OtherArg, ScalarArg, TensorArg
from ..ir.fusion import Fusion
from ..target import counters
from . import ahead, background, batched, interrupts
from .compile import Lowered, compile_fusion, finish, lower_fusion, start
from .parse import parse
from .plan import Plan, native, refused
from .stored_plans import shelf_of


def plan(group_id: int, args: tuple, varies: bool) -> _C.Plan | None:
    """The native plan of group `group_id` for calls like this one; `varies`: the group has met others, which
    differed in sizes, strides or values of numbers. None where it is made in the background, and not there
    yet. Raises nothing but `Interrupted`: what goes wrong becomes the plan's refusal."""
    call = Call(tuple(map(describe, args)), varies=varies)
    if background.is_wanted(group_id) and background.is_pending(group_id, call):
        return None
    try:
        device = group_device(call)
        arguments = "\n".join(map(str, call.args))
        log.write("manager", f"group {group_id} gets a plan for a class of calls", arguments)
        log.write("kernel_cache", f"planning group {group_id} for", arguments, log.UPDATE)
        result = _planned(group_id, call, device)
        if result is None:
            return None
    except (Refusal, CompileError) as error:
        result = refused(call, str(error))
    except Exception as error:  # a mistake of ours must not break the user's program
        interrupts.pass_on(error)
        log.write("kernel_cache", f"planning group {group_id} failed", traceback.format_exc())
        result = refused(call, f"tsfuser failed to plan it ({type(error).__name__}: {error})")
    return native(result)


def _planned(group_id: int, call: Call, device: str) -> Plan | None:
    """The plan: prepared ahead, from disk, or made now; None where that is not done yet. Raises
    Refusal or CompileError."""
    is_batched = batched.is_expected(group_id)
    shelf = shelf_of(group_id, call, device, is_batched)
    lowered = ahead.take(group_id, call)
    if lowered is not None:
        result = finish(lowered)
        shelf = shelf if lowered.call.varies == call.varies else None
    else:
        found = shelf.find(call) if shelf else None
        if found:
            counters.count("plans_read")
            return found
        if background.is_wanted(group_id):
            lowered = background.lowered(
                group_id, call, partial(_lowered, group_id, call, device, is_batched)
            )
            if lowered is None:
                return None
            result = finish(lowered)
        else:
            result = compile_fusion(call, _fusion(group_id, call, device), device, is_batched)
    if shelf:
        shelf.keep(result)
    return result


def prepare(group_id: int, args: tuple[Arg, ...]) -> None:
    """Has the kernels of a group that is going to be called with such arguments compiled in the background,
    and returns. What goes wrong is left to that call."""
    call = Call(args)
    if ahead.knows(group_id, call):
        return
    try:
        device = group_device(call)
        is_batched = batched.is_expected(group_id)
        shelf = shelf_of(group_id, call, device, is_batched)
        if shelf and shelf.find(call):
            return
        if background.is_wanted(group_id):
            background.start(group_id, call, partial(_lowered, group_id, call, device, is_batched))
            return
        lowered = _lowered(group_id, call, device, is_batched)
        start(lowered)
        ahead.keep(group_id, call, lowered)
    except Exception as error:
        interrupts.pass_on(error)
        log.write("kernel_cache", f"group {group_id} was not planned ahead", error, log.UPDATE)


def _lowered(group_id: int, call: Call, device: str, is_batched: bool) -> Lowered:
    """The group's kernels for such calls. Raises Refusal."""
    return lower_fusion(call, _fusion(group_id, call, device), device, is_batched)


def _fusion(group_id: int, call: Call, device: str) -> Fusion:
    """What the group computes for such calls. Raises Refusal."""
    fusion = parse(_C.group_graph(group_id), call, device)
    if log.enabled("parser"):
        log.write("parser", f"group {group_id}", f"{_C.group_graph(group_id)}is\n{fusion}")
    return fusion


def describe(arg: tuple) -> Arg:
    """C++'s description of an argument as an `ir.call` record."""
    kind, *rest = arg
    if kind == "tensor":
        dtype, device, sizes, strides, alignment = rest
        return TensorArg(dtype, device, tuple(sizes), tuple(strides), alignment)
    if kind == "scalar":
        return ScalarArg(*rest)
    if kind == "list":
        return ListArg(rest[0], tuple(rest[1]))
    return OtherArg(rest[0])


def group_device(call: Call) -> str:
    """The device that all tensors share; 0-dim CPU tensors count only among themselves. Raises Refusal."""
    tensors = [a for a in call.args if isinstance(a, TensorArg)]
    devices = {a.device for a in tensors if a.device != "cpu" or a.rank > 0}
    if len(devices) > 1:
        raise Refusal(f"its tensors are on {' and '.join(sorted(devices))}")
    return devices.pop() if devices else "cpu"
