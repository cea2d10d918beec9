"""Under autocast for CUDA the bias of a convolution is added in the group of its readers
(csrc_stubs/torchscript/late_biases.cpp), in the forward and in the backward. Autocast for CUDA leaves tensors
of the CPU as they are, so the rewrite is tested there in float32 and float64."""

import copy

import pytest
import torch
from torch import nn

import tsfuser
from kit.joint_calls import is_packed
from kit.support import all_graphs, assert_matches, groups, kinds, train

pytestmark = pytest.mark.graphs


@pytest.fixture
def autocast():
    """Autocast for CUDA, as `torch.autocast` sets it where there is a GPU."""
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    yield
    torch.set_autocast_enabled("cuda", before[0])
    torch.set_autocast_dtype("cuda", before[1])


class Block(nn.Module):
    """The beginning of a block of ConvNeXt."""

    def __init__(self, bias: bool = True):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1, groups=4, bias=bias), nn.LayerNorm(4)

    def forward(self, x):
        return self.norm(self.conv(x).permute(0, 2, 3, 1)) * 2.0


class Plain(nn.Module):
    """Its bias is a tensor whatever happens."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(5, 4, 1, 1)), nn.Parameter(torch.randn(5))

    def forward(self, x):
        return torch.relu(torch.conv2d(x, self.weight, self.bias)) * 2.0


def of_own_type(kind=None, **arguments):
    """A module, a `Block` by default, that shares its graphs with no other test's."""
    return type("Own", (kind or Block,), {})(**arguments)


class Gate(nn.Module):
    """Two kinds of readers, and a convolution that only another one reads."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (nn.Conv1d(4, 4, 1) for _ in range(3))

    def forward(self, x):
        y = self.second(self.first(x))
        return torch.sigmoid(self.third(y)) * y + x


def image(module, device, dtype=torch.float32, batch=3):
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(batch, 4, 5, 6, generator=generator, dtype=torch.float64)
    x = x[:, :, 0] if isinstance(module, Gate) else x.to(memory_format=torch.channels_last)
    return x.to(device, dtype).requires_grad_()


def run(module, x, calls):
    """The result, and the gradients of the image and of the parameters that require one."""
    leaves = [x, *(p for p in module.parameters() if p.requires_grad)]
    return train(lambda given, *_: module(given), leaves, calls)


def precision_of(x):
    """Of what autocast for CUDA computes of `x`. Its casts are to float32 at most."""
    return torch.bfloat16 if x.is_cuda and x.dtype == torch.float32 else torch.float32


def compare(module, x, scripted=None, calls=3):
    with tsfuser.fuser():
        scripted = torch.jit.script(copy.deepcopy(module)) if scripted is None else scripted
        out, gradients = run(scripted, x, calls)
    expected, wanted = run(copy.deepcopy(module), x, 1)
    exact, exact_gradients = run(copy.deepcopy(module).double(), x.detach().double().requires_grad_(), 1)
    assert_matches(out, expected, exact, ops=40, strides=False, precision=precision_of(x))
    for mine, plain, reference in zip(gradients, wanted, exact_gradients, strict=True):
        assert_matches(mine, plain, reference, ops=200, strides=False, precision=precision_of(x))
    return scripted


def biased(scripted):
    """Whether each convolution that the program runs has a bias, in order."""
    graphs = all_graphs(scripted)
    found = [node for graph in graphs for node in graph.findAllNodes("prim::DifferentiableGraph", True)]
    graphs = [node.g("Subgraph") for node in found if node.hasAttribute("joint")] or graphs[:1]
    kinds = ("aten::conv1d", "aten::conv2d")
    found = [node for graph in graphs for kind in kinds for node in graph.findAllNodes(kind, True)]
    return [node.inputsAt(2).type().kind() != "NoneType" for node in found]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_bias_and_its_gradient_are_in_groups(autocast, device, dtype):
    module = of_own_type().to(device, dtype).to(memory_format=torch.channels_last)
    scripted = compare(module, image(module, device, dtype))
    assert biased(scripted) == [False]
    both = [kinds(group) for group in groups(scripted)]
    assert "aten::add" in both[0]
    assert ["aten::_grad_sum_to_size" in found for found in both] == [False, True]
    compare(module, image(module, device, dtype, batch=5), scripted, calls=1)
    compare(module, image(module, device, dtype, batch=0), scripted, calls=1)


@pytest.mark.parametrize("frozen", [("conv.bias",), ("conv.weight",), ("conv.weight", "conv.bias")], ids=str)
def test_what_is_frozen_gets_no_gradient(autocast, frozen):
    module = of_own_type()
    for name in frozen:
        module.get_parameter(name).requires_grad_(False)
    assert biased(compare(module, image(module, "cpu"))) == [False]


def test_a_convolution_that_groups_do_not_read_keeps_its_bias(autocast):
    module = Gate()
    assert sorted(biased(compare(module, image(module, "cpu")))) == [False, False, True]


def test_a_module_of_the_same_type_may_have_no_bias(autocast):
    module = of_own_type()
    without = type(module)(bias=False)
    scripted, other = torch.jit.script(copy.deepcopy(module)), torch.jit.script(copy.deepcopy(without))
    assert scripted._c._type() == other._c._type()  # so both run the same graphs
    compare(module, image(module, "cpu"), scripted)
    compare(without, image(without, "cpu"), other)
    compare(module, image(module, "cpu"), scripted)


def test_no_bias_stays_none(autocast):
    module = of_own_type(bias=False)
    scripted = compare(module, image(module, "cpu"))
    assert not any("aten::add" in kinds(group) for group in groups(scripted))


def test_in_inference(autocast, device):
    module = of_own_type().to(device)
    x = image(module, device).detach()
    with tsfuser.fuser(), torch.no_grad():
        scripted = torch.jit.script(module)
        for _ in range(3):
            out = scripted(x)
        assert biased(scripted) == [False] and len(groups(scripted)) == 1
        exact = copy.deepcopy(module).double()(x.double())
        assert_matches(out, module(x), exact, ops=40, strides=False, precision=precision_of(x))


def test_a_bias_that_is_a_tensor(autocast):
    module = Plain()
    assert biased(compare(module, image(module, "cpu"))) == [False]


def test_on_the_cpu_the_convolution_adds_its_bias():
    """There autocast stores its result once, in 16 bits."""
    module = of_own_type()
    with tsfuser.fuser(), torch.autocast("cpu", dtype=torch.bfloat16):
        scripted = torch.jit.script(module)
        run(scripted, image(module, "cpu"), 3)
        assert biased(scripted) == [True]


def test_a_bias_of_another_length_raises(autocast):
    module = of_own_type()
    x = image(module, "cpu")
    with tsfuser.fuser():
        scripted = torch.jit.script(module)
        run(scripted, x, 3)
        assert biased(scripted) == [False]
        for wrong in (torch.randn(1), torch.randn(4, 1)):
            scripted.conv.bias = nn.Parameter(wrong)
            with pytest.raises(RuntimeError, match="expected bias to be 1-dimensional with 4 elements"):
                scripted(x)


@pytest.mark.parametrize("kind", [Block, Gate, Plain])
def test_joint_graphs_add_it_late_too(autocast, joint_graphs, kind):
    module = of_own_type(kind)
    x = image(module, "cpu")
    scripted = compare(module, x)
    assert sorted(biased(scripted))[:1] == [False] and is_packed(scripted, x)
