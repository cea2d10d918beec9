"""Logs chosen by PYTORCH_JIT_LOG_LEVEL, in torch's grammar.

In: a stem that nvFuser's users know (`graph_fuser`, `partition`, `manager`, `parser`, `kernel_cache`), a
title, a text. Out: lines on stderr. Example: `PYTORCH_JIT_LOG_LEVEL=graph_fuser` makes `write("graph_fuser",
"Before Fusion", graph)` print `[graph_fuser] Before Fusion:` and the graph below it, unchanged, so that it
can be cut out and parsed again.
"""

from __future__ import annotations

import sys

from . import options

#: The levels of torch's GRAPH_DUMP, GRAPH_UPDATE (`>`) and GRAPH_DEBUG (`>>`).
DUMP, UPDATE, DEBUG = 0, 1, 2


def enabled(stem: str, level: int = DUMP) -> bool:
    """Whether `PYTORCH_JIT_LOG_LEVEL` asks for `stem` at `level`; ask before making the text."""
    return options.get("log_levels").get(stem, -1) >= level


def write(stem: str, title: str, text: object = "", level: int = DUMP) -> None:
    """Print `title` and `text` if `stem` is enabled at `level`. One write, so that threads do not mix their
    lines."""
    if not enabled(stem, level):
        return
    body = f"\n{text}".rstrip("\n") if str(text) else ""
    colon = ":" if body and not title.endswith(":") else ""
    sys.stderr.write(f"[{stem}] {title}{colon}{body}\n")
    sys.stderr.flush()
