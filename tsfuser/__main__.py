"""`python -m tsfuser COMMAND`: the commands of `tsfuser/commands`."""

from __future__ import annotations

import argparse
import os
import sys

from .commands import cache, config, doctor, explain, run
from .version import __version__

COMMANDS = {"run": run, "explain": explain, "doctor": doctor, "cache": cache, "config": config}

EXAMPLES = """examples:
  python -m tsfuser run train.py --epochs 1         an old script, unedited, with fusion on
  python -m tsfuser explain --html page.html train.py --epochs 1
  python -m tsfuser doctor                          is all there that tsfuser needs?
  python -m tsfuser cache limit 200M

What follows the script's name is the script's own. `python -m tsfuser COMMAND --help` says more."""


def parser() -> argparse.ArgumentParser:
    """Of all commands."""
    made = argparse.ArgumentParser(
        prog="python -m tsfuser",
        description="tsfuser, a fusing compiler for PyTorch, from the command line.",
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
    chosen = parser().parse_args(given or ["--help"])
    try:
        return COMMANDS[chosen.command].command(chosen)
    except BrokenPipeError:  # who reads has seen enough, as `head` has
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


if __name__ == "__main__":
    sys.exit(main())
