"""Convolutions of compiled programs in channels last: who decides, and that nobody else sees it."""

import copy
import math
import operator

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from kit.compiled_models import MODELS
from kit.support import assert_matches
from tsfuser.frontends.dynamo.joint_graph.channels_last import channels_last
from tsfuser.frontends.dynamo.joint_graph.layout_choice import CONVOLUTION, why_not
from tsfuser.frontends.dynamo.rewrites.simplify import simplify

aten = torch.ops.aten
TERMS = 2000  # the longest sums: gradients of weights over a batch of images

LIBRARY = torch.library.Library("tsfuser_layouts", "DEF")
LIBRARY.define("strides(Tensor x) -> Tensor")
LIBRARY.impl("strides", lambda x: x * torch.arange(x.dim()).add(1).mul(torch.tensor(x.stride())).sum(), "CPU")
LIBRARY.impl("strides", torch.empty_like, "Meta")


class Images(TorchDispatchMode):
    """Records what convolutions and their gradients read: whether each operand is in channels last."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op in (CONVOLUTION, aten.convolution_backward.default):
            operands = args[: 2 + (op is not CONVOLUTION)]
            last = [x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last) for x in operands]
            self.found.append(all(last))
        return op(*args, **(kwargs or {}))


def assert_unseen(function, *args, mode="fake", convolutions=True):
    """The graph of `function` gives the same values in the same layout once its convolutions were changed,
    and all of them read channels last (or, by `convolutions`, none). Returns the changed graph."""
    module = make_fx(function, tracing_mode=mode)(*args)
    expected = module(*args)
    channels_last(module, True, inference=True)
    module.graph.lint()
    with Images() as images:
        actual = module(*args)
    assert images.found and set(images.found) == {convolutions}
    for ours, plain in zip(actual, expected):
        assert_matches(ours, plain, ops=TERMS)
    assert which_share_memory(actual) == which_share_memory(expected)
    return module


def which_share_memory(tensors):
    places = [t.untyped_storage().data_ptr() for t in tensors]
    return [places.index(place) for place in places]


def step(model):
    """A function of an image and parameters: the model's result, and all gradients."""
    names, parameters = zip(*model.named_parameters())

    def function(x, *parameters):
        y = torch.func.functional_call(model, dict(zip(names, parameters)), x)
        wanted = [t for t in (x, *parameters) if t.requires_grad]
        return [y, *torch.autograd.grad(y.square().sum(), wanted)]

    return function, [p.detach().requires_grad_() for p in parameters]


def image(*sizes):
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(3), requires_grad=True)


CONVOLUTIONS = {
    "plain": nn.Conv2d(6, 10, 3, padding=1, bias=False),
    "bias": nn.Conv2d(6, 10, 3),
    "by one": nn.Conv2d(6, 9, 1),
    "depthwise": nn.Conv2d(6, 6, 5, padding=2, groups=6),
    "grouped": nn.Conv2d(6, 8, 3, groups=2, stride=2),
    "dilated": nn.Conv2d(6, 7, 3, dilation=2, padding=(2, 1)),
    "transposed": nn.ConvTranspose2d(6, 5, 3, stride=2, output_padding=1),
    "transposed in groups": nn.ConvTranspose2d(6, 4, 2, groups=2, dilation=2),
}


@pytest.mark.parametrize(
    "name, mode",
    [*((name, "fake") for name in CONVOLUTIONS), ("plain", "symbolic"), ("depthwise", "symbolic")],
)
def test_convolutions_and_their_gradients(name, mode):
    model = nn.Sequential(copy.deepcopy(CONVOLUTIONS[name]), nn.ReLU())
    function, parameters = step(model)
    assert_unseen(function, image(3, 6, 11, 9), *parameters, mode=mode)


@pytest.mark.parametrize(
    "model, x",
    [
        (nn.Conv1d(6, 8, 3), image(2, 6, 9)),
        (nn.Conv3d(2, 3, 2), image(2, 2, 5, 4, 3)),
        (nn.ConvTranspose3d(2, 3, 2), image(2, 2, 5, 4, 3)),
    ],
)
def test_convolutions_of_other_dims_keep_their_layout(model, x):
    function, parameters = step(model)
    assert_unseen(function, x, *parameters, convolutions=False)


