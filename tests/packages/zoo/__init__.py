"""Models of other packages, with random weights and small configurations: real programs.

In: nothing; each module names the packages that it takes models from. Out: `PROGRAMS`, one `Program` a model.
Example:

    program = by_name("torchani: ANI")
    program.script(program.build())(*program.inputs(5))
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

#: Numbers of atoms, nodes, frames or images: one, small, odd, and larger ones after smaller ones.
SIZES = (7, 12, 3, 20, 1, 16, 33, 2)
FAMILIES = ("atoms_e3nn", "atoms", "graphs", "audio", "language", "images")
REQUIREMENTS = "tests/packages/requirements.txt"


@dataclass(frozen=True)
class Program:
    """`build` makes the module of the package, and `script` scripts or traces it. `arguments` names the
    parameters of `forward`. `forces`: the first result is an energy, and the first argument has positions.
    `own_forces`: it calls `autograd.grad` itself. `trains`: a loss of its results trains its parameters."""

    name: str
    needs: tuple[str, ...]
    build: Callable[[], torch.nn.Module]
    inputs: Callable[[int], tuple]
    arguments: str
    script: Callable[[torch.nn.Module], torch.jit.ScriptModule] = torch.jit.script
    forces: bool = False
    own_forces: bool = False
    trains: bool = True
    #: What a call returns depends on the calls before it.
    stateful: bool = False
    #: Whether torch.jit.load reads what torch.jit.save wrote.
    loads: bool = True
    sizes: tuple[int, ...] = SIZES
    #: Whether `.double()` makes the module and its inputs float64 throughout.
    in_double: bool = True
    #: Whether torch.compile takes the module, with its eager backend, too: Dynamo raises for e3nn's gates,
    #: torchmd-net's kernels in warp raise for sizes, and silero-vad is TorchScript.
    compiles: bool = True
    #: Its maxima choose otherwise after another rounding, so its training is compared in float64.
    chooses: bool = False

    def missing(self) -> str | None:
        """Why the program cannot run here."""
        prepare()
        for name in self.needs:
            try:
                importlib.import_module(name)
            except Exception as error:
                return f"no {name} here ({error}): see {REQUIREMENTS}"
        return None


def programs() -> list[Program]:
    """All programs, also those whose packages are not installed."""
    return [p for family in FAMILIES for p in importlib.import_module(f"zoo.{family}").PROGRAMS]


def by_name(name: str) -> Program:
    return next(program for program in programs() if program.name == name)


@functools.cache
def prepare() -> None:
    """Packages are imported after this. e3nn before 0.5 keeps its constants in a pickle. The compiled part of
    torchvision does not load beside a torch without CUDA; its Python part asks only whether `nms` exists."""
    os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"
    if importlib.util.find_spec("torchvision") is None:
        return
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        for name in ("nms", "qnms"):
            torch.library.define(
                f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            )


def generator(size: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 + size)
