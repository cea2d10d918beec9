"""Random damage to texts and to files, for scripts/fuzz.

In: a text, or a file, and a random generator. Out: `text` and `content` give damaged copies; `file` damages a
file, or puts a folder, a pipe or a link in its place.
"""

import os
import random
import re
import shutil
from pathlib import Path

_TOKEN = re.compile(r"\w+|\s+|.", re.S)
_WORDS = [
    *("0", "1", "-1", "7", str(2**31), str(2**63), str(2**64 - 1), "1" * 5000, "1e999", "1j", "nan", "-inf"),
    *(
        "None",
        "True",
        "''",
        "'\\0'",
        "b''",
        "...",
        "()",
        "(())",
        "[]",
        "{}",
        "*",
        "**",
        "=",
        ":=",
        "\n",
        "\0",
    ),
    *("lambda: 0", "__import__", "().__class__", "f'{0}'", "const(0)", "leaf(-1, '')"),
    *("(" * 300, "-" * 20_000),
]


def text(original: str, others: list[str], rng: random.Random) -> str:
    """`original` with one to four edits: of tokens, or of whole lines; some are pieces of `others`."""
    for _ in range(rng.randint(1, 4)):
        if rng.random() < 0.25:
            original = "\n".join(_edited(original.split("\n"), rng.choice(others).split("\n"), rng))
        else:
            original = "".join(_edited(_TOKEN.findall(original), _TOKEN.findall(rng.choice(others)), rng))
    return original


def _edited(parts: list[str], others: list[str], rng: random.Random) -> list[str]:
    """One edit: a part goes, is doubled, moves, is replaced, or all behind it goes."""
    parts, at = list(parts), rng.randrange(len(parts)) if parts else 0
    match rng.randrange(6) if parts else 5:
        case 0:
            del parts[at]
        case 1:
            parts.insert(at, parts[at])
        case 2:
            other = rng.randrange(len(parts))
            parts[at], parts[other] = parts[other], parts[at]
        case 3:
            parts[at] = rng.choice(others or [""])
        case 4 if rng.random() < 0.2:
            del parts[at:]
        case _:
            parts[at : at + 1] = [rng.choice(_WORDS)]
    return parts


def content(original: bytes, rng: random.Random) -> bytes:
    """`original` with a bit flipped, a part gone, doubled or replaced by noise, or all of it."""
    at, length = rng.randrange(len(original) + 1), rng.choice([0, 1, 8, 60, 4096])
    head, part, tail = original[:at], original[at : at + length], original[at + length :]
    match rng.randrange(6):
        case 0:
            return head + bytes([(part or b"\0")[0] ^ 1 << rng.randrange(8)]) + (part + tail)[1:]
        case 1:
            return head + tail + b"\0" * (not part)
        case 2:
            return head + (part or b"\1") * 2 + tail
        case 3:
            return head + rng.randbytes(len(part) or 1) + tail
        case 4:
            return head[: len(original) - 1]
    return rng.choice([b"", b"\0" * len(original), rng.randbytes(rng.randrange(100)), original + b"\n"])


def file(path: Path, others: list[Path], rng: random.Random) -> str:
    """Damages `path`; returns how, in a word."""
    kinds = [
        "content",
        "content",
        "content",
        "content",
        "other",
        "gone",
        "folder",
        "pipe",
        "loop",
        "away",
        "zeros",
    ]
    kind = rng.choice(kinds)
    old = path.read_bytes() if path.is_file() else b""
    if kind == "other":
        shutil.copyfile(rng.choice(others), path.with_name("damaged"))
        os.replace(path.with_name("damaged"), path)
    elif kind == "content":
        changed = content(old, rng)
        path.unlink()
        path.write_bytes(changed)
    else:
        path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path, 0o600)
    elif kind in ("loop", "away", "zeros"):
        path.symlink_to({"loop": path, "away": path.with_name("nowhere"), "zeros": "/dev/zero"}[kind])
    return kind
