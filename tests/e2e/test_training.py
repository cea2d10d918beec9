"""Forward and backward of scripted functions: gradients as eager's, one forward and one backward group."""

import pytest
import torch
import torch.nn.functional as F

import tsfuser
from kit.support import assert_matches, counted, fresh, groups, no_fallback, train


@pytest.fixture(autouse=True)
def fused_only():
    with no_fallback():
        yield


def relu(x, y, z):
    return F.relu(x + y) * z


def gelu(x, y, z):
    return F.gelu(x + y) * z


def gelu_tanh(x, y, z):
    return F.gelu(x + y, approximate="tanh") * z


def silu(x, y, z):
    return F.silu(x + y) * z


def hardswish(x, y, z):
    return F.hardswish(x + y) * z


def where(x, y, z):
    return torch.where(x > 0, x * y, z) * 2.0


def lerp(x, y, z):
    return torch.lerp(x, y, 0.3) * z


def lerp_tensor(x, y, z):
    return torch.lerp(x, y, z) * 2.0


def sigmoid_tanh(x, y, z):
    return torch.sigmoid(x + y) * torch.tanh(z)


def division(x, y, z):
    return (x - y) / (z * z + 1.0)


PROGRAMS = [relu, gelu, gelu_tanh, silu, hardswish, where, lerp, lerp_tensor, sigmoid_tanh, division]

#: shapes of x, y, z: broadcasts of rank 1 to 5
BROADCASTS = [
    ((7,), (7,), (7,)),
    ((7,), (1,), ()),
    ((4, 5), (5,), (4, 1)),
    ((2, 3, 5), (3, 1), (5,)),
    ((2, 3, 4, 5), (1, 4, 1), (3, 1, 5)),
    ((2, 3, 2, 2, 5), (3, 1, 2, 1), (2, 1, 1, 1, 1)),
]


def inputs_of(shapes, device, dtype=torch.float32):
    return [torch.randn(shape, device=device).to(dtype).requires_grad_() for shape in shapes]


def check(program, inputs, ops, one_group=True):
    """Train fused and eager, compare the output and all gradients."""
    scripted = fresh(program)
    with tsfuser.fuser():
        out, gradients = train(scripted, inputs)
        with counted() as rise:
            out, gradients = train(scripted, inputs, calls=1)
    assert rise["fallbacks"] == {} and rise["launches"] >= 2
    if one_group:
        assert len(groups(scripted)) == 2, [str(g) for g in groups(scripted)]
    eager_out, eager = train(program, inputs, calls=1)
    doubles = [
        x.detach().double().cpu().requires_grad_() for x in inputs
    ]  # on CUDA hardswish keeps 1/6 in float
    exact_out, exact = train(program, doubles, calls=1)
    exact_out, exact = exact_out.to(out.device), [g.to(out.device) for g in exact]
    assert_matches(out, eager_out, exact_out, ops=ops)
    for x, mine, plain, reference in zip(inputs, gradients, eager, exact):
        terms = max(1, out.numel() // max(x.numel(), 1))  # a broadcast input's gradient is a sum
        assert_matches(mine, plain, reference, ops=ops + terms.bit_length(), strides=False)


@pytest.mark.each_value
@pytest.mark.parametrize("shapes", BROADCASTS, ids=lambda s: "x".join(map(str, s[0])))
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_gradients(device, program, shapes):
    check(program, inputs_of(shapes, device), ops=12)


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("program", [relu, gelu, silu, hardswish], ids=lambda p: p.__name__)
def test_gradients_in_other_dtypes(device, program, dtype):
    check(program, inputs_of(BROADCASTS[2], device, dtype), ops=12)


def test_only_some_inputs_require_gradients(device):
    inputs = inputs_of(BROADCASTS[2], device)
    inputs[1].requires_grad_(False)
    check(gelu, inputs, ops=12)


def test_expanded_incoming_gradient(device):
    """`sum().backward()` hands in a gradient whose strides are all 0."""
    x, y, z = inputs_of(BROADCASTS[2], device)
    scripted = fresh(gelu)
    with tsfuser.fuser():
        for _ in range(4):
            x.grad = None
            scripted(x, y, z).sum().backward()
    mine, x.grad = x.grad, None
    gelu(x, y, z).sum().backward()
    assert_matches(mine, x.grad, ops=12)


def test_double_backward(device):
    x, y, z = inputs_of([(4, 5)] * 3, device, torch.float64)
    scripted = fresh(sigmoid_tanh)

    def second(function):
        (first,) = torch.autograd.grad(function(x, y, z).sum(), x, create_graph=True)
        return torch.autograd.grad((first * first).sum(), x)[0]

    with tsfuser.fuser():
        for _ in range(4):
            mine = second(scripted)
    assert_matches(mine, second(sigmoid_tanh), ops=20)


def test_new_shapes_while_training(device):
    """The profile saw one shape; others of the same pattern give right gradients and compile nothing new
    after the first."""
    scripted = fresh(gelu)
    with tsfuser.fuser():
        train(scripted, inputs_of([(16, 32), (32,), (16, 32)], device))
        train(scripted, inputs_of([(8, 48), (48,), (8, 48)], device), calls=1)
        with counted() as rise:
            for rows in (3, 5, 24):
                inputs = inputs_of([(rows, 64), (64,), (rows, 64)], device)
                out, gradients = train(scripted, inputs, calls=1)
                _, eager = train(gelu, inputs, calls=1)
                for mine, plain in zip(gradients, eager):
                    assert_matches(mine, plain, ops=24, strides=False)
    assert rise["kernels_compiled"] == 0


def test_a_module_trains_to_the_same_weights(device):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a = torch.nn.Linear(8, 16)
            self.b = torch.nn.Linear(16, 4)

        def forward(self, x):
            return self.b(F.gelu(self.a(x)) * 1.5 + 0.1)

    torch.manual_seed(3)
    model = Model().double().to(device)
    twin = Model().double().to(device)
    twin.load_state_dict(model.state_dict())
    data = torch.randn(10, 32, 8, device=device, dtype=torch.float64)

    def fit(net, weights):
        optimizer = torch.optim.SGD(weights, lr=0.1)
        for batch in data:
            optimizer.zero_grad()
            net(batch).square().mean().backward()
            optimizer.step()

    with tsfuser.fuser():
        fit(torch.jit.script(model), list(model.parameters()))
    fit(twin, list(twin.parameters()))
    for mine, plain in zip(model.parameters(), twin.parameters()):
        assert_matches(mine.detach(), plain.detach(), ops=100)
