"""What happens where a pass of ours raises: the program goes on with the graph as it was before.

In: the exception, and what was kept: graphs that are unchanged, or copies. Out: one warning for each failure,
with the pass and a line of the program, and a count of it in `stats()`. Example:

    try:
        run(work, PASSES)
    except Exception as error:
        failures.gave_up("the graph pass", error, failures.line_of(graph))
        return graph

C++ reports failures of its passes here, too (csrc_stubs/group/failures.h). Four things are raised
nevertheless: Ctrl-C, what a signal handler of the program raises (`interrupts`), out of memory, and all
failures where `PYTORCH_NVFUSER_DISABLE=fallback` is set.
"""

from __future__ import annotations

import threading
import traceback
from collections import Counter
from pathlib import Path

import torch

from .. import _C, log, options
from ..errors import PassFailed, warn
from . import interrupts

MOST_REASONS = 1024
_PACKAGE = Path(__file__).parents[1]

_lock = threading.Lock()
_counts: Counter[str] = Counter()  # registry: failure -> how often since the import or the last reset
_warned: set[str] = set()  # registry: warnings that were given
#: How many there were since the import; tests fail where it rises.
total = 0


def gave_up(name: str, error: Exception, line: str) -> str:
    """Reports that `name`, or a pass in it, has raised `error` for the program at `line`, if that is known.
    Returns the failure as a text. Raises what has to reach the program."""
    interrupts.pass_on(error)
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or not options.fallback_enabled():
        raise error
    name = getattr(error, "failed_pass", None) or _called(error) or name
    text = f"{type(error).__name__}: {error}".rstrip(": ")
    report(name, text, line)
    return f"{name}: {_first_line(text)}"


def report(name: str, text: str, line: str) -> None:
    """Counts and warns; C++ calls it."""
    global total
    key = f"{name}: {_first_line(text)}"
    with _lock:
        total += 1
        _counts[key if key in _counts or len(_counts) < MOST_REASONS else "other failures"] += 1
    log.write("graph_fuser", f"The pass {name} failed", text)
    place = f" of the program at {line}" if line else ""
    message = f"tsfuser's pass {name} gave up on a graph{place}, which runs unfused ({_first_line(text)})"
    with _lock:
        if message in _warned or len(_warned) >= MOST_REASONS:
            return
        _warned.add(message)
    file, _, number = line.rpartition(":")
    warn(f"{message}; please report it", PassFailed, file, int(number) if number.isdigit() else 0)


def snapshot() -> dict[str, dict[str, int]]:
    """`passes_failed`: failure -> how often."""
    with _lock:
        return {"passes_failed": dict(_counts)}


def reset() -> None:
    """Sets the counts to 0."""
    with _lock:
        _counts.clear()


def forget_warnings() -> None:
    """Each failure is warned of once more."""
    with _lock:
        _warned.clear()


def line_of(graph: torch._C.Graph) -> str:
    """A line of the program that the graph is of, as "file:line"; "" where no node has one."""
    for node in _C.all_nodes(graph):
        frames = _C.frames(node)
        if frames:
            file, line, _, _ = frames[-1]
            return f"{file}:{line}"
    return ""


def _called(error: Exception) -> str | None:
    """The function of ours that raised, or called what did: the outermost one that is in another file than
    the function which has caught the error. As "norms.expand"."""
    frames = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    for code in frames:
        path = Path(code.co_filename)
        if code.co_filename != frames[0].co_filename and path.is_relative_to(_PACKAGE):
            return f"{path.stem}.{code.co_name}"
    return None


def _first_line(text: str) -> str:
    return text.split("\n", 1)[0]
