"""What scripts/fuzz gives damaged input: the readers of all levels, and the disk cache.

In: a seed. Out: None, or a sentence that says what went wrong. A reader raises `SyntaxError`, or gives a
record, in which `verify` finds a fault, or which reads back. The cache gives what was stored, or nothing.
Example:

    TARGETS["fusion"]().finding(random.Random(7))
"""

import os
import random
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kit import mutations
from kit.programs import add, build, relu, stages, tensor, total
from tsfuser import segment
from tsfuser.ir import size as sz
from tsfuser.ir import text, verify
from tsfuser.lower import verify as kernel
from tsfuser.lower.pipeline import lower
from tsfuser.ops import table
from tsfuser.planning import compile, plan
from tsfuser.schedule import verify as schedule
from tsfuser.schedule.machine import GPU, HOST
from tsfuser.target.disk_cache import DiskCache

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Reader:
    """A level: its texts, what reads them, checks what was read, and prints it."""

    samples: list[str]
    read: Callable
    verify: Callable
    print: Callable = str

    def finding(self, rng: random.Random) -> str | None:
        """What is wrong with how it takes a damaged text; the text is the rest of the sentence."""
        damaged = mutations.text(rng.choice(self.samples), self.samples, rng)
        try:
            complaint = self.checked(damaged)
        except Exception as error:
            complaint = f"{type(error).__name__}: {error}"
        return complaint and f"{complaint}, of\n{damaged}"

    def checked(self, damaged: str) -> str | None:
        try:
            record = self.read(damaged)
        except SyntaxError as error:
            return None if str(error) else "an error that says nothing"
        complaint = self.verify(record)
        if complaint is not None:
            return None if isinstance(complaint, str) and complaint else f"verify gives {complaint!r}"
        same = self.print(self.read(self.print(record))) == self.print(record)
        return None if same else "what was read prints as another"


def _joined(b, x, y):
    rows = table.find("aten::cat").build(b, tensors=[relu(b, x), y], dim=-1)
    padded = table.find("aten::constant_pad_nd").build(b, self=rows, pad=[1, sz.const(3)], value=None)
    return add(b, padded, b.literal(2.5)), total(b, rows, [-1])


def _normed(b, x):
    mean = b.reduce("mean", "mean", x, [-1], True, x.dtype)
    return add(b, x, b.reduce("squares", "squares", x, [-1], True, x.dtype)), mean


def _rows(b, x):
    index = b.pointwise("abs", (x,), x.dtype)
    return add(b, index, total(b, x, [0], True)), add(b, index, b.literal(0.5))


PROGRAMS = [
    (_joined, [(64, 24), (64, 40)]),
    (_normed, [(2048, 1000)]),
    (_rows, [(512, 640)]),
    (lambda b, x, y: add(b, x, relu(b, y)), [(64, 64), (64, 1)]),
    (lambda b, x: total(b, x, [0]), [(65536, 1024)]),
]


def _stages():
    """(stage, kernel) of all programs on both machines."""
    for call, fusion, machine in _built():
        for stage in stages(call, fusion, machine)[0]:
            yield stage, lower(stage.segment, stage.schedule, "k")


def _built():
    for program, sizes in PROGRAMS:
        for machine, device in ((GPU, "cuda:0"), (HOST, "cpu")):
            yield *build(program, *[tensor(*s, device=device) for s in sizes], device=device), machine


def fusions() -> Reader:
    return Reader([str(fusion) for _, fusion, _ in _built()], text.read, verify.verify)


def segments() -> Reader:
    return Reader([str(stage.segment) for stage, _ in _stages()], segment.read, segment.verify)


def schedules() -> Reader:
    return Reader([str(stage.schedule) for stage, _ in _stages()], schedule.read, schedule.verify)


def kernels() -> Reader:
    return Reader([k.code() for _, k in _stages()], kernel.read, kernel.verify, lambda k: k.code())


def plans() -> Reader:
    made = [
        compile.compile_fusion(call, fusion, "cpu") for call, fusion, machine in _built() if machine is HOST
    ]
    return Reader([repr(p) for p in made], plan.read, plan.verify, repr)


