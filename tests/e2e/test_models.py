"""Parts of well-known networks, scripted: they are fused, what is expected to be in the groups is, and
results and gradients are eager's, in float32 and with autocast. A shape never seen compiles nothing new where
its class is known."""

import copy

import pytest
import torch

import tsfuser
from kit import models
from kit.autodiff_only import by_joint_graphs
from kit.support import EPSILON, counted, kinds, no_fallback
from tsfuser.frontends.torchscript import passes
from tsfuser.graph.wrapper import GROUP

pytestmark = [pytest.mark.filterwarnings("error::tsfuser.TsfuserWarning"), pytest.mark.graphs]

CALLS = 4
LONG = pytest.mark.long
#: name -> (groups at least, what some group of the forward pass does in one piece, and of the backward pass)
EXPECTED = {
    "resnet_basic": (
        4,
        "_batch_norm_impl_index add relu",
        "threshold_backward _batch_norm_impl_index_backward",
    ),
    "resnet_bottleneck": (
        6,
        "_batch_norm_impl_index add relu",
        "threshold_backward _batch_norm_impl_index_backward",
    ),
    "encoder": (6, "add native_layer_norm", "native_layer_norm_backward"),
    "lstm": (4, "sigmoid tanh mul add", "mul neg add"),
    "unet": (12, "_batch_norm_impl_index relu", "relu_backward _batch_norm_impl_index_backward"),
    "gpt": (8, "pow mean rsqrt mul", "sigmoid neg mul"),
}
#: What joint graphs have in the place of the latter.
JOINT = {
    "_batch_norm_impl_index": "batch_norm",
    "_batch_norm_impl_index_backward": "batch_norm_backward",
    "relu_backward": "threshold_backward",
    "neg": "sigmoid_backward",
    "sigmoid": "silu_backward",
}


def forget_types():
    """Scripted modules of one class share their compiled code; from here on they are compiled anew."""
    torch.jit._recursive.concrete_type_store = torch.jit._recursive.ConcreteTypeStore()


def made(name, device, size="small", channels_last=False, dtype=torch.float32):
    module, inputs = models.build(name, size, device)
    module = module.to(dtype)
    inputs = tuple(x.to(dtype) if x.is_floating_point() else x for x in inputs)
    if channels_last:
        module = module.to(memory_format=torch.channels_last)
        inputs = tuple(x.contiguous(memory_format=torch.channels_last) for x in inputs)
    return module, inputs


def step(module, inputs, autocast=None):
    """Forward and backward: the result, and gradients of the first input and all parameters, by name."""
    x = inputs[0].detach().requires_grad_()
    module.zero_grad(set_to_none=True)
    kind = x.device.type
    with torch.autocast(kind, dtype=autocast or torch.bfloat16, enabled=autocast is not None):
        out = module(x, *inputs[1:])
    generator = torch.Generator().manual_seed(17)
    out.backward(torch.randn(out.shape, generator=generator).to(out.device, out.dtype))
    return out.detach(), {"input": x.grad, **{n: p.grad for n, p in module.named_parameters()}}


def distance(mine, theirs):
    """The largest difference in units of the largest value."""
    assert mine.shape == theirs.shape and mine.dtype == theirs.dtype
    return float((mine.double() - theirs.double()).abs().max() / theirs.double().abs().max().clamp(min=1e-3))


def assert_near(mine, theirs, terms, precision=torch.float32):
    """Each result and gradient is as near as `terms` roundings of `precision` let it be."""
    out, gradients = mine
    allowed = EPSILON[precision] * 8 * terms
    assert distance(out, theirs[0]) <= allowed
    assert gradients.keys() == theirs[1].keys()
    for name, want in theirs[1].items():
        assert distance(gradients[name], want) <= allowed, name


def fused(module, inputs, autocast=None):
    """The module scripted, what the last of `CALLS` steps gave, and the groups that were made: lists of the
    kinds of their nodes."""
    forget_types()
    scripted = torch.jit.script(module)
    with tsfuser.fuser(), no_fallback(), passes.watching() as seen:
        for _ in range(CALLS):
            result = step(scripted, inputs, autocast)
    groups = [kinds(g) for outcome in seen for g in outcome.graph.findAllNodes(GROUP, True)]
    return scripted, result, groups


def in_one_piece(groups, ops):
    return any(set(ops.split()) <= {kind.partition("::")[2] for kind in group} for group in groups)


@pytest.mark.parametrize(
    "name, channels_last",
    [(name, False) for name in EXPECTED]
    + [("resnet_basic", True), *(pytest.param(n, True, marks=LONG) for n in ("resnet_bottleneck", "unet"))],
)
def test_training_is_fused_and_equals_eager(device, name, channels_last):
    plain, inputs = made(name, device, channels_last=channels_last)
    module = copy.deepcopy(plain)
    _, result, groups = fused(module, inputs)
    for _ in range(CALLS):
        expected = step(plain, inputs)
    assert_near(result, expected, terms=1000)
    for mine, theirs in zip(module.buffers(), plain.buffers()):
        assert torch.allclose(mine, theirs, rtol=1e-5, atol=1e-6)
    count, forward, backward = EXPECTED[name]
    assert len(groups) >= count
    if by_joint_graphs():
        forward = " ".join(JOINT.get(op, op) if "norm" in op else op for op in forward.split())
        backward = {"gpt": "silu_backward mul"}.get(name) or " ".join(
            JOINT.get(op, op) for op in backward.split()
        )
    assert in_one_piece(groups, forward) and in_one_piece(groups, backward)
    if channels_last:
        assert result[0].is_contiguous(memory_format=torch.channels_last) == expected[0].is_contiguous(
            memory_format=torch.channels_last
        )