def weight(*sizes):
    return torch.arange(math.prod(sizes)).mul(0.7).sin().mul(0.2).view(sizes)


def convolved(x, channels=4):
    return F.conv2d(x, weight(channels, x.shape[1], 3, 3), padding=1)


def split_and_joined(x):
    left, right = convolved(x, 6).chunk(2, 1)
    return left * 2, convolved(torch.cat((left.tanh(), right), 1)), right


def views(x):
    y = convolved(x)
    return y, y[:, 1:, ::2], y.permute(0, 2, 3, 1), y.flatten(2), y.transpose(0, 1)[2]


def flattened(x):
    y = convolved(x).relu()
    return y.flatten(1) @ weight(y[0].numel(), 3), y.reshape(-1, x.shape[-1]) + 1


def tokens(x):
    """As vision transformers begin."""
    y = F.conv2d(x, weight(8, x.shape[1], 4, 4), stride=4).flatten(2).transpose(1, 2)
    return F.layer_norm(y, (8,)), y.contiguous()


def alike(x):
    """Of the views of one tensor, the second has the strides that it had."""
    y = convolved(x)
    return y.view(-1), y[:, 0, 0, 0]


def placed(x):
    y = convolved(x)
    return torch.as_strided(y, (3, 5), (2, 1), 7) * 2, y.contiguous().view(-1)


def by_strides(x):
    return torch.ops.tsfuser_layouts.strides(convolved(x)), torch.ops.tsfuser_layouts.strides(x)


def pooled(x):
    y, places = F.max_pool2d_with_indices(convolved(x), 2)
    small = F.adaptive_avg_pool2d(F.interpolate(y, scale_factor=2.0), 1)
    return y, places, small.flatten(1), F.avg_pool2d(y, 2).mean((2, 3)), F.pixel_shuffle(y, 2)


def normed(x):
    y = F.group_norm(convolved(x), 2).relu() + x[:, :1]
    y = F.batch_norm(convolved(y), None, None, training=True)
    return convolved(F.layer_norm(y.permute(0, 2, 3, 1), y.shape[1:2]).permute(0, 3, 1, 2)), y.softmax(1)


def attention(x):
    y = convolved(x, 8).flatten(2).unflatten(1, (2, 4)).transpose(2, 3)
    return (F.scaled_dot_product_attention(y, y, y),)


def squeezed(x):
    y = convolved(x)
    gate = F.conv2d(y.mean((2, 3), keepdim=True), weight(4, 4, 1, 1)).sigmoid()
    return y * gate, gate, y + x.sum((1, 2, 3), keepdim=True).expand_as(y)


@pytest.mark.each_value
@pytest.mark.parametrize("mode", ["fake", "symbolic"])
@pytest.mark.parametrize(
    "function",
    [
        split_and_joined,
        views,
        flattened,
        tokens,
        alike,
        placed,
        by_strides,
        pooled,
        normed,
        attention,
        squeezed,
    ],
)
def test_what_follows_a_convolution(function, mode):
    assert_unseen(function, image(3, 4, 12, 8).detach(), mode=mode)


def copied(x):
    """Two copies, neither of which shares memory with the other."""
    y = convolved(x).relu()
    first, second = (y.clone(memory_format=torch.channels_last) for _ in range(2))
    return first.permute(0, 2, 3, 1), second[:, 0]


def test_copies_of_which_views_are_returned_stay_apart():
    assert_unseen(copied, image(2, 4, 6, 6).detach())
    compiled = torch.compile(copied, backend="tsfuser", options={"channels_last": True})
    for x in (image(2, 4, 6, 6).detach(), image(2, 4, 6, 6).detach().requires_grad_()):
        assert which_share_memory(compiled(x)) == [0, 1]