class Cache:
    """A disk cache whose files are damaged, one after another."""

    CONTENT = {
        ("one", 1): (".so", b"\x7fELF" + bytes(range(256)) * 30),
        ("two", 2): (".plans", b"[" + b"x" * 999),
        ("three",): (".txt", "größer".encode()),
        ("empty",): (".cubin", b""),
    }

    def finding(self, rng: random.Random) -> str | None:
        """What is wrong with how a cache with a damaged file is used."""
        folder = Path(tempfile.mkdtemp(prefix="tsfuser-fuzz-"))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return self._finding(folder, rng)
        finally:
            shutil.rmtree(folder)

    def _finding(self, folder: Path, rng: random.Random) -> str | None:
        written = DiskCache(folder / "cache")
        for key, (suffix, content) in self.CONTENT.items():
            written.put(key, suffix, content)
        files = sorted(path for path in (folder / "cache").rglob("*") if path.is_file())
        damages = [mutations.file(rng.choice(files), files, rng)]
        try:
            return self._used(DiskCache(folder / "cache", limit=rng.choice([0, 2000, 1 << 20])), rng, damages)
        except Exception as error:
            return f"{type(error).__name__}: {error}, where a file was damaged: {damages}"

    def _used(self, cache: DiskCache, rng: random.Random, damages: list[str]) -> str | None:
        for key, (suffix, content) in self.CONTENT.items():
            if cache.read(key, suffix) not in (None, content):
                return f"other content of {key}, where a file was damaged: {damages}"
        cache.trim()
        for key, (suffix, content) in self.CONTENT.items():
            stored = cache.get(key, suffix, lambda path, content=content: path.write_bytes(content))
            if stored.content != content:
                return f"other content of {key}, made anew, where a file was damaged: {damages}"
        cache.files()
        return None


class Programs:
    """A program that runs with a damaged cache of its kernels and plans."""

    PROGRAM = """
import torch, tsfuser
@torch.jit.script
def f(x, y):
    return torch.softmax(x * 2 + y, -1), (x + y).sum(0)
x, y = torch.randn(33, 40), torch.randn(40)
with tsfuser.fuser():
    for _ in range(3):
        found = f(x, y)
torch.testing.assert_close(found, (torch.softmax(x * 2 + y, -1), (x + y).sum(0)))
assert tsfuser.stats()["launches"] and not tsfuser.stats()["fallbacks"], tsfuser.stats()
"""

    def __init__(self):
        self.folder = tempfile.TemporaryDirectory(prefix="tsfuser-fuzz-")
        self.whole = Path(self.folder.name) / "whole"
        self.program = (
            Path(self.folder.name) / "program.py"
        )  # a file: TorchScript reads the source of functions
        self.program.write_text(self.PROGRAM)
        if complaint := self._run(self.whole):
            raise RuntimeError(complaint)

    def finding(self, rng: random.Random) -> str | None:
        """What is wrong with how the program runs."""
        damaged = Path(self.folder.name) / "damaged"
        shutil.rmtree(damaged, ignore_errors=True)
        shutil.copytree(self.whole, damaged)
        files = sorted(path for path in damaged.rglob("*") if path.is_file())
        chosen = rng.sample(files, rng.randint(1, len(files)))
        damages = [f"{path.name}: {mutations.file(path, files, rng)}" for path in chosen]
        complaint = self._run(damaged)
        return complaint and f"{complaint}\nwith {damages}"

    def _run(self, folder: Path) -> str | None:
        environment = {**os.environ, "TSFUSER_CACHE_DIR": str(folder), "TSFUSER_STORED_PLANS": "1"}
        environment["PYTHONPATH"] = str(ROOT)
        try:
            done = subprocess.run(
                [sys.executable, self.program], env=environment, timeout=50, capture_output=True, text=True
            )
        except subprocess.TimeoutExpired:
            return "it takes more than 50 seconds"
        return f"it ends with {done.returncode}: {done.stderr[-1000:]}" if done.returncode else None


TARGETS: dict[str, Callable] = {
    "fusion": fusions,
    "segment": segments,
    "schedule": schedules,
    "kernel": kernels,
    "plan": plans,
    "cache": Cache,
    "programs": Programs,
}
