"""nvFuser's switches on `torch._C`, working again.

In: calls that programs written for nvFuser make (`torch._C._jit_set_nvfuser_enabled(True)`,
`torch.jit.fuser("fuser2")`). Out: `options.state`, and the two flags that C++ reads on every call. torch
still has the functions, but they only warn and return None; `install` puts ours in their place. Example:
`_jit_set_nvfuser_guard_mode(False)` returns True, the state before.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from . import _C, options
from .debug import observe, unfused_functions
from .graph.kinds import known_kind
from .planning.compile import expect_cuda

_state = options.state
_lock = threading.Lock()
_comparison: list[observe.Listener] = []  # registry: the comparison callback, if one is set


def _apply() -> None:
    """Tell C++ the state."""
    _C.set_enabled(options.fusion_enabled())
    _C.set_guard_mode(_state.guard_mode)
    _C.ask_about_all(options.fusion_enabled() and not torch._C._jit_texpr_fuser_enabled())
    if options.fusion_enabled():
        expect_cuda()


#: What a user means who sets a switch to a text.
_MEANT = {
    **dict.fromkeys(("true", "on", "yes", "1", "enable", "enabled"), True),
    **dict.fromkeys(("false", "off", "no", "0", "disable", "disabled", "none", ""), False),
}


def _switch(value: Any) -> bool:
    """What a switch is set to. None counts as False: `torch.jit.fuser` may pass the None that torch's stub
    returned before tsfuser was imported. As in torch's own switches, numbers count as they do in Python, and
    what has only a length, as a text has, is a TypeError: "off" would be true."""
    if value is not None and not hasattr(type(value), "__bool__"):
        meant = _MEANT.get(value.strip().lower()) if isinstance(value, str) else None
        like = "" if meant is None else f"; did you mean {meant}?"
        raise TypeError(f"a switch is True or False, not the {type(value).__name__} {value!r}{like}")
    return bool(value)


def _swap(name: str, value: Any) -> bool:
    """Set one flag of the state and return its previous value."""
    new = _switch(value)
    with _lock:
        before = getattr(_state, name)
        setattr(_state, name, new)
        _apply()
    return before


_set_texpr_fuser_enabled = torch._C._jit_set_texpr_fuser_enabled


def set_texpr_fuser_enabled(value: bool) -> None:
    """torch's own switch of NNC. While NNC is off, torch asks about more ops when it profiles
    (csrc_stubs/torchscript/hooks.cpp), which would confuse NNC."""
    with _lock:
        if value:
            _C.ask_about_all(False)
        _set_texpr_fuser_enabled(value)
        _apply()


def can_be_enabled() -> bool:
    """Whether the profiling executor is on; without it no pass sees profiled types."""
    profiling = torch._C._jit_set_profiling_executor(True)  # there is no getter: set, and set back
    torch._C._jit_set_profiling_executor(profiling)
    return profiling and torch._C._get_graph_executor_optimize()


def set_enabled(value: bool) -> bool:
    """Switch fusion on or off; return whether it was on. RuntimeError if it cannot be switched on."""
    before = enabled()
    if _switch(value) and not can_be_enabled():
        raise RuntimeError("fusion needs TorchScript's profiling executor, and that is switched off")
    _swap("enabled", value)
    if enabled() and not before:
        unfused_functions.warn_of_late_switch()
    return before


def enabled() -> bool:
    """Whether scripted functions that torch optimises from now on are fused."""
    return options.fusion_enabled()


def set_single_node_mode(value: bool) -> bool:
    """Whether a single node may be a group; default False. Return the previous value."""
    return _swap("single_node_mode", value)


def set_horizontal_mode(value: bool) -> bool:
    """Whether nodes that only share an input may join one group; default True. Return the previous value."""
    return _swap("horizontal_mode", value)


def set_guard_mode(value: bool) -> bool:
    """False: guards accept every call, and a group makes a plan for each new class of calls; default True.
    Return the previous value."""
    return _swap("guard_mode", value)


def single_node_mode() -> bool:
    """The value that `_jit_set_nvfuser_single_node_mode` has set."""
    return _state.single_node_mode


def horizontal_mode() -> bool:
    """The value that `_jit_set_nvfuser_horizontal_mode` has set."""
    return _state.horizontal_mode


def set_skip_node_kind(kind: str, flip: bool) -> bool:
    """Return whether nodes of `kind` ("aten::add") are kept out of groups; `flip` then changes that.
    nvFuser's names of views ("prim::view_copy") stand for torch's. ValueError for a kind that torch does not
    know."""
    kind = known_kind(kind)
    flips = _switch(flip)
    with _lock:
        skipped = kind in _state.skip_kinds
        if flips:
            _state.skip_kinds ^= {kind}
    return skipped


def set_comparison_callback(run_fallback: bool, callback: Callable) -> None:
    """From now on call `callback(fused outputs, unfused outputs, graph text)` after each group that ran
    fused; a callback set before is replaced. With `run_fallback` the group's nodes run, too, on copies of the
    arguments and from the same random state; without it the unfused outputs are []. An exception of the
    callback reaches the caller of the scripted function as RuntimeError. TypeError if `callback` cannot be
    called."""
    if not callable(callback):
        raise TypeError(
            f"the comparison callback is a {type(callback).__name__}, which cannot be called; a function "
            "is wanted: callback(fused outputs, unfused outputs, graph text)"
        )
    with_unfused = _switch(run_fallback)

    def tell(run: observe.Run) -> None:
        if not run.reason:
            graph = str(_C.group_graph(run.group))
            callback(list(run.results), list(run.unfused) if with_unfused else [], graph)

    clear_comparison_callback()
    _comparison.append(observe.add(tell, unfused=with_unfused))


def clear_comparison_callback() -> None:
    """Remove the callback of `_jit_nvfuser_set_comparison_callback`, if one is set."""
    while _comparison:
        observe.remove(_comparison.pop())


#: torch's name -> what stands in for it.
FUNCTIONS: dict[str, Callable] = {
    "_jit_set_nvfuser_enabled": set_enabled,
    "_jit_nvfuser_enabled": enabled,
    "_jit_nvfuser_can_be_enabled": can_be_enabled,
    "_jit_set_nvfuser_single_node_mode": set_single_node_mode,
    "_jit_nvfuser_single_node_mode": single_node_mode,
    "_jit_set_nvfuser_horizontal_mode": set_horizontal_mode,
    "_jit_nvfuser_horizontal_mode": horizontal_mode,
    "_jit_set_nvfuser_guard_mode": set_guard_mode,
    "_jit_set_nvfuser_skip_node_kind": set_skip_node_kind,
    "_jit_nvfuser_set_comparison_callback": set_comparison_callback,
    "_jit_nvfuser_clear_comparison_callback": clear_comparison_callback,
}


def install() -> None:
    """Replace torch's stubs, and tell C++ the state that the environment asks for."""
    for name, function in FUNCTIONS.items():
        setattr(torch._C, name, function)
    torch._C._jit_set_texpr_fuser_enabled = set_texpr_fuser_enabled
    _apply()


def enable(background: bool | None = None) -> None:
    """Switch fusion on everywhere, and torch's other fusers off, until `disable()`. `background`: if True, no
    call waits for compilers, but runs unfused until its kernels are there; if False, calls wait; None leaves
    it as it is."""
    if background is not None:
        _state.background = _switch(background)
    torch._C._jit_override_can_fuse_on_cpu(False)
    torch._C._jit_override_can_fuse_on_gpu(False)
    torch._C._jit_set_texpr_fuser_enabled(False)
    set_enabled(True)


def disable() -> None:
    """Switch fusion off. Functions that torch has optimised already keep their groups, as with nvFuser.
    torch's other fusers stay off."""
    set_enabled(False)


@contextlib.contextmanager
def fuser(background: bool | None = None) -> Iterator[None]:
    """The same as `torch.jit.fuser("fuser2")`: a context with fusion on and torch's other fusers off. At its
    end all switches are restored. `background` as of `enable`: functions that are optimised in the context
    keep it."""
    before = _state.background
    if background is not None:
        _state.background = _switch(background)
    try:
        with torch.jit.fuser("fuser2"):
            yield
    finally:
        _state.background = before
