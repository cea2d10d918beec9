"""thunder: what is compared with a result that depends on it is not computed again."""

import importlib.util

import pytest
import torch

from kit import thunders
from kit.compared import gradients, leaves
from kit.thunders import strict  # noqa: F401  a fixture of all tests here

if importlib.util.find_spec("thunder") is None:
    pytest.skip("lightning-thunder is not installed", allow_module_level=True)

pytestmark = pytest.mark.graphs
thunder = None  # imported when tests run


@pytest.fixture(autouse=True, scope="module")
def loaded():
    global thunder
    try:
        thunder = thunders.load()
    except ImportError as error:
        pytest.skip(str(error))


def extremes(z):
    return z.amax(1), z.amin(0), z.amax()


def equal(z):
    return torch.where(z == z.amax(1, keepdim=True), z * 3, z)


def distance(z):
    return (z - z.amax(1, keepdim=True)).abs(), (z - z[:, :1]).abs()


def above_the_least(z):
    return torch.relu(z - z.amin(1, keepdim=True))


PROGRAMS = (extremes, equal, distance, above_the_least)


def of_atan2(program):
    """bfloat16 has it in one op, so that no value is rounded in other places than in eager mode."""
    return lambda x, y: program(torch.atan2(x, y))


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("program", PROGRAMS)
def test_gradients_choose_the_elements_that_eager_chooses(program, dtype, device):
    function = of_atan2(program)
    jitted = thunder.jit(function, executors=["tsfuser"])
    for seed in range(8):
        torch.manual_seed(seed)
        given = leaves(device, dtype, 64, 6)
        most = 8 * torch.finfo(dtype).eps  # a few roundings of factors up to about 2
        for ours, eager in zip(gradients(jitted, given), gradients(function, given)):
            torch.testing.assert_close(ours, eager, rtol=most, atol=most)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("program", PROGRAMS)
def test_the_backward_does_not_compute_it_again(program, dtype, device):
    """Whatever the kernels round: those of a GPU contract products and sums."""
    jitted = thunder.jit(of_atan2(program), executors=["tsfuser"])
    jitted(*leaves(device, dtype, 64, 6))
    forward, backward = thunder.last_traces(jitted)[-1], thunder.last_backward_traces(jitted)[-1]
    assert "prims.atan2" in str(forward) and "prims.atan2" not in str(backward)


def test_others_are_computed_again(device):
    jitted = thunder.jit(lambda x, y: torch.tanh(torch.exp(x) * y).amax(1), executors=["tsfuser"])
    jitted(*leaves(device, torch.float32, 64, 6))
    assert "prims.exp" in str(thunder.last_backward_traces(jitted)[-1])
