"""torch optimises a function once. Who switches fusion on later is told which functions stay unfused."""

import contextlib
import warnings

import pytest
import torch

import tsfuser
from kit import other_fusers
from kit.support import fresh
from tsfuser.debug import unfused_functions

pytestmark = pytest.mark.graphs

EARLY = "optimised_too_early"


def program(x):
    return torch.relu(x + 1.0) * 2.0


def other(x):
    return torch.sigmoid(x - 1.0)


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(4))

    def forward(self, x):
        y = torch.relu(x + self.weight)
        return torch.sigmoid(y)


@pytest.fixture(autouse=True)
def unwarned_of_late_switch():
    """It is what is tested."""


@pytest.fixture(autouse=True)
def forgotten():
    """Functions of other tests are not named, and those of this one are not in others: torch keeps them."""
    unfused_functions._told.clear()
    unfused_functions._told.update(unfused_functions.names())
    yield
    while RUN:
        scripted = RUN.pop()
        getattr(scripted, "forward", scripted)._debug_flush_compilation_cache()


RUN = []  # what has run unfused in this test


def unfused(scripted, x):
    RUN.append(scripted)
    with torch.jit.fuser("fuser0"):
        for _ in range(4):
            out = scripted(x)
            if out.requires_grad:
                out.sum().backward()
    return scripted


def warned(switch):
    """What is warned of where `switch()` is entered, at this file."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with switch():
            pass
    said = [w for w in caught if issubclass(w.category, tsfuser.TsfuserWarning)]
    assert all(w.filename == __file__ for w in said)
    return [str(w.message) for w in said]


@contextlib.contextmanager
def enabled():
    with other_fusers.kept():
        tsfuser.enable()
        yield
        tsfuser.disable()


def by_torch():
    return torch.jit.fuser("fuser2")


def named(scripted_of):
    return f"test_late_switch.py:{scripted_of.__code__.co_firstlineno + 1})"


@pytest.mark.parametrize("switch", [tsfuser.fuser, by_torch, enabled])
def test_functions_that_were_optimised_before_are_named_once(switch, device):
    x = torch.rand(4, device=device)
    unfused(fresh(program), x)
    unfused(fresh(other), x)
    [said] = warned(switch)
    assert said.startswith("fusion is switched on too late for ") and f"other ({named(other)}" in said
    assert said.count(".py:") == 2
    assert warned(switch) == []


def test_a_module_is_named_by_its_class(device):
    module = unfused(torch.jit.script(Block()).to(device), torch.rand(4, device=device))  # trains
    [said] = warned(tsfuser.fuser)
    assert f"Block.forward ({named(Block.forward)}" in said
    module.forward._debug_flush_compilation_cache()
    with torch.no_grad():
        unfused(module, torch.rand(4, device=device))
    assert [name for name in tsfuser.stats()[EARLY] if "Block.forward" in name]


def test_stats_count_them_until_torch_forgets_them(device):
    x, before = torch.rand(4, device=device), tsfuser.stats()[EARLY]
    scripted = unfused(fresh(other), x)
    found = {name: count for name, count in tsfuser.stats()[EARLY].items() if before.get(name) != count}
    [(name, count)] = found.items()
    assert name.endswith(f"other ({named(other)}") and count == 1
    scripted._debug_flush_compilation_cache()
    assert tsfuser.stats()[EARLY] == before
    with tsfuser.fuser():
        for _ in range(4):
            scripted(x)
    assert tsfuser.stats()[EARLY] == before


@pytest.mark.parametrize(
    "function", [lambda x: torch.mm(x, x) + 1.0, lambda x: x.t().reshape(-1)], ids=["one op", "views"]
)
def test_a_function_without_a_group_is_not_named(function, device):
    before = tsfuser.stats()[EARLY]
    x = torch.rand(4, 4, device=device)
    unfused(torch.jit.trace(function, x), x)
    assert tsfuser.stats()[EARLY] == before


def test_a_function_that_was_called_once_is_still_fused(device):
    x, before = torch.rand(4, device=device), tsfuser.stats()[EARLY]
    scripted = fresh(program)
    with torch.jit.fuser("fuser0"):
        scripted(x)
    assert warned(tsfuser.fuser) == [] and tsfuser.stats()[EARLY] == before