def test_random_numbers_stay_where_they_were():
    def function(x):
        return F.dropout(convolved(x), 0.5), torch.rand_like(convolved(x))

    x = image(3, 4, 12, 8).detach()
    module = make_fx(function, tracing_mode="fake")(x)
    torch.manual_seed(7)
    expected = module(x)
    channels_last(module, True, inference=True)
    torch.manual_seed(7)
    for ours, plain in zip(module(x), expected):
        assert_matches(ours, plain, ops=TERMS)


def test_a_view_of_what_a_kernel_leaves_in_another_layout_than_torch_says():
    """On the CPU `roll` keeps channels last, but not by torch's metadata."""

    def function(x):
        return (convolved(x).roll(1, 1).flatten(1),)

    x = image(3, 4, 12, 8).detach()
    module = make_fx(function, tracing_mode="fake")(x)
    channels_last(module, True, inference=True)
    simplify(module)
    assert_matches(module(x)[0], function(x)[0], ops=TERMS, strides=False)


def test_a_size_is_asked_of_what_there_is():
    def function(x):
        return (convolved(x).relu().expand(2, *convolved(x).shape),)

    found = copies(assert_unseen(function, image(3, 4, 12, 8).detach(), mode="symbolic"))
    users = [user.target for n in found for user in n.users]
    assert aten.sym_size.int not in users, found


def test_group_norms_and_their_gradients_read_images_row_major():
    """Their kernels on CUDA take them for that, and would compute something else."""
    function, parameters = step(nn.Sequential(nn.Conv2d(4, 6, 3), nn.GroupNorm(2, 6), nn.Conv2d(6, 5, 3)))
    module = assert_unseen(function, image(2, 4, 9, 8), *parameters)
    norms = {aten.native_group_norm.default: 1, aten.native_group_norm_backward.default: 2}
    found = [n.args[k] for n in module.graph.nodes for k in range(norms.get(n.target, 0))]
    assert len(found) == 3 and all(n.meta["val"].is_contiguous() for n in found)


def copies(module):
    return [n for n in module.graph.nodes if n.target is aten.clone.default]


def test_between_convolutions_nothing_is_copied():
    def function(x, one, two):
        y = F.batch_norm(F.conv2d(x, one, padding=1), None, None, training=True).relu()
        y = F.conv2d(F.max_pool2d(y, 2), two)
        return (y.mean((2, 3)),)

    found = copies(
        assert_unseen(function, image(2, 4, 8, 8).detach(), weight(6, 4, 3, 3), weight(5, 6, 3, 3))
    )
    assert len(found) == 3 and all(n.args[0].op == "placeholder" for n in found)


def test_images_that_are_in_channels_last_are_read_as_they_are():
    def function(x, one):
        return (F.conv2d(x, one).relu(),)

    last = (t.to(memory_format=torch.channels_last) for t in (image(2, 4, 8, 8).detach(), weight(6, 4, 3, 3)))
    assert copies(assert_unseen(function, *last)) == []


def test_norms_over_channels_of_what_convolutions_give_read_it_in_place():
    def function(x, one):
        y = F.conv2d(x, one, padding=1, groups=4).permute(0, 2, 3, 1)
        return (F.layer_norm(y, (4,)), y.reshape(-1, 4) * 2)

    (only,) = copies(assert_unseen(function, image(2, 4, 8, 8).detach(), weight(4, 1, 3, 3)))
    assert only.args[0].op == "placeholder"


def graph_of(*convolutions, device="cuda", dtype=torch.float16, nodes=0):
    """Of convolutions given by the sizes of weights, groups and the side of the image."""
    graph, mode = fx.Graph(), FakeTensorMode()
    for sizes, groups, side in convolutions:
        shapes = ((8, sizes[1] * groups, side, side), sizes)
        operands = []
        for shape in shapes:
            operands.append(graph.placeholder("given"))
            with mode:
                operands[-1].meta["val"] = torch.empty(shape, device=device, dtype=dtype)
        others = (None, [1, 1], [1, 1], [1, 1], False, [0, 0], groups)
        node = graph.call_function(CONVOLUTION, (*operands, *others))
        with mode:
            node.meta["val"] = torch.empty(8, sizes[0], side, side, device=device, dtype=dtype)
    for _ in range(nodes):
        graph.call_function(operator.add, (1, 1))
    return graph, [n for n in graph.nodes if n.target is CONVOLUTION]


