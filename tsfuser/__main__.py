"""The commands of `python -m tsfuser`: `explain` runs a script and explains its scripted and compiled
functions; `config` prints the flags that build a C++ program.

explain. In: a script, run as `python script.py` would. Out: its own output, then a table for each scripted
function or module, or one of `torch.compile(..., backend="tsfuser")`, that it called from Python, with the
arguments of that call; `--html FILE` writes a page as well. Words behind `--` are the script's. Example:
`python -m tsfuser explain train.py forward --html forward.html -- --epochs 1`.

config. Out: one line of words between spaces, none of which has anything to quote, so that a shell, as in
`c++ main.cpp $(...)`, and any build tool split it alike. Example:
`python -m tsfuser config --cflags --libs`."""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path

from .debug.calls import collected
from .debug.explain import explain
from .frontends.libtorch import config


def main(arguments: list[str] | None = None) -> int:
    """The exit status: 0, or 1 where nothing was explained."""
    parser = argparse.ArgumentParser(prog="python -m tsfuser")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser(
        "explain", help="run a script and explain what is fused in it, and what is not"
    )
    command.add_argument("script", type=Path, help="its own arguments stand last, behind --")
    command.add_argument("function", nargs="?", help="only functions and modules of this name")
    pages = "also write a page; a number is put behind FILE's name for the second and later ones"
    command.add_argument("--html", type=Path, metavar="FILE", help=pages)
    command = commands.add_parser("config", help="print what builds a C++ program that uses tsfuser.h")
    command.add_argument("--cflags", action="store_true", help="flags for the compiler")
    command.add_argument("--libs", action="store_true", help="what to link: tsfuser's source and torch")
    command.add_argument("--cmake", action="store_true", help="the folder of the CMake package, tsfuser_DIR")
    given = sys.argv[1:] if arguments is None else arguments
    end = given.index("--") if "--" in given else len(given)
    chosen = parser.parse_args(given[:end])
    if chosen.command == "config":
        return _config(chosen.cflags, chosen.libs, chosen.cmake)
    if not chosen.script.is_file():
        parser.error(f"there is no file {chosen.script}")
    return _explain(chosen.script, given[end + 1 :], chosen.function, chosen.html)


def _config(cflags: bool, libs: bool, cmake: bool) -> int:
    try:
        words = config.cflags() if cflags else []
        words += config.libs() if libs else []
    except ValueError as error:
        print(f"config: {error}", file=sys.stderr)
        return 1
    words += [str(config.FOLDER)] if cmake else []
    if not words:
        print("config wants --cflags, --libs or --cmake", file=sys.stderr)
        return 2
    print(" ".join(words))
    return 0


def _explain(script: Path, given: list[str], wanted: str | None, html: Path | None) -> int:
    sys.argv = [str(script), *given]
    sys.path.insert(0, str(script.resolve().parent))
    with collected() as calls:
        runpy.run_path(str(script), run_name="__main__")
    chosen = [call for call in calls if wanted in (None, call.name)]
    for number, call in enumerate(chosen, 1):
        with call.mode():
            found = explain(call.function, *call.args, **call.kwargs)
        print(f"\n{found}", flush=True)
        if html is not None:
            found.to_html(html if number == 1 else html.with_stem(f"{html.stem}{number}"))
    if not chosen:
        names = ", ".join(dict.fromkeys(call.name for call in calls))
        what = (
            f"no scripted or compiled function of the name {wanted} was called; called were: {names}"
            if names
            else ""
        )
        print(what or f"{script} called no scripted or compiled function", file=sys.stderr)
    return 0 if chosen else 1


if __name__ == "__main__":
    sys.exit(main())
