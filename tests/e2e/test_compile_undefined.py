"""Undefined tensors as operands: FX writes None, although the op's schema says Tensor. The backward ops of
attention on a GPU take some."""

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing import assert_close

from tsfuser.frontends.dynamo.program import compile_graph
from tsfuser.frontends.dynamo.settings import Settings
from tsfuser.frontends.dynamo.translation.translate import translate

aten = torch.ops.aten


@pytest.fixture
def op():
    with torch.library._scoped_library("tsfuser_test_undefined", "FRAGMENT") as library:
        library.define("add_if_given(Tensor x, Tensor y) -> Tensor")
        library.impl("add_if_given", lambda x, y: x + 1 if y is None else x + y, "CompositeExplicitAutograd")
        yield torch.ops.tsfuser_test_undefined.add_if_given


def test_an_op_gets_the_undefined_tensor(op, device):
    def function(x):
        y = op((x * 2).tanh(), None)
        return op(y, y.exp()).sin() * 3

    x = torch.randn(5, 7, device=device)
    module = make_fx(function)(x)
    assert not translate(module).foreign
    assert_close(compile_graph(module, Settings())([x])[0], function(x))


def backward_of_cudnn(q, lse, seed):
    op = aten._scaled_dot_product_cudnn_attention_backward
    return op(q, q, q, q, q, lse, seed, seed, None, None, None, 64, 64, 0.0, True)


def backward_of_flash(q, lse, seed):
    op = aten._scaled_dot_product_flash_attention_backward
    return op(q, q, q, q, q, lse, None, None, 64, 64, 0.0, True, seed, seed)


@pytest.mark.parametrize("backward", [backward_of_cudnn, backward_of_flash])
def test_the_backward_of_attention_does_not_cut_a_graph(backward):
    with FakeTensorMode():
        q = torch.empty(2, 4, 64, 64, device="cuda", dtype=torch.bfloat16)
        lse = torch.empty(2, 4, 64, 1, device="cuda")
        seed = torch.empty((), device="cuda", dtype=torch.int64)
        module = make_fx(backward)(q, lse, seed)
        assert not translate(module).foreign


@pytest.mark.parametrize("kind", ["FLASH_ATTENTION", "CUDNN_ATTENTION"])
def test_attention_trains_in_two_calls(device, kind):
    """One for the forward, one for the backward."""
    if device != "cuda" and kind == "CUDNN_ATTENTION":
        pytest.skip("needs a GPU")

    def function(x):
        with torch.nn.attention.sdpa_kernel(getattr(torch.nn.attention.SDPBackend, kind)):
            q, k, v = (x * w for w in (0.5, 1.5, 2.5))
            y = torch.nn.functional.scaled_dot_product_attention(q.tanh(), k.sigmoid(), v, is_causal=True)
        return y.sin() * 2

    torch._dynamo.reset()
    x = torch.randn(2, 4, 64, 64, device=device).to(torch.bfloat16 if device == "cuda" else torch.float32)
    x.requires_grad_()
    compiled = torch.compile(function, backend="tsfuser", fullgraph=True)
    compiled(x).sum().backward()
    x.grad = None
    with torch.profiler.profile() as profile:
        y = compiled(x)
        y.sum().backward()
    assert [e.name for e in profile.events()].count("tsfuser_graph") == 2
    found, x.grad = x.grad, None
    expected = function(x)
    expected.sum().backward()
    assert_close(y, expected, atol=6e-2 if device == "cuda" else 1e-5, rtol=2e-2)
    assert_close(found, x.grad, atol=0.1 if device == "cuda" else 1e-5, rtol=5e-2)
