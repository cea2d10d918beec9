"""What convolutions alone read of a row-major copy is copied as they read it, forward and backward
(csrc_stubs/torchscript/convolution_operands.cpp): the halves of shuffled channels."""

import copy

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import tsfuser
from kit.support import incoming_gradient

pytestmark = pytest.mark.graphs


class Block(nn.Module):
    """Half of the channels goes through a convolution, then the halves are shuffled."""

    def __init__(self, channels=8):
        super().__init__()
        half = channels // 2
        self.conv, self.norm = nn.Conv2d(half, half, 1, bias=False), nn.BatchNorm2d(half)

    def forward(self, x):
        p, q = x.chunk(2, dim=1)
        y = torch.cat((p, torch.relu(self.norm(self.conv(q)))), dim=1)
        b, c, h, w = y.size()
        y = y.view(b, 2, c // 2, h, w).transpose(1, 2).contiguous()
        self.touch(y)
        return y.view(b, c, h, w)

    def touch(self, y):
        pass


class Written(Block):
    def touch(self, y):
        y.mul_(2.0)


class Net(nn.Module):
    """The last convolutions read all channels."""

    def __init__(self, block=Block, channels=8):
        super().__init__()
        self.blocks = nn.Sequential(*[block(channels) for _ in range(3)])
        self.last, self.other = nn.Conv2d(channels, 4, 3), nn.Conv2d(channels, 4, 3)

    def forward(self, x):
        x = self.blocks(torch.relu(x))
        return self.last(x) * torch.sigmoid(self.other(x))


class Returned(Net):
    """The caller gets a part of a convolution's operand."""

    def forward(self, x):
        x = self.blocks(torch.relu(x))
        p, q = x.chunk(2, 1)
        return torch.cat((q, self.blocks[0].conv(q)), 1), q


class Uneven(nn.Module):
    """Three chunks of seven channels: the last is shorter."""

    def __init__(self):
        super().__init__()
        self.conv, self.last = nn.Conv2d(3, 3, 1), nn.Conv2d(1, 3, 1)

    def forward(self, x):
        b, c, h, w = x.size()
        y = torch.tanh(x).view(b, h, w, c).permute(0, 3, 1, 2).contiguous()
        p, q, r = y.chunk(3, 1)
        s = torch.cat((torch.relu(p), q), 1)
        return torch.relu(self.conv(q)) * s.view(b, 2, 3, h, w).sum(1) + self.last(r)


class Thin(nn.Module):
    """A copy of one channel is row-major and channels last at a time."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3)

    def forward(self, x):
        y = torch.cat((x[:, :1], x[:, 1:2]), 0).contiguous()
        p, q = y.chunk(2, 2)
        return torch.relu(self.conv(q)) + torch.sigmoid(p).sum()


class Unbatched(nn.Module):
    """An image alone, which is never channels last."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 3, 3)

    def forward(self, x):
        y = torch.tanh(x[0]).transpose(0, 1).contiguous().view(8, x.size(2), -1)
        p, q = y.chunk(2, 0)
        return torch.relu(self.conv(q)) * torch.sigmoid(p).sum()


def step(module, x):
    module.zero_grad()
    x = x.detach().requires_grad_()
    out = module(x)
    first = out[0] if isinstance(out, tuple) else out
    first.backward(incoming_gradient(first))
    parameters = [p.grad for p in module.parameters() if p.grad is not None]
    return [*(out if isinstance(out, tuple) else (out,)), x.grad, *parameters]


def own(module, *arguments):
    """One that shares its graphs with no other test's."""
    return type("Own", (module,), {})(*arguments)


def compare(module, inputs, dtype=torch.float32):
    """The scripted module after steps with each of the inputs, compared with eager, and strides of the
    results besides."""
    scripted, eager = torch.jit.script(copy.deepcopy(module)), copy.deepcopy(module)
    with tsfuser.fuser():
        for x in inputs:
            found, want = step(scripted, x), step(eager, x)
            for got, theirs in zip(found, want, strict=True):
                tolerance = 1e-4 if dtype == torch.float32 else 1e-9
                torch.testing.assert_close(got, theirs, rtol=tolerance, atol=tolerance)
            assert [v.stride() for v in found[:2]] == [v.stride() for v in want[:2]]
    return scripted


def images(format, device="cpu", dtype=torch.float32, channels=8, sizes=((2, 9, 9), (2, 9, 9), (3, 6, 5))):
    shapes = [(b, channels, h, w) for b, h, w in (*sizes[:1] * 3, *sizes)]
    return [torch.randn(s, device=device, dtype=dtype).to(memory_format=format) for s in shapes]


FORMATS = [torch.contiguous_format, torch.channels_last]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("weights", FORMATS, ids=str)
@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("block", [Block, Written])
def test_steps_are_eagers(block, format, weights, dtype, device):
    net = own(Net, block).to(device, dtype).to(memory_format=weights)
    compare(net, images(format, device, dtype), dtype)


@pytest.mark.parametrize("weights", FORMATS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("net", [Returned, Uneven, Thin, Unbatched])
def test_other_parts_are_eagers(net, dtype, weights, device):
    module = own(net).to(device, dtype).to(memory_format=weights)
    inputs = images(torch.contiguous_format, device, dtype, 7 if net is Uneven else 8)
    if net is Thin:  # large enough for all of them
        inputs = [x[:, :1].repeat(1, 2, 2, 2).to(memory_format=torch.channels_last)[:, :1] for x in inputs]
        inputs = [torch.cat((x, x), 1).to(memory_format=torch.channels_last) for x in inputs]
    compare(module, inputs, dtype)


class Apart(Net):
    """Two convolutions, whose weights are there before, read one copy: a step goes back through one."""

    def forward(self, x):
        one, two = self.last.weight, self.other.weight
        x = self.blocks(torch.relu(x))
        return nn.functional.conv2d(x, one), nn.functional.conv2d(x, two)


class Single(Net):
    """One convolution reads all channels."""

    def forward(self, x):
        return torch.sigmoid(self.last(self.blocks(torch.relu(x))))


@pytest.mark.parametrize("last", FORMATS, ids=str)
@pytest.mark.parametrize("other", FORMATS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_convolutions_that_read_one_copy_may_differ(last, other, dtype, device):
    net = own(Apart).to(device, dtype)
    net.last.to(memory_format=last), net.other.to(memory_format=other)
    compare(net, images(torch.contiguous_format, device, dtype), dtype)


class Halves(nn.Module):
    """A convolution of each half of shuffled channels."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Conv2d(4, 3, 3), nn.Conv2d(4, 3, 1)

    def forward(self, x):
        b, c, h, w = x.size()
        y = torch.tanh(x).view(b, 2, c // 2, h, w).transpose(1, 2).contiguous().view(b, c, h, w)
        p, q = y.chunk(2, 1)
        return torch.relu(self.one(p)), torch.relu(self.two(q)), torch.sigmoid(p)


@pytest.mark.parametrize("weights", FORMATS, ids=str)
@pytest.mark.parametrize("asked", [(0,), (1,), (2,), (0, 1), (0, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_only_some_halves_get_a_gradient(dtype, asked, weights, device):
    net = own(Halves).to(device, dtype).to(memory_format=weights)
    scripted = torch.jit.script(copy.deepcopy(net))

    def gradient(module, x):
        x = x.detach().requires_grad_()
        results = module(x)
        sum(results[k].sin().sum() for k in asked).backward()
        return x.grad

    with tsfuser.fuser():
        for x in images(torch.contiguous_format, device, dtype):
            got, want = gradient(scripted, x), gradient(net, x)
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_without_gradients(device):
    net = own(Net).to(device).to(memory_format=torch.channels_last).eval()
    scripted = torch.jit.script(net)
    with tsfuser.fuser(), torch.no_grad():
        for x in images(torch.channels_last, device):
            got, want = scripted(x), net(x)
            assert got.stride() == want.stride()
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def copies(function):
    """The sizes of the tensors that convolutions and their derivatives copy in a call."""

    def is_of_convolution(event):
        return event is not None and ("convolution" in event.name or is_of_convolution(event.cpu_parent))

    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
        function()
    events = [e for e in seen.events() if e.name == "aten::clone" and is_of_convolution(e.cpu_parent)]
    return [e.input_shapes[0] for e in events]


@pytest.mark.parametrize("weights", FORMATS, ids=str)
def test_convolutions_find_their_operands_as_they_read_them(weights):
    x = images(torch.contiguous_format)[0]
    net = own(Single).to(memory_format=weights)
    eager = copies(lambda: step(net, x))
    with tsfuser.fuser():
        scripted = torch.jit.script(net)
        for _ in range(4):
            step(scripted, x)
        found = copies(lambda: step(scripted, x))
    # the operands of three convolutions, each way, of which the first is a part of the program's input
    assert eager.count([2, 4, 9, 9]) == 6 and found.count([2, 4, 9, 9]) == 2
    assert [2, 8, 9, 9] not in found and ([2, 8, 9, 9] in eager) == (weights == torch.channels_last)


def test_so_they_do_in_joint_graphs(joint_graphs):
    test_convolutions_find_their_operands_as_they_read_them(torch.channels_last)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_gradients_of_gradients(dtype, device):
    net = own(Net).to(device, dtype).to(memory_format=torch.channels_last)
    scripted = torch.jit.script(copy.deepcopy(net))

    def second(module, x):
        x = x.detach().requires_grad_()
        (first,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), [x, *module.parameters()])

    with tsfuser.fuser():
        for x in images(torch.channels_last, device, dtype)[:4]:
            for got, want in zip(second(scripted, x), second(net, x), strict=True):
                torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3 * float(want.abs().max()))


def test_too_few_channels_raise_as_before(device):
    scripted = torch.jit.script(own(Uneven).to(device))
    with tsfuser.fuser():
        for x in images(torch.contiguous_format, device, channels=7):
            step(scripted, x)
        with pytest.raises(RuntimeError, match="Expected|size"):
            scripted(torch.randn(2, 2, 4, 4, device=device))
