"""Parsers of the text of environment variables.

In: the text of a variable. Out: its value, or `OptionError` with the known words. Example:
`words({"a": "", "b": ""})("a,b(1)")` -> `{"a": "", "b": "1"}`.
"""

from __future__ import annotations

import difflib
import importlib.util
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

#: The logs that tsfuser writes; other names are files of torch's own.
LOGS = ("graph_fuser", "partition", "parser", "manager", "kernel_cache")


class OptionError(ValueError):
    """An environment variable holds something unknown; the message lists what is known. `rest`: the value
    without that, where some of it is known."""

    def __init__(self, message: str, rest: Any = None):
        super().__init__(message)
        self.rest = rest


def did_you_mean(word: str, known: Iterable[str], prefix: str = "") -> str:
    """The end of a message about an unknown word: `"; did you mean 'cuda_kernel'?"`, or "" where nothing is
    like it. A name without its namespace is like the full one. A `prefix` makes no names alike."""
    word = word.removeprefix(prefix)
    names = {name.removeprefix(prefix).lower(): name for name in known}
    names |= {name.rpartition("::")[2]: full for name, full in names.items()}
    close = difflib.get_close_matches(word.lower(), names, 1)
    return f"; did you mean {names[close[0]]!r}?" if close else ""


def words(known: Mapping[str, str]) -> Callable[[str], dict[str, str]]:
    """A parser of comma-separated names with optional arguments: `"a,b(1)"` -> `{"a": "", "b": "1"}`."""

    def parse(text: str) -> dict[str, str]:
        chosen: dict[str, str] = {}
        unknown = []
        for item in filter(None, (part.strip() for part in re.split(r",(?![^(]*\))", text))):
            match = re.fullmatch(r"(\w+)(?:\((.*)\))?", item)
            if match and match[1] in known:
                chosen[match[1]] = match[2] or ""
            else:
                like = did_you_mean(match[1] if match else item, known)
                unknown.append(f"unknown option {item!r}{like}")
        if unknown:
            raise OptionError(f"{'; '.join(unknown)}; known are: {', '.join(sorted(known))}", chosen)
        return chosen

    return parse


def switch(text: str) -> bool:
    """torch's rule for switches: `0` and `OFF` are off, anything else is on."""
    return text.strip().upper() not in ("0", "OFF", "")


def strict_switch(text: str) -> bool:
    """Only `1` and `ON` are on."""
    return text.strip().upper() in ("1", "ON")


def number(text: str) -> int:
    """Any integer."""
    try:
        return int(text)
    except ValueError:
        raise OptionError(f"{text!r} is not an integer") from None


def number_from(first: int, last: int, what: str) -> Callable[[str], int | None]:
    """A parser of `what`, a number from `first` to `last`; None where there is none."""

    def parse(text: str) -> int | None:
        if not text.strip():
            return None
        found = number(text)
        if not first <= found <= last:
            raise OptionError(f"{text!r} is not {what} from {first} to {last}")
        return found

    return parse


_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def size(text: str) -> int:
    """A number of bytes, or as in 500K, 200M, 1G."""
    match = re.fullmatch(r"(\d+)\s*([KMG]?)(i?B)?", text.strip(), re.I)
    if not match:
        raise OptionError(f"{text!r} is no size, as 500K, 200M or 1G are")
    return int(match[1]) * _UNITS[match[2].upper()]


def one_of(*names: str) -> Callable[[str], str]:
    """A parser of one of the names."""

    def parse(text: str) -> str:
        if text not in names:
            raise OptionError(f"{text!r} is none of: {', '.join(names)}{did_you_mean(text, names)}")
        return text

    return parse


def log_levels(text: str) -> dict[str, int]:
    """torch's grammar: file stems separated by `:`, a leading `>` for each level; `">partition:graph_fuser"`
    -> `{"partition": 1, "graph_fuser": 0}`."""
    levels = {}
    for item in filter(None, text.split(":")):
        level = item.rfind(">") + 1
        stem = os.path.splitext(item[level:])[0]
        if item[:level] not in ("", ">", ">>"):
            raise OptionError(f"{item!r} has an unknown level; there are: {stem}, >{stem} and >>{stem}")
        if stem not in LOGS and not _is_file_of_torch(stem):
            raise OptionError(
                f"unknown log {stem!r}{did_you_mean(stem, LOGS)}; known are: {', '.join(LOGS)}, and the "
                "names of torch's own source files, separated by colons"
            )
        levels[stem] = level
    return levels


def _is_file_of_torch(stem: str) -> bool:
    """Whether torch, which reads the same variable, has a source file of the name, as its headers tell."""
    found = importlib.util.find_spec("torch")
    folders = found.submodule_search_locations if found is not None else None
    if not folders or not re.fullmatch(r"\w+", stem):
        return False
    headers = Path(folders[0], "include", "torch", "csrc")
    return not headers.is_dir() or any(headers.rglob(f"{stem}.h"))
