"""The scripted modules that are being called, for passes that ask what a module has.

In: nothing; the frames of this thread are looked at. Out: modules as torch's C++ code has them, innermost
first. Example: in `with tsfuser.fuser(): torch.jit.script(net)(x)`, that of `net`. A graph names only the
type of its module, which says nothing of a parameter that may be None."""

from __future__ import annotations

import sys
from types import FrameType

import torch


def called_modules() -> list[torch._C.ScriptModule]:
    """Those whose methods are on this thread's stack; a module that is called twice is there twice."""
    found = []
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, torch.jit.ScriptModule) and "_c" in vars(owner):
            found.append(owner._c)
        frame = frame.f_back
    return found
