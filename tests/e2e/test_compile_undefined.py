"""Undefined tensors as operands: FX writes None, although the op's schema says Tensor. The backward ops of
attention on a GPU take some."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing import assert_close

import tsfuser
from tsfuser.frontends.dynamo import watch
from tsfuser.frontends.dynamo.joint_graph.attention import part_plans
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


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3)])
def test_the_gradient_of_cudnns_attention_has_the_layout_of_its_result(order):
    def backward(gradient, out, lse, seed):
        op = aten._scaled_dot_product_cudnn_attention_backward
        return op(gradient.sin(), out, out, out, out, lse, seed, seed, None, None, None, 48, 48, 0.0, True)

    with FakeTensorMode():
        gradient = torch.empty(2, 4, 48, 64, dtype=torch.bfloat16)
        out = gradient.permute(order).contiguous().permute([order.index(d) for d in range(4)])
        lse, seed = torch.empty(2, 4, 48, 1), torch.empty((), dtype=torch.int64)
        module = make_fx(backward)(gradient, out, lse, seed)
        part_plans(module)
    (node,) = (n for n in module.graph.nodes if "attention" in n.name)
    assert node.args[0].meta["val"].stride() == out.stride()
    assert (node.args[0].target is aten.sin.default) == (order == (0, 1, 2, 3))
    assert math.copysign(1.0, node.args[13]) == -1.0  # its plans are no plans of eager code


@pytest.mark.usefixtures("fused_or_error")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("door", ["compile", "script"])
def test_gradients_of_attention_after_eager_code_with_another_layout_of_gradients(door):
    """Its query is contiguous, so its result is; the gradient that eager code has is not."""

    def function(q, k, v):
        out = F.scaled_dot_product_attention((q * 0.5).contiguous(), k * 2.0, v + 1.0)
        return (out.transpose(1, 2) * 2.0).cos()

    generator = torch.Generator("cuda").manual_seed(0)
    tensors = [
        torch.randn(2, 3, n, 64, device="cuda", dtype=torch.bfloat16, generator=generator)
        for n in (72, 136, 136)
    ]
    if door == "script":
        run = torch.jit.script(function)
    else:
        run = torch.compile(function, backend="tsfuser")
    found = []
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION), tsfuser.fuser():
        for called in (function, run, run, run, function):
            leaves = [x.clone().requires_grad_() for x in tensors]
            out = called(*leaves)
            out.float().square().sum().backward()
            found.append([leaf.grad.float() for leaf in leaves])
    for grads in found:
        for grad, eager in zip(grads, found[0]):
            assert (grad - eager).abs().max() <= 0.03 * eager.abs().max()


@pytest.mark.usefixtures("forgotten", "fused_or_error")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("kind", ["CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION"])
def test_attention_trains_in_whole_graphs(kind):
    def function(x, w):
        q, k, v = (x @ w).unflatten(-1, (3, 4, 64)).permute(2, 0, 3, 1, 4).unbind(0)
        q, k, v = q.sin() * 2, k.cos() * 2, v.sin() + 1
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).cos() * 2

    x = torch.randn(2, 32, 64, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(64, 768, device="cuda", dtype=torch.bfloat16) / 8
    found = []
    with sdpa_kernel(getattr(SDPBackend, kind)), watch.watching() as (_, outcomes):
        for run in (torch.compile(function, backend="tsfuser"), function):
            leaves = [x.clone().requires_grad_(), w.clone().requires_grad_()]
            out = run(*leaves)
            out.float().square().sum().backward()
            found.append((out.detach(), *(leaf.grad for leaf in leaves)))
    assert [o.origin.role for o in outcomes] == ["forward", "backward"]
    assert not any(o.foreign or o.failure for o in outcomes)
    for ours, eager in zip(*found):
        assert (ours.float() - eager.float()).abs().max() <= 0.03 * eager.float().abs().max()
