"""Ctrl-C, and other signals of the program, while a plan is made.

C++ keeps SIGINT from raising KeyboardInterrupt in the planner: it could come inside a `__del__`, where Python
drops it (csrc_stubs/group/interrupts.h). So the planner calls `check()` between its steps. In: whether the
signal came. Out: `Interrupted`, which ends the planning: the call runs unfused, KeyboardInterrupt is raised
in the caller as it returns, and the next call plans anew.
"""

from __future__ import annotations

import signal

from .. import _C


class Interrupted(BaseException):
    """Ends the planning at hand; C++ raises `cause`, if any, in the caller. Not an Exception: nothing on its
    way may take it for a failure."""

    def __init__(self, cause: BaseException | None = None):
        self.cause = cause


def check() -> None:
    """Raises `Interrupted` if Ctrl-C was pressed since C++ asked this thread for a plan."""
    if _C.interrupted():
        raise Interrupted


def pass_on(error: Exception) -> None:
    """Raises `Interrupted(error)` if a signal handler of the program raised `error` (a time limit by SIGALRM,
    say), and our code happened to run."""
    handlers = {getattr(signal.getsignal(number), "__code__", None) for number in signal.valid_signals()} - {
        None
    }
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in handlers:
            raise Interrupted(error)
        trace = trace.tb_next
