"""`to` and its relatives in scripted training, in every form that TorchScript has: eager's results, dtypes
and gradients, whatever is cast, and to what."""

import warnings

import pytest
import torch

import tsfuser
from kit.opsweep import plain
from kit.support import assert_matches, incoming_gradient, script

pytestmark = pytest.mark.graphs

#: Casts of y, which is computed of x; `like` has any dtype, i is int64. The forms of one line are in one
#: program: those that name no dtype have no constant for it, but None.
FORMS = {
    "to a device": "y.to(x.device) + y.to(like.device) + y.to(device=i.device), y.to(x.device, None)",
    "a copy": "y.to(x.device, copy=True) + y.to(x.device, non_blocking=True), y.contiguous().to(x.device)",
    "what is no operand": "y * i.to(x.device) + torch.ones_like(y).to(x.device), y.detach().to(x.device)",
    "a number": "torch.tensor(2.0).to(x.device) * y, y.new_zeros([1]).to(x.device) + y",
    "to the CPU": "y.cpu(), y.cpu().float()",
    "like another": "y.to(like), y.to(like, copy=True), y.type_as(like)",
    "to another's dtype": "y.to(like.dtype), y.to(dtype=like.dtype, copy=True), y.to(x.device, like.dtype)",
    "to a dtype": "y.to(torch.float32), y.to(torch.float64), y.to(torch.bfloat16), y.to(torch.float16)",
    "to whole numbers": "y.to(torch.int64), y.long(), y.to(x.device, torch.int32)",
    "by name": "y.float(), y.double(), y.half()",
    "with a format": "y.to(x.device, torch.float32, memory_format=torch.preserve_format), y.to(x.dtype)",
    "of another": "y * i.to(x.dtype), y + like.to(x.device)",
}
PROGRAM = """
def f(x: Tensor, like: Tensor, i: Tensor):
    y = torch.sigmoid(x) * x
    return torch.tanh(y * 2.0) * 0.5, {form}
"""
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(), (5,), (4, 3), (2, 3, 4), (2, 1, 3, 4)]


def results_and_gradient(function, x, like, i):
    x = x.clone().requires_grad_()
    results = function(x, like, i)
    wanted = [result for result in results if result.requires_grad]
    torch.autograd.backward(wanted, [incoming_gradient(result) for result in wanted])
    return [*results, x.grad]


@pytest.mark.each_value
@pytest.mark.parametrize("shape", SHAPES, ids=len)
@pytest.mark.parametrize("like", [*DTYPES, torch.int64], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_a_cast_is_differentiated_as_in_eager(device, form, dtype, like, shape):
    source = PROGRAM.format(form=FORMS[form])
    scripted, eager = script(source), plain(source)
    x = torch.randn(shape, device=device).to(dtype)
    given = x, torch.randint(0, 3, shape, device=device).to(like), torch.randint(0, 3, shape, device=device)
    with tsfuser.fuser(), warnings.catch_warnings():
        warnings.simplefilter("error", tsfuser.TsfuserWarning)
        for _ in range(4):
            found = results_and_gradient(scripted, *given)
    wanted = results_and_gradient(eager, *given)
    rounded = min((t.dtype for t in wanted if t.is_floating_point()), key=lambda d: torch.finfo(d).bits)
    for one, other in zip(found, wanted, strict=True):
        assert_matches(one, other, ops=8, precision=rounded if other.is_floating_point() else None)


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_a_move_to_its_own_device_beside_nothing_in_float32(device, dtype):
    """The program of torchani's forces: nothing that has two dims has 32 bits."""
    source = "def f(x: Tensor, like: Tensor):\n    return (x.to(like.device) * 2.0).sin().sum(), x * 3.0\n"
    scripted, eager = script(source), plain(source)
    given = torch.randn(5, device=device).to(dtype)
    gradients = []
    for function in (scripted, eager):
        x = given.clone().requires_grad_()
        with tsfuser.fuser():
            for _ in range(4):
                (gradient,) = torch.autograd.grad(function(x, x)[0], x)
        gradients.append(gradient)
    assert_matches(*gradients, ops=4)