@pytest.mark.parametrize("name", EXPECTED)
def test_inference_is_fused_and_equals_eager(device, name):
    plain, inputs = made(name, device)
    plain.eval()
    forget_types()
    scripted = torch.jit.script(plain)
    with tsfuser.fuser(), no_fallback(), torch.no_grad(), passes.watching() as seen:
        for _ in range(CALLS):
            out = scripted(*inputs)
    assert distance(out, plain(*inputs).detach()) < 1e-5
    assert any(outcome.graph.findAllNodes(GROUP, True) for outcome in seen)


@pytest.mark.parametrize(
    "name",
    [
        "resnet_basic",
        "encoder",
        "lstm",
        *(pytest.param(n, marks=LONG) for n in ("resnet_bottleneck", "unet", "gpt")),
    ],
)
def test_a_new_shape_of_a_known_class_compiles_nothing(device, name):
    module, inputs = made(name, device)
    plain, (_, second) = copy.deepcopy(module), made(name, device, "second")
    scripted, _, _ = fused(module, inputs)
    third = tuple(torch.cat([x, x]) if x.size(0) == inputs[0].size(0) else x for x in inputs)
    if name == "lstm":
        third = (torch.cat([inputs[0], inputs[0]], 1),)
    with tsfuser.fuser():
        for sizes in (second, third):  # the fallbacks of shapes that the guards do not let pass are compiled
            for _ in range(CALLS):
                step(scripted, sizes)
        with counted() as rise:
            for sizes in (inputs, second, third):
                step(scripted, sizes)
    assert rise["kernels_compiled"] == rise["plans_built"] == 0 and rise["launches"]
    plain.load_state_dict(module.state_dict())
    with tsfuser.fuser():
        assert_near(step(scripted, second), step(plain, second), terms=1000)


@pytest.mark.parametrize("name", ["resnet_basic", "encoder", "gpt"])
def test_training_with_autocast(device, name):
    """Groups keep more digits than eager, which rounds each result to bfloat16: both are near to float64."""
    plain, inputs = made(name, device)
    exact, wide = (
        copy.deepcopy(plain).double(),
        tuple(x.double() if x.is_floating_point() else x for x in inputs),
    )
    _, (out, gradients), groups = fused(copy.deepcopy(plain), inputs, torch.bfloat16)
    for _ in range(CALLS):
        (eager, theirs), (reference, truth) = step(plain, inputs, torch.bfloat16), step(exact, wide)
    assert out.dtype == eager.dtype
    assert off(out, reference) <= 2 * off(eager, reference) + EPSILON[torch.bfloat16]
    for name, want in truth.items():
        assert gradients[name].dtype == theirs[name].dtype
        assert off(gradients[name], want) <= 2 * off(theirs[name], want) + EPSILON[torch.bfloat16], name
    assert len(groups) >= 4


def off(value, reference):
    """The mean square error, in units of the mean square."""
    difference = value.double() - reference
    return float((difference.square().mean() / reference.square().mean().clamp(min=1e-12)).sqrt())


class Stack(torch.nn.Module):
    def __init__(self, layers, dropout):
        super().__init__()
        self.layers = torch.nn.ModuleList([models.EncoderLayer(32, 2, dropout) for _ in range(layers)])

    def forward(self, x: torch.Tensor, mask: torch.Tensor):
        for layer in self.layers:
            x = layer(x, mask)
        return x


@pytest.mark.parametrize("dropout", [0.1, pytest.param(0.0, marks=LONG)])
def test_every_layer_of_an_encoder_is_fused_under_autocast(device, dropout):
    """Autodiff takes all of it, so that no norm runs outside of groups, whichever layer it is of."""
    forget_types()
    layers = 3
    scripted = torch.jit.script(Stack(layers, dropout).to(device))
    inputs = (torch.randn(2, 6, 32, device=device), torch.zeros(6, 6, device=device))
    with tsfuser.fuser(), passes.watching() as seen:
        for _ in range(CALLS):
            step(scripted, inputs, torch.bfloat16)
    graphs = [outcome.graph for outcome in seen]
    fused = [kind for graph in graphs for node in graph.findAllNodes(GROUP, True) for kind in kinds(node)]
    for kind in ("aten::native_layer_norm", "aten::native_layer_norm_backward"):
        assert fused.count(kind) == 2 * layers
        assert not any(node for graph in graphs for node in graph.findAllNodes(kind, True))
    assert fused.count("aten::softmax") == 2 * layers  # the backward computes it again
