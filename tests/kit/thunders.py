"""What the tests with lightning-thunder share: importing it where torch is newer than it knows.

Example: `thunder = load()`, then `thunder.jit(function, executors=["tsfuser"])`.
"""

import importlib
import warnings

import pytest
import torch

import tsfuser
from tsfuser.errors import TsfuserWarning

#: Tensor methods that thunder 0.2.6 looks up by name, and torch 2.13 no longer has.
_DROPPED = ("align_as", "align_to", "has_names", "refine_names", "rename")
QUIET = {"python_return", "python_del", "unpack_trivial"}  # symbols of a trace that run nothing


def load():
    """The module `thunder`, with the executor "tsfuser"; ImportError where there is none for this torch."""
    for name in _DROPPED:
        if not hasattr(torch.Tensor, name):

            def method(self, *args, **kwargs):
                raise NotImplementedError

            method.__name__ = name
            setattr(torch.Tensor, name, method)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            thunder = importlib.import_module("thunder")
        except Exception as error:  # a torch that it was not made for
            raise ImportError(f"lightning-thunder does not load: {error}") from error
    importlib.import_module("tsfuser.frontends.thunder")
    return thunder


def regions(trace):
    """The symbols of a trace's regions."""
    return [symbol for symbol in trace.bound_symbols if symbol.sym.is_fusion]


def outside(trace):
    """The symbols of a trace that run outside of regions."""
    return [
        symbol for symbol in trace.bound_symbols if not symbol.sym.is_fusion and symbol.sym.name not in QUIET
    ]


@pytest.fixture(autouse=True)
def strict():
    """What runs unfused is an error."""
    tsfuser.reset()
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", TsfuserWarning)
        yield
