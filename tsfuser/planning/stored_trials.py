"""Outcomes of trial builds on disk: what one process has tried, the next one does not try again.

In: nothing; the graph passes ask rows (`Row.outcome`), which look into `trials.OUTCOMES`. Out: that table,
filled from disk before the first question, and written after passes that have added to it. Example:

    read()   # before the passes ask
    ...      # `Row.outcome` of `aten::relu` with a float32 matrix on cpu: is it known? else a trial build
    keep()   # after them

An outcome depends on the code, the row, what is known of its arguments, the name of the device and the
default dtype. The last four are in its key, and `VERSIONS` is in that of the file. Rows and the IR, which a
trial runs, read no options and ask no device (tests/pure/test_trials.py).
"""

from __future__ import annotations

import marshal
from itertools import islice
from pathlib import Path

from .. import log, options
from ..ops.trials import OUTCOMES
from . import compile, interrupts, stored_plans

_MOST = 1024  # outcomes in a file: the latest of the process that wrote it, then others
_SUFFIX = ".trials"

_seen: dict[Path, int] = {}  # cache: by folder, how many of OUTCOMES its file had when it was last used here


def read() -> None:
    """Adds the outcomes on disk to OUTCOMES, once for each folder."""
    folder = _folder()
    if folder is None or folder in _seen:
        return
    try:
        found = _stored(folder)
        for key, outcome in found.items():
            OUTCOMES.setdefault(key, outcome)
        _seen[folder] = len(OUTCOMES) if OUTCOMES.keys() == found.keys() else 0
    except Exception as error:  # they are tried, then
        interrupts.pass_on(error)
        _seen[folder] = 0
        log.write("kernel_cache", "no outcomes of trials could be read from disk", error)


def keep() -> None:
    """Writes OUTCOMES where some are new. What goes wrong costs the next process some time only."""
    folder = _folder()
    if folder is None or _seen.get(folder) == len(OUTCOMES):
        return
    known = list(OUTCOMES.items())  # in one step: other threads add to it
    try:
        kept = dict(islice((dict(reversed(known)) | _stored(folder)).items(), _MOST))
        compile.cache_in(folder).put(_key(), _SUFFIX, marshal.dumps(kept))
    except Exception as error:
        interrupts.pass_on(error)
        log.write("kernel_cache", "outcomes of trials were not kept on disk", error)
    _seen[folder] = len(known)


def _folder() -> Path | None:
    return options.cache_dir() if options.get("stored_plans") else None


def _stored(folder: Path) -> dict[str, tuple]:
    content = compile.cache_in(folder).read(_key(), _SUFFIX)
    return marshal.loads(content) if content else {}


def _key() -> tuple:
    return "trials", stored_plans.VERSIONS
