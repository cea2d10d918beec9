"""Who is measured: eager, TorchScript with and without NNC, torch.compile, memory_efficient_fusion, tsfuser.

In: a function, its tensors and the numbers after them. Out: a callable without arguments that runs it the
way a peer does. Example:

    with PEERS["nnc"].context():
        out = PEERS["nnc"].prepare(function, numbers)(*tensors)
"""

import contextlib
import itertools
import types
import warnings
from dataclasses import dataclass

import torch

import tsfuser  # noqa: F401  # torch.jit.fuser("fuser2") works again

_numbers = itertools.count(1)


def copy_of(function):
    """`function` with a code object and a name of its own: torch.jit.script and torch.compile keep what they
    compiled, and which sizes they saw change, by function, and every measurement starts from nothing."""
    code = function.__code__.replace(co_name=f"{function.__name__}_{next(_numbers)}")
    copy = types.FunctionType(code, function.__globals__, function.__name__)
    copy.__annotations__, copy.__module__ = function.__annotations__, function.__module__
    copy.__qualname__ = function.__qualname__
    return copy


def _eager(function, numbers):
    return lambda *tensors: function(*tensors, *numbers)


def _scripted(function, numbers):
    scripted = torch.jit.script(function)
    return lambda *tensors: scripted(*tensors, *numbers)


def _compiled(function, numbers, **settings):
    compiled = torch.compile(function, **settings)
    return lambda *tensors: compiled(*tensors, *numbers)


def _reduce_overhead(function, numbers):
    compiled = torch.compile(function, mode="reduce-overhead")

    def run(*tensors):
        torch.compiler.cudagraph_mark_step_begin()
        return compiled(*tensors, *numbers)

    return run


def _memory_efficient(function, numbers):
    from functorch.compile import memory_efficient_fusion

    def bound(*tensors):  # numbers become constants of the trace
        return function(*tensors, *numbers)

    return memory_efficient_fusion(bound)


@dataclass(frozen=True)
class Peer:
    """One way to run a function. `static`, `shapes`: whether it is measured with one shape, with many."""

    title: str
    how: object
    fuser: str = ""
    cuda_only: bool = False
    ours: bool = False
    static: bool = True
    shapes: bool = True

    @contextlib.contextmanager
    def context(self):
        """Where the function must be prepared and run."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecations of TorchScript, hints of torch.compile
            with torch.jit.fuser(self.fuser) if self.fuser else contextlib.nullcontext():
                yield

    def prepare(self, function, numbers=()):
        return self.how(copy_of(function), numbers)


PEERS = {
    "eager": Peer("eager", _eager),
    "script": Peer("TorchScript, no fuser", _scripted, "none"),
    "nnc": Peer("TorchScript + NNC", _scripted, "fuser1"),
    "compile": Peer("torch.compile", _compiled),
    "static": Peer(
        "torch.compile, static",
        lambda f, numbers: _compiled(f, numbers, dynamic=False),
        static=False,
        shapes=False,
    ),
    "dynamic": Peer(
        "torch.compile, dynamic", lambda f, numbers: _compiled(f, numbers, dynamic=True), static=False
    ),
    "overhead": Peer("compile reduce-overhead", _reduce_overhead, cuda_only=True, shapes=False),
    "mef_nnc": Peer("memory_efficient + NNC", _memory_efficient, "fuser1", shapes=False),
    "mef_tsfuser": Peer("memory_efficient + tsfuser", _memory_efficient, "fuser2", ours=True, shapes=False),
    "tsfuser": Peer("tsfuser", _scripted, "fuser2", ours=True),
}


#: What `scripts/bench --thunder` compares besides; thunder_cases.py runs them.
THUNDER = {
    "thunder": Peer("thunder, own executors", None),
    "thunder_compile": Peer("thunder + torch.compile", None),
    "thunder_tsfuser": Peer("thunder + tsfuser", None, ours=True),
}


def available(names, cuda):
    """The peers of `names` that this machine can run, in the order of PEERS."""
    return {name: peer for name, peer in PEERS.items() if name in names and (cuda or not peer.cuda_only)}
