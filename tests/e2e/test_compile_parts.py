"""Which ops torch.compile's graphs keep whole, and which become several."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import tsfuser
from kit.support import assert_matches
from tsfuser.frontends.dynamo.tracing.decompositions import decompositions
from tsfuser.frontends.dynamo.tracing.whole_ops import whole_ops

aten = torch.ops.aten
LONG = pytest.mark.long
SCALED = [
    ({"scale_factor": 2.0}, 4),
    ({"size": (7, 9)}, 4),
    pytest.param({"size": 9}, 3, marks=LONG),
    pytest.param({"scale_factor": 2}, 5, marks=LONG),
    ({"scale_factor": 1.5, "mode": "nearest-exact"}, 4),
    ({"scale_factor": 2, "mode": "linear"}, 3),
    pytest.param({"scale_factor": 1.5, "mode": "bilinear"}, 4, marks=LONG),
    ({"scale_factor": 2, "mode": "bilinear", "align_corners": True}, 4),
    ({"size": (6, 7, 8), "mode": "trilinear"}, 5),
    ({"scale_factor": 2, "mode": "bicubic"}, 4),
]


@pytest.mark.graphs
@pytest.mark.usefixtures("forgotten", "fused_or_error")
@pytest.mark.parametrize(
    "choices, dims", SCALED, ids=lambda x: x.get("mode", "nearest") if type(x) is dict else f"{x}d"
)
def test_images_are_scaled_as_in_eager_whatever_their_sizes(choices, dims, device):
    def function(x):
        return F.interpolate(torch.sigmoid(x) * 2, **choices).relu() - 0.5

    compiled = torch.compile(function, backend="tsfuser", fullgraph=True)
    for more in range(3):  # the second call has sizes that vary
        x = torch.randn(2, 3, *(4 + more + d for d in range(dims - 2)), device=device, requires_grad=True)
        y = compiled(x)
        gradient = torch.randn_like(y)
        found = torch.autograd.grad(y, x, gradient)
        exact = x.detach().double().requires_grad_()
        for a, b, c in zip((y, *found), *map(_with_gradient, (function,) * 2, (x, exact), (gradient,) * 2)):
            assert_matches(a, b, c, ops=400)
        if not more:
            assert "upsample" in str(tsfuser.explain(compiled, x))


def _with_gradient(function, x, gradient):
    y = function(x)
    return y, *torch.autograd.grad(y, x, gradient.to(y.dtype))


def test_afterwards_the_ops_are_as_they_were():
    op = aten.upsample_nearest2d.vec
    before = dict(op.py_kernels)
    with pytest.raises(KeyError), whole_ops(sizes_vary=False):
        assert op.py_kernels != before
        raise KeyError
    assert op.py_kernels == before


def traced(device, bias):
    """The ops of the backward of a convolution."""
    with FakeTensorMode():
        tensors = [torch.empty(s, device=device) for s in ((2, 4, 5, 6), (2, 3, 5, 6), (4, 3, 3, 3))]

        def backward(gradient, x, w):
            mask = [True, True, bias]
            return aten.convolution_backward(
                gradient, x, w, [4], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, mask
            )

        graph = make_fx(backward, decompositions())(*tensors).graph
    return [node for node in graph.nodes if node.op == "call_function" and node.target.__name__ != "getitem"]


@pytest.mark.parametrize("device, ops", [("cuda", ["convolution", "view", "add"]), ("cpu", ["convolution"])])
def test_on_a_gpu_a_bias_is_an_addition(device, ops):
    with FakeTensorMode():
        tensors = [torch.empty(s, device=device) for s in ((2, 3, 5, 6), (4, 3, 3, 3), (4,))]
        graph = make_fx(torch.nn.functional.conv2d, decompositions())(*tensors).graph
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    assert [node.target.overloadpacket.__name__ for node in nodes] == ops
    assert (nodes[0].args[2] is None) is (device == "cuda")


@pytest.mark.parametrize("device, bias, ops", [("cuda", True, 2), ("cuda", False, 1), ("cpu", True, 1)])
def test_on_a_gpu_the_gradient_of_a_bias_is_a_sum(device, bias, ops):
    nodes = traced(device, bias)
    assert len(nodes) == ops
    if ops == 2:
        whole, total = nodes
        assert whole.args[-1] == [True, True, False]
        assert total.target is aten.sum.dim_IntList and total.args[1] == [0, 2, 3]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gradients_of_a_convolution(forgotten):
    x = torch.randn(4, 3, 9, 10, device="cuda", requires_grad=True)
    convolution = torch.nn.Conv2d(3, 8, 3, padding=1, device="cuda")
    compiled = torch.compile(lambda x: torch.tanh(convolution(x)), backend="tsfuser")
    leaves = (x, *convolution.parameters())
    found = torch.autograd.grad(compiled(x).square().sum(), leaves)
    for a, b in zip(found, torch.autograd.grad(torch.tanh(convolution(x)).square().sum(), leaves)):
        assert_matches(a, b, ops=2000)
