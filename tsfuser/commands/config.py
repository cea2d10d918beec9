"""`python -m tsfuser config`: the flags that build a C++ program.

In: what is wanted. Out: one line of words between spaces, none of which has anything to quote, so that a
shell, as in `c++ main.cpp $(...)`, and any build tool split it alike. Example:
`python -m tsfuser config --cflags --libs`.
"""

from __future__ import annotations

import argparse
import sys

from ..frontends.libtorch import config

SUMMARY = "print what builds a C++ program that uses tsfuser.h"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cflags", action="store_true", help="flags for the compiler")
    parser.add_argument("--libs", action="store_true", help="what to link: tsfuser's source and torch")
    parser.add_argument("--cmake", action="store_true", help="the folder of the CMake package, tsfuser_DIR")


def command(chosen: argparse.Namespace) -> int:
    try:
        words = config.cflags() if chosen.cflags else []
        words += config.libs() if chosen.libs else []
    except ValueError as error:
        print(f"config: {error}", file=sys.stderr)
        return 1
    words += [str(config.FOLDER)] if chosen.cmake else []
    if not words:
        print("config wants --cflags, --libs or --cmake", file=sys.stderr)
        return 2
    print(" ".join(words))
    return 0
