"""`python -m tsfuser run script.py`: a script, unedited, with fusion on.

In: a script for TorchScript, as one that was written for nvFuser. Out: what it prints, and its status.
Example: `python -m tsfuser run --stats train.py --epochs 1`.
"""

from __future__ import annotations

import argparse
import sys
from pprint import pformat

from .. import knobs
from ..debug import report
from . import script

SUMMARY = "run a script with fusion switched on, as if it began with `import tsfuser; tsfuser.enable()`"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--stats", action="store_true", help="print tsfuser.stats() on stderr at the end")
    script.add_arguments(parser)


def command(chosen: argparse.Namespace) -> int:
    """The script's status."""
    knobs.enable()
    status = script.run(chosen.script, chosen.args)
    if chosen.stats:
        print(pformat(dict(report.stats()), sort_dicts=False), file=sys.stderr)
    return status