PLAIN, SMALL = ((128, 128, 3, 3), 1, 16), ((32, 32, 3, 3), 1, 16)
GROUPED, DEPTHWISE = ((256, 64, 3, 3), 4, 16), ((256, 1, 7, 7), 256, 16)
NARROWING, BY_ONE = ((64, 128, 3, 3), 1, 16), ((64, 128, 1, 1), 1, 16)


@pytest.mark.parametrize(
    "convolutions, inference, others, words",
    [
        ([PLAIN], False, {}, None),
        ([DEPTHWISE, SMALL, BY_ONE], False, {}, None),
        ([PLAIN, GROUPED], False, {}, "groups of several channels"),
        ([PLAIN, NARROWING], False, {}, "half as many channels"),
        ([SMALL, SMALL], False, {}, "few channels"),
        ([PLAIN], False, {"nodes": 898}, "few of them"),
        ([PLAIN, NARROWING], True, {}, None),
        ([PLAIN], True, {"nodes": 298}, "few of them"),
        ([PLAIN, GROUPED], True, {}, "most of their work"),
        ([PLAIN, PLAIN, PLAIN, PLAIN, GROUPED], True, {}, None),
        ([PLAIN], False, {"device": "cpu"}, "CUDA"),
        ([PLAIN], False, {"dtype": torch.float64}, "32 bits"),
    ],
)
def test_who_decides(convolutions, inference, others, words):
    reason = why_not(*graph_of(*convolutions, **others), inference)
    assert reason is None if words is None else words in reason


@pytest.mark.graphs
@pytest.mark.usefixtures("forgotten", "fused_or_error")
@pytest.mark.parametrize("name", ["residual", "convnext", "unet"])
def test_models_train_and_infer_in_channels_last(name, device):
    make_model, make_input = MODELS[name]
    eager = make_model().to(device)
    model, exact = copy.deepcopy(eager), copy.deepcopy(eager).double()
    function = torch.compile(model, backend="tsfuser", dynamic=True, options={"channels_last": True})
    for size in (4, 6):
        x = make_input(size).to(device)
        runs = []
        for each, call, given in ((model, function, x), (eager, eager, x), (exact, exact, x.double())):
            given = given.detach().clone().requires_grad_()
            y = call(given)
            each.zero_grad()
            y.square().mean().backward()
            with torch.no_grad():
                runs.append([y.detach(), call(given), given.grad, *(p.grad for p in each.parameters())])
        for ours, plain, reference in zip(*runs):
            assert_matches(ours, plain, reference, ops=TERMS)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2  # with a gradient, and without


class Block(nn.Module):
    """With a convolution that is wide enough for channels last to be chosen."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(96, 96, 7, padding=3, groups=96), nn.BatchNorm2d(96)

    def forward(self, x):
        return x + F.gelu(self.norm(self.conv(x)))


@pytest.mark.parametrize("wanted", [None, False])
def test_convolutions_on_a_gpu_are_in_channels_last_unless_that_is_switched_off(wanted):
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    eager = Block().cuda()
    model, exact = copy.deepcopy(eager), copy.deepcopy(eager).double()
    options = {} if wanted is None else {"channels_last": wanted}
    function = torch.compile(model, backend="tsfuser", options=options)
    x = torch.randn(4, 96, 16, 16, device="cuda")
    runs, saved = [], []
    for each, call, given in ((model, function, x), (eager, eager, x), (exact, exact, x.double())):
        given = given.detach().clone().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            y = call(given)
        if call is function:
            images = [t for t in saved if t.shape == x.shape]
            last = [t.is_contiguous(memory_format=torch.channels_last) for t in images]
            assert images and any(last) == (wanted is None)
        y.square().mean().backward()
        runs.append([y.detach(), given.grad, *(p.grad for p in each.parameters())])
    for ours, plain, reference in zip(*runs):
        assert_matches(ours, plain, reference, ops=TERMS)
