"""`python -m tsfuser COMMAND`, or `tsfuser COMMAND`: the commands of `tsfuser/commands`."""

from __future__ import annotations

import argparse
import os
import sys

from .commands import cache, completion, config, doctor, explain, kernel, run
from .version import __version__

COMMANDS = {
    "run": run,
    "explain": explain,
    "kernel": kernel,
    "doctor": doctor,
    "cache": cache,
    "config": config,
    "completion": completion,
}

EXAMPLES = """examples:
  python -m tsfuser run train.py --epochs 1         an old script, unedited, with fusion on
  python -m tsfuser explain --html page.html train.py --epochs 1
  python -m tsfuser kernel --output norm.py train.py
  python -m tsfuser doctor                          is all there that tsfuser needs?
  python -m tsfuser cache limit 200M

What follows the script's name is the script's own. `python -m tsfuser COMMAND --help` says more. Where pip
has installed tsfuser, `tsfuser COMMAND` is the same."""


def _called() -> str:
    """`tsfuser` where pip has installed that command and it was called, else the module."""
    return "tsfuser" if os.path.basename(sys.argv[0]).split(".")[0] == "tsfuser" else "python -m tsfuser"


def parser() -> argparse.ArgumentParser:
    """Of all commands."""
    made = argparse.ArgumentParser(
        prog=_called(),
        description="A fusing compiler for PyTorch that never compiles for a new shape.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--version", action="version", version=f"tsfuser {__version__}")
    commands = made.add_subparsers(dest="command", metavar="COMMAND", required=True, title="commands")
    for name, module in COMMANDS.items():
        about = module.SUMMARY[0].upper() + module.SUMMARY[1:] + "."
        module.add_arguments(commands.add_parser(name, help=module.SUMMARY, description=about))
    return made


def main(arguments: list[str] | None = None) -> int:
    """The exit status."""
    given = sys.argv[1:] if arguments is None else arguments
    made = parser()
    chosen = made.parse_args(given or ["--help"], argparse.Namespace(parser=made))
    try:
        return COMMANDS[chosen.command].command(chosen)
    except BrokenPipeError:  # who reads has seen enough, as `head` has
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


if __name__ == "__main__":
    sys.exit(main())
