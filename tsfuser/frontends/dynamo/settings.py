"""The options of `torch.compile(..., backend="tsfuser", options={...})`.

In: a dict. Out: `Settings`; ValueError for an unknown name, with the known ones, or for a wrong value.
Example: `read({"skip": ["aten::gelu"]}).skip` -> `frozenset({"aten::gelu"})`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ... import options
from ...graph.kinds import known_kind
from ...option_parsers import did_you_mean

_lock = threading.Lock()  # of `options.state` while one graph's groups are chosen


@dataclass(frozen=True)
class Settings:
    """None in one of the first three: nvFuser's knobs decide when the graph is compiled."""

    skip: frozenset[str] | None = None  # kinds of ops that stay out of groups
    horizontal: bool | None = None  # ops that only share an operand may join one group
    single_node: bool | None = None  # a single op may be a group
    recompute: bool = True  # the backward computes cheap values again instead of reading saved ones
    background: bool | None = (
        None  # no call waits for compilers; None: as tsfuser.fuser and TSFUSER_COMPILE say
    )
    channels_last: bool | None = None  # convolutions run in channels last; None: if inductor's rules say so


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("it is True or False")
    return value


def _kinds(value: Any) -> frozenset[str]:
    kinds = (value,) if isinstance(value, str) else tuple(value)
    for kind in kinds:
        if not isinstance(kind, str):
            raise ValueError("it is a list of kinds of ops, like 'aten::gelu'")
    return frozenset(map(known_kind, kinds))


_READERS: dict[str, Callable[[Any], Any]] = {
    "skip": _kinds,
    "horizontal": _flag,
    "single_node": _flag,
    "recompute": _flag,
    "background": _flag,
    "channels_last": _flag,
}


def read(given: Mapping[str, Any] | None) -> Settings:
    """The settings. Raises ValueError."""
    values = {}
    for name, value in (given or {}).items():
        if name not in _READERS:
            like = did_you_mean(name, _READERS.keys())
            raise ValueError(f"tsfuser has no option {name!r}{like}; its options are {', '.join(_READERS)}")
        try:
            values[name] = _READERS[name](value)
        except (TypeError, ValueError) as error:
            raise ValueError(f"tsfuser's option {name!r} cannot be {value!r}: {error}") from None
    return Settings(**values)


@contextlib.contextmanager
def applied(settings: Settings) -> Iterator[None]:
    """A context in which nvFuser's knobs have the values of the settings, while groups are chosen."""
    state = options.state
    wanted = {
        "skip_kinds": None if settings.skip is None else set(settings.skip),
        "horizontal_mode": settings.horizontal,
        "single_node_mode": settings.single_node,
        "background": settings.background,
    }
    with _lock:
        before = {name: getattr(state, name) for name, value in wanted.items() if value is not None}
        try:
            for name in before:
                setattr(state, name, wanted[name])
            yield
        finally:
            for name, value in before.items():
                setattr(state, name, value)
