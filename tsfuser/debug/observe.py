"""Who looks at groups while they run: comparison callbacks, `check`, `explain`, `dump_eff_bandwidth`.

In: listeners, each a function of one `Run`. Out: each is called after every run of a group, from whatever
thread runs it. While there is none, groups pay nothing. Example:

    with observing(lambda run: print(run.group, run.reason or "fused")):
        scripted(x)
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from .. import _C


class Timing(NamedTuple):
    """One launch. `bytes`: of the tensors that the kernel reads and writes, each once, expanded dims not
    counted."""

    kernel: str
    seconds: float
    bytes: int
    grid: int
    block_x: int
    block_y: int
    shared: int


@dataclass(frozen=True)
class Run:
    """One run of a group: `reason` is why it went unfused, "" if it did not. `unfused` holds what the nodes
    give one by one, from the same arguments and the same random state, `launches` the times, both only where
    some listener asks for them. `arguments` are copies made before the run where `unfused` is asked for."""

    group: int
    reason: str
    arguments: tuple[Any, ...]
    results: tuple[Any, ...]
    unfused: tuple[Any, ...]
    launches: tuple[Timing, ...]


class Listener(NamedTuple):
    tell: Callable[[Run], None]
    unfused: bool
    timed: bool


_lock = threading.Lock()
_listeners: list[Listener] = []  # registry


def add(tell: Callable[[Run], None], unfused: bool = False, timed: bool = False) -> Listener:
    """Calls `tell` from now on. What it raises reaches who called the group."""
    listener = Listener(tell, unfused, timed)
    with _lock:
        _listeners.append(listener)
        _apply()
    return listener


def remove(listener: Listener) -> None:
    """The end of `add`; nothing if it is not there."""
    with _lock:
        _listeners[:] = [other for other in _listeners if other is not listener]
        _apply()


@contextlib.contextmanager
def observing(tell: Callable[[Run], None], unfused: bool = False, timed: bool = False) -> Iterator[None]:
    """`add` for a block."""
    listener = add(tell, unfused, timed)
    try:
        yield
    finally:
        remove(listener)


def _apply() -> None:
    chosen = tuple(_listeners)
    if not chosen:
        _C.set_observer(None)
        return
    _C.set_observer(_dispatch, any(x.unfused for x in chosen), any(x.timed for x in chosen))


def _dispatch(
    group: int, reason: str, arguments: tuple, results: tuple, unfused: tuple, launches: list
) -> None:
    run = Run(group, reason, arguments, results, unfused, tuple(Timing(*launch) for launch in launches))
    for listener in tuple(_listeners):
        listener.tell(run)
