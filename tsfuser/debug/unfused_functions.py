"""Functions that torch optimised while fusion was off. It optimises a function once, so they stay unfused.

In: what C++ notes of graphs that are optimised without groups. Out: `names()` for `tsfuser.stats()`, and one
warning for each function when fusion is switched on. Example:

    names()  # {"Block.forward (model.py:12)": 2}: torch has two graphs of it
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextvars import ContextVar

import torch

from .. import _C
from ..errors import warn
from ..graph.wrapper import all_blocks

_MOST_NAMES = 5  # in a warning

_lock = threading.Lock()
_told: set[str] = set()  # registry: functions that the user was warned of
_seen = 0  # graphs that C++ had noted when the user was last warned
_names: dict[tuple[str, int], str] = {}  # registry: line of the program -> the function that it is in
_quiet: ContextVar[bool] = ContextVar("quiet", default=False)


def names() -> dict[str, int]:
    """Function -> its graphs."""
    found: Counter[str] = Counter()
    for type, function, file, line in _C.unfused_functions():
        name = _scripted_at(file, line) or ".".join(filter(None, (type, function))) or "a traced function"
        found[f"{name} ({os.path.basename(file)}:{line})" if file else name] += 1
    return dict(found)


def _scripted_at(file: str, line: int) -> str:
    """The function, with its module and class, that was scripted of a line; "" where none was. A graph does
    not say it: that of a differentiable part does not even have the module."""
    if (file, line) not in _names:
        for function in torch.jit._state._python_cu.get_functions():
            name = re.sub(r"^__torch__\.|___torch_mangle_\d+\.", "", function.qualified_name)
            for node in (node for block in all_blocks(function.graph) for node in block.nodes()):
                _names.update({frame[:2]: name for frame in _C.frames(node)[:1]})
    return _names.setdefault((file, line), "")


@contextlib.contextmanager
def unwarned() -> Iterator[None]:
    """Fusion is switched on for a copy within the block: `explain` and `check` say themselves what is true of
    the function."""
    token = _quiet.set(True)
    try:
        yield
    finally:
        _quiet.reset(token)


def warn_of_late_switch() -> None:
    """Called when fusion is switched on: warns of the functions that it comes too late for."""
    global _seen
    if _quiet.get() or (total := _C.unfused_total()) == _seen:
        return
    with _lock:
        _seen = total
        late = [name for name in names() if name not in _told]
        _told.update(late)
    if late:
        more = f" and {len(late) - _MOST_NAMES} more" if len(late) > _MOST_NAMES else ""
        warn(
            f"fusion is switched on too late for {', '.join(late[:_MOST_NAMES])}{more}: torch optimised what "
            "was called before, keeps what it made, and runs it unfused. Switch fusion on before the first "
            "calls, or have torch forget what it made: call _debug_flush_compilation_cache() of the "
            "function, or of a module's forward"
        )
