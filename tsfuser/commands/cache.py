"""`python -m tsfuser cache`: the files that tsfuser keeps on disk.

In: an action. Out: the number and size of files, or of those that were deleted. Example: `python -m tsfuser
cache limit 200M` deletes the longest unused files until the rest takes at most 200 MB.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from .. import option_parsers, options
from ..target.disk_cache import DiskCache

SUMMARY = "show, list or delete the kernels, plans and graphs that are kept on disk"

#: What a file is, by its suffix.
_KINDS = {
    ".so": "kernels for CPU tensors",
    ".cubin": "kernels for CUDA tensors",
    ".graph": "graphs of torch.compile",
    ".pass": "graphs of scripted programs",
    ".cpp": "sources that failed",
    ".cu": "sources that failed",
}
_OTHERS = "plans and notes"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_subparsers(dest="what", metavar="WHAT", title="what to do, by default size")
    what.add_parser("size", help="where the files are, how many, and how large")
    what.add_parser("list", help="each file, the latest used first")
    what.add_parser("clear", help="delete all of them; programs make them anew")
    limit = what.add_parser("limit", help="delete the longest unused ones until the rest takes at most SIZE")
    limit.add_argument("size", type=_bytes, metavar="SIZE", help="bytes, or as in 500K, 200M, 1G")


def command(chosen: argparse.Namespace) -> int:
    """1 where the folder cannot be used, with the reason."""
    folder = options.cache_dir()
    cache = DiskCache(folder, options.get("cache_limit"))
    if folder.is_dir() and (reason := cache.hindrance()):
        print(f"cache: {reason}", file=sys.stderr)
        return 1
    if not folder.is_dir():
        print(f"{folder}: nothing is kept there yet")
    elif chosen.what == "list":
        _list(cache)
    elif chosen.what in ("clear", "limit"):
        _delete(cache, 0 if chosen.what == "clear" else chosen.size)
    else:
        _size(cache)
    return 0


def shown(size: int) -> str:
    """A number of bytes, as people read it."""
    for unit, name in ((1 << 30, "GB"), (1 << 20, "MB"), (1 << 10, "KB")):
        if size >= unit:
            return f"{size / unit:.1f} {name}"
    return f"{size} bytes"


def summary(cache: DiskCache) -> str:
    """`38 files, 1.2 MB of 1.0 GB`."""
    files = cache.files()
    total = sum(status.st_size for _, status in files)
    return f"{_files(len(files))}, {shown(total)} of {shown(cache.limit)}"


def _files(count: int) -> str:
    return f"{count} file{'s' * (count != 1)}"


def _size(cache: DiskCache) -> None:
    print(f"{cache.directory}: {summary(cache)}")
    counts, sizes = Counter[str](), Counter[str]()
    for path, status in cache.files():
        kind = _KINDS.get(path.suffix, _OTHERS)
        counts[kind] += 1
        sizes[kind] += status.st_size
    for kind, size in sizes.most_common():
        print(f"{shown(size):>12}  {counts[kind]} {kind}")


def _list(cache: DiskCache) -> None:
    for path, status in sorted(cache.files(), key=lambda found: -found[1].st_mtime):
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(status.st_mtime))
        print(f"{used}  {shown(status.st_size):>12}  {path.relative_to(cache.directory)}")


def _delete(cache: DiskCache, size: int) -> None:
    before = cache.files()
    DiskCache(cache.directory, size).trim()
    left = {path for path, _ in cache.files()}
    gone = [status.st_size for path, status in before if path not in left]
    print(f"{cache.directory}: {_files(len(gone))} deleted, {shown(sum(gone))}; left are {summary(cache)}")


def _bytes(text: str) -> int:
    try:
        return option_parsers.size(text)
    except option_parsers.OptionError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
