"""`python -m tsfuser explain script.py`: what is fused in a script's functions, and what is not.

In: a script, run as `python script.py` would. Out: its own output, then a table for each scripted function or
module, or one of `torch.compile(..., backend="tsfuser")`, that it called from Python, with the arguments of
that call. However the script ends, the tables follow. Example:
`python -m tsfuser explain --only forward --html forward.html train.py --epochs 1`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ..debug.calls import Recorded, collected
from . import script
from .explain_call import explain_call

SUMMARY = "run a script, then say what is fused in its scripted and compiled functions, and why not all"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", metavar="NAME", help="only functions and modules of this name")
    pages = "also write a page; a number is put behind FILE's name for the second and later ones"
    parser.add_argument("--html", type=Path, metavar="FILE", help=pages)
    script.add_arguments(parser)


def command(chosen: argparse.Namespace) -> int:
    """The script's status; where that is 0, 1 if nothing was explained."""
    with collected() as calls:
        status = script.run(chosen.script, chosen.args)
    wanted = [call for call in calls if chosen.only in (None, call.name)]
    explained = 0
    for call in wanted:
        explained += _explained(call, chosen.html, explained)
    if not wanted:
        print(_nothing(chosen.script, chosen.only, [call.name for call in calls]), file=sys.stderr)
    return status or (0 if explained else 1)


def _explained(call: Recorded, html: Path | None, before: int) -> bool:
    """Whether the call could be explained: a script that failed may have done so in this call."""
    try:
        found = explain_call(call)
    except Exception as error:
        print(
            f"\n{call.name}: not explained, since it raises {type(error).__name__}: {error}", file=sys.stderr
        )
        return False
    print(f"\n{found}", flush=True)
    if html is not None:
        path = html.with_stem(f"{html.stem}{before + 1}") if before else html
        found.to_html(path)
        print(f"written to {path}", file=sys.stderr)
    return True


def _nothing(path: Path, wanted: str | None, called: list[str]) -> str:
    if not called:
        return f"{path} called no scripted or compiled function"
    names = ", ".join(dict.fromkeys(called))
    return f"no scripted or compiled function of the name {wanted} was called; called were: {names}"
