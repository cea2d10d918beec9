"""`explain` and `check` run a copy: they say so where torch optimised the function itself without groups."""

import warnings

import pytest
import torch

import tsfuser
from kit.support import fresh
from tsfuser.debug import caveat

pytestmark = pytest.mark.graphs


def program(x):
    return torch.relu(x + 1.0) * 2.0


class Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(6))

    def forward(self, x):
        return torch.relu(x + self.weight) * 2.0


def scripted_class():
    """Modules of a class of their own each time: torch shares what it makes of a class."""
    return type("Scaled", (Scaled,), {"forward": Scaled.forward})


@pytest.fixture(autouse=True)
def forgotten():
    caveat._told.clear()
    yield
    caveat._told.clear()


def launches(call):
    """How many kernels a call launches with fusion on."""
    before = tsfuser.stats()["launches"]
    with tsfuser.fuser():
        for _ in range(4):
            call()
    return tsfuser.stats()["launches"] - before


def explained(fn, x):
    """What is said of the function itself; by `explain` and by `check` alike, and warned of once."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found, report = tsfuser.explain(fn, x), tsfuser.check(fn, x)
    assert found.groups and report.compared and report
    assert found.caveat == report.caveat
    said = [w for w in caught if issubclass(w.category, tsfuser.TsfuserWarning)]
    assert [str(w.message) for w in said] == ([found.caveat] if found.caveat else [])
    assert all(w.filename == __file__ for w in said)
    for text in (str(found), str(report), found.to_html()):
        assert ("itself runs unfused" in text) == bool(found.caveat)
    return found.caveat


@pytest.mark.parametrize("gradients", [False, True])
def test_a_function_that_was_optimised_before_is_said_to_run_unfused(device, gradients):
    x, scripted = torch.rand(4, 6, device=device, requires_grad=gradients), fresh(program)
    assert explained(scripted, x) == ""  # nothing is optimised yet
    for _ in range(4):
        scripted(x)
    said = explained(scripted, x)
    assert said.startswith("program itself runs unfused: torch optimised it") and "call _debug_flush" in said
    assert launches(lambda: scripted(x)) == 0
    scripted._debug_flush_compilation_cache()  # the way out that it names
    assert explained(scripted, x) == ""
    assert launches(lambda: scripted(x)) > 0
    assert explained(scripted, x) == ""  # it has groups now


@pytest.mark.parametrize("gradients", [False, True])
def test_modules_of_one_class_share_it(device, gradients):
    cls = scripted_class()
    first, second = (torch.jit.script(cls().to(device)) for _ in range(2))
    x = torch.rand(4, 6, device=device)
    with torch.set_grad_enabled(gradients):
        for _ in range(4):
            first(x)
        for form in (first, second, first.forward, second.forward):
            caveat._told.clear()
            said = explained(form, x)
            assert "for all modules of this class" in said and "call forward._debug_flush" in said
        assert launches(lambda: second(x)) == 0
        first.forward._debug_flush_compilation_cache()
        assert explained(second, x) == ""
        assert launches(lambda: second(x)) > 0


def test_what_switched_on_first_is_fused_has_no_caveat(device):
    scripted, x = fresh(program), torch.rand(4, 6, device=device)
    assert launches(lambda: scripted(x)) == 3
    assert explained(scripted, x) == ""


def test_a_call_that_was_only_profiled_is_still_fused(device):
    """torch optimises in the second call; in training the differentiated parts in the third."""
    scripted, x = fresh(program), torch.rand(4, 6, device=device)
    scripted(x)
    assert explained(scripted, x) == ""
    assert launches(lambda: scripted(x)) > 0
    x.requires_grad_()
    scripted = fresh(program)
    scripted(x), scripted(x)
    assert explained(scripted, x) == ""
    assert launches(lambda: scripted(x)) > 0


def test_trained_before_and_called_without_gradients_after(device):
    """A call without gradients passes by what was optimised for training, to a fallback with its own plan."""
    scripted, x = fresh(program), torch.rand(4, 6, device=device)
    grad = x.clone().requires_grad_()
    for _ in range(4):
        scripted(grad)
    assert explained(scripted, x) == "" and "itself runs unfused" in explained(scripted, grad)
    for _ in range(4):
        scripted(x)
    caveat._told.clear()
    assert "itself runs unfused" in explained(scripted, x)
    assert launches(lambda: scripted(x)) == 0


def test_a_program_without_groups_has_no_caveat(device):
    def product(x):
        return torch.mm(x, x)

    scripted, x = fresh(product), torch.rand(4, 4, device=device)
    for _ in range(3):
        scripted(x)
    assert tsfuser.explain(scripted, x).caveat == "" and tsfuser.check(scripted, x).caveat == ""


def test_the_plan_of_autocast_is_asked_for_under_autocast(device):
    """torch has an executor for each state of autocast."""
    scripted, x = fresh(program), torch.rand(4, 6, device=device)
    for _ in range(3):
        scripted(x)
    with torch.autocast(device):
        assert tsfuser.explain(scripted, x).caveat == ""
    with pytest.warns(tsfuser.TsfuserWarning, match="program itself runs unfused"):
        assert tsfuser.explain(scripted, x).caveat != ""


def test_a_function_of_which_only_the_backward_is_fused_is_not_said_to_run_unfused(device):
    def parts(w: torch.Tensor):
        return torch.cat([w[:2], w[2:]]).float()

    scripted = fresh(parts)
    w = torch.randn(4, 4, device=device, requires_grad=True)
    with tsfuser.fuser():
        for _ in range(4):
            scripted(w).sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error", tsfuser.TsfuserWarning)
        assert tsfuser.explain(scripted, w).groups
