"""`python -m tsfuser kernel script.py`: writes one kernel of a script as a file that runs by itself.

In: a script, and which of the kernels of its scripted and compiled functions. Out: the script's own output,
and the file: source, inputs as in the first call, launch, and torch's ops to compare with
(debug/kernel_script.py).
Example: `python -m tsfuser kernel --only forward --number 3 --output norm.py train.py --epochs 1`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ..debug.calls import collected
from ..debug.findings import Kernel, Kernels
from ..debug.summary import costly_kernels
from . import script
from .explain_call import explain_call

SUMMARY = "run a script, then write one of its kernels as a file that runs by itself"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", metavar="NAME", help="only functions and modules of this name")
    parser.add_argument(
        "--number", type=int, metavar="N", help="which kernel of them; without it the one that costs most"
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="where to; without it the kernel's name and .py"
    )
    parser.add_argument("--list", action="store_true", help="print the kernels with their numbers instead")
    script.add_arguments(parser)


def command(chosen: argparse.Namespace) -> int:
    """The script's status; where that is 0, 1 if no kernel was written."""
    with collected() as calls:
        status = script.run(chosen.script, chosen.args)
    kernels: list[Kernel] = []
    costly: list[tuple[float, Kernel]] = []
    for call in (call for call in calls if chosen.only in (None, call.name)):
        try:
            found = explain_call(call)
        except Exception as error:
            _say(f"{call.name}: left out, since it raises {type(error).__name__}: {error}")
            continue
        kernels += found.kernels
        costly += [(x.launches.seconds, x.kernel) for x in costly_kernels(found)]
    if not kernels:
        named = f" of the name {chosen.only}" if chosen.only else ""
        _say(f"{chosen.script} called no function{named} that has kernels: `explain` says why")
        return status or 1
    if chosen.list:
        print(Kernels(kernels))
        return status
    if chosen.number is not None and not 0 <= chosen.number < len(kernels):
        _say(f"there is no kernel {chosen.number}; the numbers are\n{Kernels(kernels)}")
        return status or 1
    most = max(costly, key=lambda x: x[0])[1] if costly else kernels[0]
    return status or _written(most if chosen.number is None else kernels[chosen.number], chosen.output)


def _written(kernel: Kernel, output: Path | None) -> int:
    path = output or Path(f"{kernel.name}.py")
    try:
        kernel.script(path)
    except (ValueError, OSError) as error:
        _say(f"{kernel.name} was not written: {error}")
        return 1
    _say(f"{kernel.name} was written to {path}: python {path}")
    return 0


def _say(text: str) -> None:
    print(text, file=sys.stderr)
