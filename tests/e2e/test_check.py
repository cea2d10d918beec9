"""`tsfuser.check`: fused against unfused, group by group."""

import pytest
import torch

import tsfuser
from kit.support import fresh
from tsfuser.planning import compile as pipeline

pytestmark = pytest.mark.graphs


def program(x, w):
    y = torch.mm(torch.relu(x + 1.0) * 0.5, w)
    return torch.sinh(y) * 2.0 + y


def dropped(x):
    return torch.dropout(x * 2.0, 0.5, True) + 1.0


class Norm(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(6)

    def forward(self, x):
        return torch.relu(self.norm(x)) * 2.0


def operands(device, gradients=True):
    torch.manual_seed(0)
    return [torch.randn(5, 7, device=device, requires_grad=gradients), torch.randn(7, 3, device=device)]


def test_equal_groups_are_counted_forward_and_backward(device):
    x, w = operands(device)
    report = tsfuser.check(fresh(program), x, w)
    assert report and report.difference is None
    assert len(report.compared) >= 3 and report.unfused == () and report.random == ()
    assert str(report) == (
        f"program: {len(report.compared)} groups compared, all equal within their dtypes' precision"
    )


@pytest.fixture
def wrong_sinh(monkeypatch):
    """Kernels that compute cosh where the program says sinh."""
    made = pipeline.emit.source
    monkeypatch.setattr(pipeline.emit, "source", lambda *given: made(*given).replace("sinh(", "cosh("))
    tsfuser.reset()
    yield
    tsfuser.reset()


def test_the_first_group_that_differs_is_named(device, wrong_sinh):
    x, w = operands(device, gradients=False)
    report = tsfuser.check(fresh(program), x, w)
    assert not report
    text = str(report)
    assert text.startswith(
        f"group {report.difference.group} differs from its nodes in result 0: 15 of 15 elements"
    )
    assert f"argument 0: float32[5, 3] on {x.device}" in text
    assert "aten::sinh" in text and "aten::relu" not in text
    assert report.difference.worst > report.difference.allowed


def test_random_groups_are_not_compared_and_refused_ones_are_named(device, monkeypatch):
    report = tsfuser.check(fresh(dropped), torch.rand(50, device=device))
    assert report and report.compared == () and len(report.random) == 1
    assert "has random numbers" in str(report)

    def fails(*_):
        raise tsfuser.errors.Refusal("it is Friday")

    tsfuser.reset()
    monkeypatch.setattr("tsfuser.planning.planner.compile_fusion", fails)
    with pytest.warns(tsfuser.TsfuserWarning, match="it is Friday"):
        report = tsfuser.check(fresh(program), *operands(device, gradients=False))
    tsfuser.reset()
    assert report.compared == () and {reason for _, reason in report.unfused} == {"it is Friday"}


def test_nothing_of_the_callers_changes(device):
    """Arguments, gradients, statistics of a module, random state, the function's own executor."""
    module = torch.jit.script(Norm().to(device))
    x = torch.rand(4, 6, device=device, requires_grad=True)
    before = x.detach().clone(), {k: v.clone() for k, v in module.state_dict().items()}, torch.get_rng_state()
    report = tsfuser.check(module, x)
    assert report and report.compared
    assert torch.equal(x, before[0]) and x.grad is None
    assert all(torch.equal(v, before[1][k]) for k, v in module.state_dict().items())
    assert all(p.grad is None for p in module.parameters())
    assert torch.equal(torch.get_rng_state(), before[2])


def test_the_functions_own_executor_is_left_alone(device):
    scripted = fresh(program)
    assert tsfuser.check(scripted, *operands(device))
    with pytest.raises(RuntimeError, match="optimized_plan_"):  # it never ran
        scripted.get_debug_state()


@pytest.mark.parametrize("gradients", [False, True])
def test_a_program_without_a_group_is_not_equal_but_says_why(device, gradients):
    def product(x):
        return torch.sort(torch.mm(x, x), 0)[0]

    report = tsfuser.check(fresh(product), torch.rand(4, 4, device=device, requires_grad=gradients))
    assert not report and report.difference is None and report.compared == ()
    text = str(report)
    assert text.startswith("product: nothing was compared: it has no group\n") and "all equal" not in text
    assert "a matrix product is left to torch" in text and "sorting is left to torch" in text


def test_a_program_that_ran_unfused_is_not_equal(device, monkeypatch):
    def fails(*_):
        raise tsfuser.errors.Refusal("it is Friday")

    tsfuser.reset()
    monkeypatch.setattr("tsfuser.planning.planner.compile_fusion", fails)
    with pytest.warns(tsfuser.TsfuserWarning, match="it is Friday"):
        report = tsfuser.check(fresh(program), *operands(device, gradients=False))
    tsfuser.reset()
    assert not report and str(report).startswith("program: nothing was compared: no group ran fused\n")
    assert "ran unfused: it is Friday" in str(report)


def test_random_numbers_alone_are_not_said_to_be_equal(device):
    report = tsfuser.check(fresh(dropped), torch.rand(50, device=device))
    assert report and "no group was compared" in str(report) and "all equal" not in str(report)
