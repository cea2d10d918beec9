"""Runs a script as `python script.py` would, but inside this process.

In: its path, and the words that follow it. Out: the status with which Python would end; what the script does
not catch is printed as Python prints it. Example: `run(Path("train.py"), ["--epochs", "1"])` -> 0.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path

INTERRUPTED = 130  # of shells: 128 and the number of SIGINT


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The script and what is its own, which stand last."""
    parser.add_argument("script", type=_file, metavar="SCRIPT", help="a Python file")
    parser.add_argument(
        "args", nargs=argparse.REMAINDER, metavar="...", help="all that follows is the script's own"
    )


def run(script: Path, arguments: list[str]) -> int:
    """The status."""
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        return _status(end.code)
    except BaseException as error:
        _print(error, script)
        return INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
    finally:
        sys.stdout.flush()
    return 0


def _file(text: str) -> Path:
    path = Path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"there is no file {text}")
    return path


def _status(code: object) -> int:
    """As Python does: a text is printed, and is a failure."""
    if code is None or isinstance(code, int):
        return code or 0
    print(code, file=sys.stderr)
    return 1


def _print(error: BaseException, script: Path) -> None:
    """By the script's own hook, if it has set one, and without the frames that run it."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename != str(script):
        frames = frames.tb_next
    sys.excepthook(type(error), error.with_traceback(frames), frames)
