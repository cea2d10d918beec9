"""What programs save and launch with `tsfuser.joint`, beside scripted training as it is."""

import pytest
import torch

from kit.joint_measures import (
    PROGRAMS,
    Layers,
    attention,
    encoder,
    head,
    image,
    joint,
    operands,
    peak,
    scripted,
    trained,
)
from tsfuser import _C
from tsfuser.schedule.machine import Machine

pytestmark = pytest.mark.graphs


@pytest.fixture(autouse=True)
def drawn_again(monkeypatch):
    """Dropouts save seeds on the host, too, where it does not pay."""
    monkeypatch.setattr(Machine, "computes_fast", True)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_no_more_is_saved_and_launched(device, program):
    """With eager's results and gradients, where nothing is random."""
    given = operands(program, device)
    ours, results, gradients = joint(program, given)
    todays = scripted(program, given)
    print(program.__name__, ours, todays)
    assert ours.saved <= todays.saved
    assert sum(ours.ours + ours.torchs) <= sum(todays.ours + todays.torchs)
    if program is not encoder:
        result = program(*given)
        wanted = [t for t in given if t.requires_grad]
        precision = 2e-2 if program in (head, attention) else 2e-5
        torch.testing.assert_close(results[0], result.detach(), rtol=precision, atol=precision)
        expected = torch.autograd.grad(result, wanted, torch.ones_like(result))
        torch.testing.assert_close(tuple(gradients), expected, rtol=precision, atol=precision)


def both(measure):
    """With joint graphs, and without."""
    todays = measure()
    before = _C.use_joint_functions(True)
    try:
        ours = measure()
    finally:
        _C.use_joint_functions(before)
    print(ours, todays)
    return ours, todays


def assert_no_more(measure):
    ours, todays = both(measure)
    assert ours.saved <= todays.saved
    assert sum(ours.ours + ours.torchs) <= sum(todays.ours + todays.torchs)
    return ours, todays


def assert_no_more_by_scripted_functions(program, given):
    assert_no_more(lambda: scripted(program, given, calls=7))


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_nor_by_scripted_functions_that_it_differentiates(device, program):
    assert_no_more_by_scripted_functions(program, operands(program, device))


def test_nor_in_channels_last(device):
    given = [t.detach() for t in operands(image, device)]
    given = [t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t for t in given]
    assert_no_more_by_scripted_functions(image, [t.requires_grad_() for t in given])


def test_nor_by_layers_of_a_network(device):
    """The sums that they carry along, the mask that they share, the heads of their attentions."""
    given = torch.randn(4, 32, 64, device=device), torch.zeros(4, 1, 1, 32, device=device)
    ours, todays = assert_no_more(lambda: trained(Layers(3).to(device), given))
    assert sum(ours.ours) <= sum(todays.ours)


def test_layers_need_no_more_memory(device):
    """What is asked for its sizes does not live until the forward ends."""
    given = torch.randn(4, 32, 64, device=device), torch.zeros(4, 1, 1, 32, device=device)
    ours, todays = both(lambda: peak(Layers(4).to(device), given))
    assert ours <= todays
