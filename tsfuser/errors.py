"""The errors and warnings of tsfuser.

In: a reason, as a sentence. Out: exceptions that carry it unchanged to `explain`, to warnings and to the
user; warnings at a line of the program. Example: `warn("compiled kernels are not kept")`.
"""

from __future__ import annotations

import os
import sys
import warnings
from types import FrameType


class Refusal(Exception):
    """Something that tsfuser does not fuse, with the reason as a sentence. Never reaches the user as an
    exception unless fallback is disabled."""


class CompileError(RuntimeError):
    """A generated kernel did not compile; the message has the compiler's output and the source's path."""


class TsfuserWarning(UserWarning):
    """A group runs unfused, or a pass gave up on a graph; the program's result is right all the same."""


class PassFailed(TsfuserWarning):
    """A pass of tsfuser gave up on a graph, by a mistake of tsfuser's."""


#: Modules whose lines are never the program's, though they are on the stack between it and a warning.
_MACHINERY = ("tsfuser", "torch", "thunder", "importlib", "contextlib", "runpy", "threading", "concurrent")


def warn(text: str, category: type[Warning] = TsfuserWarning, file: str = "", line: int = 0) -> None:
    """Warns at `line` of `file`, if there is such a file, else at the innermost line of the program that is
    on the stack."""
    if file and os.path.isfile(file):
        warnings.warn_explicit(text, category, file, line)
        return
    frame = _frame_of_program(sys._getframe(1))
    names = frame.f_globals
    warnings.warn_explicit(
        text,
        category,
        frame.f_code.co_filename,
        frame.f_lineno,
        module=names.get("__name__") or "<unknown>",
        registry=names.setdefault("__warningregistry__", {}),
    )


def _frame_of_program(frame: FrameType) -> FrameType:
    """`frame`, or the first that has called it and is the program's; the outermost where none is, as on a
    thread of torch's backward."""
    while frame.f_back is not None and _is_machinery(frame):
        frame = frame.f_back
    return frame


def _is_machinery(frame: FrameType) -> bool:
    return (frame.f_globals.get("__name__") or "").partition(".")[0] in _MACHINERY
