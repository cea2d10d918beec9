"""What the forward of a compiled program saves for its backward, and what the backward computes again."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from kit.support import assert_matches
from tsfuser.frontends.dynamo.joint_graph import softmaxes
from tsfuser.frontends.dynamo.rewrites.simplify import without_detach

pytestmark = [pytest.mark.graphs, pytest.mark.usefixtures("forgotten", "fused_or_error")]

TERMS = 400


def saved_by(function, *args):
    """The result, and the sizes of saved tensors other than that, the arguments and the parameters."""
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        result = function(*args)
    known = {t.data_ptr() for t in (result, *args, *(getattr(function, "parameters", list)()))}
    return result, [tuple(t.shape) for t in saved if t.data_ptr() not in known]


def assert_trains(model, x, saved, dynamic=None, autocast=False):
    """Results and gradients are as near to float64 as eager's; at most that many of the size of `x` are
    saved."""
    runs = []
    plain, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    compiled = torch.compile(model, backend="tsfuser", dynamic=dynamic)
    for each, call, given in ((model, compiled, x), (plain, plain, x), (exact, exact, x.double())):
        given = given.detach().requires_grad_()
        with torch.autocast(x.device.type, torch.bfloat16, enabled=autocast and call is not exact):
            y, sizes = saved_by(call, given)
        if call is compiled:
            assert sizes.count(tuple(x.shape)) <= saved, sizes
        y.square().mean().backward()
        runs.append([y.detach(), given.grad, *(p.grad for p in each.parameters())])
    for ours, eager, reference in zip(*runs):
        assert_matches(ours, eager, reference, TERMS)


class LayerNormed(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(24), nn.Linear(24, 24)

    def forward(self, x):
        return self.linear(F.gelu(self.norm(x * 2)))


class Modulated(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.scale = nn.LayerNorm(24, elementwise_affine=False), nn.Linear(24, 24)

    def forward(self, x):
        return x.tanh() * self.norm(x * 2) * self.scale(x).sigmoid()


class GroupNormed(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.conv = nn.GroupNorm(3, 6), nn.Conv2d(6, 6, 3, padding=1)

    def forward(self, x):
        return self.conv(F.silu(self.norm(x * 2)))


class BatchNormed(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(6), nn.Conv2d(6, 6, 3, padding=1)

    def forward(self, x):
        return self.conv(F.silu(self.norm(x * 2)))


class Rectified(BatchNormed):
    def forward(self, x):
        return self.conv(torch.relu(self.norm(x * 2)))


ROWS, IMAGES = (32, 24), (3, 6, 10, 8)


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "make, shape, saved",  # the operand of the product, at most
    [
        (LayerNormed, ROWS, 1),
        (Modulated, ROWS, 1),
        (GroupNormed, IMAGES, 1),
        (BatchNormed, IMAGES, 1),
        (Rectified, IMAGES, 1),
    ],
)
def test_the_result_of_a_norm_is_computed_again(make, shape, saved, dtype, device):
    torch.manual_seed(1)
    assert_trains(make().to(device, dtype), torch.randn(shape, device=device, dtype=dtype), saved)


@pytest.mark.parametrize("make, shape", [(LayerNormed, ROWS), (GroupNormed, IMAGES), (BatchNormed, IMAGES)])
def test_with_sizes_that_vary(make, shape, device):
    torch.manual_seed(2)
    assert_trains(make().to(device), torch.randn(shape, device=device), 1 + (make is GroupNormed), True)


def test_the_operand_of_a_norm_is_computed_again_from_a_16_bit_product(device):
    class Residual(LayerNormed):
        def forward(self, x):
            return self.norm(x + self.linear(x)).tanh()

    torch.manual_seed(5)
    assert_trains(Residual().to(device), torch.randn(ROWS, device=device), saved=2, autocast=True)


def test_images_in_channels_last(device):
    torch.manual_seed(3)
    for make in (GroupNormed, BatchNormed, Rectified):
        x = torch.randn(IMAGES, device=device).to(memory_format=torch.channels_last)
        model = make().to(device, memory_format=torch.channels_last)
        assert_trains(model, x, 1)


def test_half_precision_keeps_what_its_statistics_would_round(device):
    torch.manual_seed(4)
    for make, shape in ((LayerNormed, ROWS), (Modulated, ROWS), (Rectified, IMAGES)):
        torch._dynamo.reset()
        model, x = make().to(device, torch.bfloat16), torch.randn(shape, device=device).bfloat16()
        y = torch.compile(model, backend="tsfuser")(x.requires_grad_())
        y.float().square().mean().backward()
        ours, x.grad = x.grad, None
        model(x).float().square().mean().backward()
        exact = copy.deepcopy(model).double()
        wide = x.detach().double().requires_grad_()
        exact(wide).square().mean().backward()
        assert_matches(ours, x.grad, wide.grad, TERMS)


def test_results_that_ops_save_of_themselves_are_not_saved_where_operands_are(device):
    """tanh saves its result, detached; so do sigmoid and exp."""

    def function(x, y):
        return (torch.tanh(x) * torch.sigmoid(y)).exp()

    x, y = (torch.randn(16, 8, device=device, requires_grad=True) for _ in range(2))
    out, sizes = saved_by(torch.compile(function, backend="tsfuser"), x, y)
    assert sizes == []
    out.sum().backward()
    ours, x.grad, y.grad = (x.grad, y.grad), None, None
    function(x, y).sum().backward()
    assert_matches(ours[0], x.grad, ops=TERMS)
    assert_matches(ours[1], y.grad, ops=TERMS)


def test_a_view_that_is_saved_tells_that_its_base_has_changed(device):
    """As in eager: what the backward would read is not what the forward has read."""
    x = torch.randn(5, 3, device=device, requires_grad=True)
    y = torch.compile(lambda x: F.relu6(x.t()) * 2, backend="tsfuser")(x)
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


class Attention(nn.Module):
    """Softmax in float32 of narrower operands, as autocast has it."""

    def __init__(self, log, dropout=0.0):
        super().__init__()
        self.query, self.log, self.dropout = nn.Linear(24, 24), log, dropout

    def forward(self, x):
        scores = self.query(x) @ x.transpose(-2, -1)
        wide = scores.to(torch.promote_types(scores.dtype, torch.float32)) / 3
        p = F.log_softmax(wide, -1) if self.log else F.softmax(wide, -1)
        return F.dropout(p, self.dropout).to(x.dtype) @ x


@pytest.mark.parametrize("recompute", [False, True])
def test_an_input_that_is_written_before_the_backward(recompute):
    """Eager saves the result. The backward computes it again from the input, if it may."""
    leaf = torch.randn(6, 8, requires_grad=True)
    x = leaf * 1
    y = torch.compile(lambda x: x.tan() * 2, backend="tsfuser", options={"recompute": recompute})(x)
    expected = y.detach() ** 2 / 2 + 2
    with torch.no_grad():
        x.add_(1)
    if recompute:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(y.sum(), leaf)
    else:
        assert_matches(torch.autograd.grad(y.sum(), leaf)[0], expected, ops=4)


@pytest.mark.each_value
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("log", [False, True])
def test_a_softmax_is_computed_again_from_operands_of_16_bits(log, dynamic, device):
    torch.manual_seed(5)
    plain = Attention(log).to(device, torch.bfloat16)
    exact, x = copy.deepcopy(plain).double(), torch.randn(3, 10, 24, device=device).bfloat16()
    runs, found = [], []
    compiled = torch.compile(plain, backend="tsfuser", dynamic=dynamic)
    for call, given in ((compiled, x), (plain, x), (exact, x.double())):
        given = given.detach().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: found.append(t) or t, lambda t: t):
            y = call(given)
        if call is compiled:  # two of them: scores, and what is multiplied
            wide = [t.dtype for t in found if t.shape == (3, 10, 10)]
            assert wide.count(torch.bfloat16) <= 2 and torch.float32 not in wide
        y.square().mean().backward()
        runs.append([y.detach(), given.grad])
    for ours, eager, reference in zip(*runs):
        assert_matches(ours, eager, reference, TERMS)


@pytest.mark.parametrize("op", [torch.softmax, torch.log_softmax])
def test_a_softmax_whose_result_is_saved_stays_whole(op):
    def step(x, w, g):
        y = op(x * 3, 1)
        return y, *torch.autograd.grad(y @ w, [x, w], g)

    x, w, g = torch.randn(5, 4), torch.randn(4, 6), torch.randn(5, 6)
    joint = make_fx(step, tracing_mode="fake")(x.requires_grad_(), w.requires_grad_(), g)
    without_detach(joint)
    before = [node.target for node in joint.graph.nodes]
    softmaxes.expand(joint)
    assert before != [node.target for node in joint.graph.nodes]
    for ours, eager in zip(joint(x, w, g), step(x, w, g)):
        assert_matches(ours, eager, ops=TERMS)
    softmaxes.collapse(joint)
    assert before == [node.target for node in joint.graph.nodes]


def test_a_softmax_of_nothing(device):
    x = torch.ones(3, 0, device=device, requires_grad=True)
    y = torch.compile(lambda x: F.softmax(x * 2, 1) * 3, backend="tsfuser")(x)
    y.sum().backward()
    assert y.shape == x.grad.shape == (3, 0)
