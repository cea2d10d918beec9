"""Ops that a joint graph does twice alike are done once."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing import assert_close

from kit.support import assert_matches
from tsfuser.frontends.dynamo import watch
from tsfuser.frontends.dynamo.joint_graph.repeats import merge_repeats

pytestmark = pytest.mark.graphs


def ops_after(function, *args):
    """The kinds of nodes that `function` has once repeats are merged; its results are as before."""
    module = make_fx(function, tracing_mode="fake")(*args)
    before = module(*(a.clone() for a in args))
    merge_repeats(module)
    assert_close(module(*(a.clone() for a in args)), before, rtol=0, atol=0, equal_nan=True)
    module.graph.lint()
    return [node.target for node in module.graph.nodes if node.op == "call_function"]


def kinds(function, *args):
    return [op.__name__.split(".")[0] for op in ops_after(function, *args)]


X = torch.tensor([[-1.5, 0.0, 0.25], [2.0, -0.0, 3.0]])


def test_equal_ops_of_equal_operands_are_one():
    def function(x):
        return (x.sin() * 2).exp() + (x.sin() * 2).tanh()

    assert kinds(function, X) == ["sin", "mul", "exp", "tanh", "add"]


def test_what_is_read_before_and_after_a_write_is_read_twice():
    def function(x):
        y = x * 2
        rows = y.t()
        first = rows.sin()
        y.add_(1)
        return first.exp() + rows.sin()

    assert kinds(function, X).count("sin") == 2


def test_results_of_an_op_with_several_are_taken_once():
    def function(x):
        return x.max(1).values.exp() + x.max(1).values.tanh()

    assert kinds(function, X) == ["max", "getitem", "getitem", "exp", "tanh", "add"]


@pytest.mark.parametrize("one, other", [(0.0, -0.0), (1, True), (2.0, 3.0)])
def test_other_numbers_are_other_ops(one, other):
    def function(x):
        a, b = torch.ops.aten.mul.Scalar(x, one), torch.ops.aten.mul.Scalar(x, other)
        return 1 / a + 2 / b

    assert kinds(function, X).count("mul") >= 2


def test_results_stay_tensors_of_their_own():
    def function(x):
        y = x + 1
        return x.exp(), x.exp(), y.view(-1), y.view(-1), (x + 1).sum()

    assert kinds(function, X).count("exp") == kinds(function, X).count("view") == 2


def test_random_ops_are_drawn_each():
    module = make_fx(lambda x: torch.rand_like(x) - torch.rand_like(x), tracing_mode="fake")(X)
    merge_repeats(module)
    assert [str(n.target) for n in module.graph.nodes].count("aten.rand_like.default") == 2


def test_what_an_update_lies_between_is_read_twice():
    def function(x):
        before = x.sin().exp()
        x.copy_(before)
        return before * x.sin()

    assert kinds(function, X).count("sin") == 2


def test_ops_of_others_are_left_alone():
    with torch.library._scoped_library("tsfuser_test_repeats", "FRAGMENT") as library:
        library.define("plus_one(Tensor x) -> Tensor")
        library.impl("plus_one", lambda x: x + 1, "CompositeExplicitAutograd")
        op = torch.ops.tsfuser_test_repeats.plus_one.default
        assert ops_after(lambda x: op(x) * op(x).sin(), X).count(op) == 2


def test_sizes_are_computed_once():
    def function(x):
        return x.new_zeros(x.size(0) * 2).sin() + x.new_zeros(x.size(0) * 2).cos()

    module = make_fx(function, tracing_mode="symbolic")(X)
    merge_repeats(module)
    targets = [getattr(n.target, "__name__", str(n.target)) for n in module.graph.nodes]
    assert targets.count("mul") == 1
    assert_close(module(X), torch.ones(4))


@pytest.mark.parametrize("wanted", [True, False])
def test_it_is_ours_that_merges(monkeypatch, wanted):
    """Torch's pass, which imports inductor, does not run; and nothing merges where the user wants that."""
    from torch._functorch import config, partitioners

    import tsfuser.frontends.dynamo.joint_graph.partition as ours

    def theirs(graph):
        raise AssertionError("torch's pass ran")

    calls = []
    monkeypatch.setattr(partitioners, "fx_graph_cse", theirs)
    monkeypatch.setattr(ours, "merge_repeats", lambda joint: calls.append(joint) or merge_repeats(joint))
    torch._dynamo.reset()
    x = X.clone().requires_grad_()
    with config.patch(cse=wanted):
        torch.compile(lambda x: (x.sin().exp() + x.sin().tanh()).sum(), backend="tsfuser")(x).backward()
    assert len(calls) == wanted
    assert_close(x.grad, X.cos() * (X.sin().exp() + 1 - X.sin().tanh() ** 2))


def test_inference_casts_a_tensor_once():
    """Under autocast each layer casts its operand."""
    layers = torch.nn.ModuleList(torch.nn.Linear(8, 8, bias=False) for _ in range(3))

    def function(x):
        y = torch.exp(x) + 1
        with torch.autocast("cpu", torch.bfloat16):
            return sum(layer(y) for layer in layers)

    x = torch.randn(4, 8)
    with watch.watching() as (_, outcomes), torch.no_grad():
        ours = torch.compile(function, backend="tsfuser")(x)
        assert_matches(ours, function(x), ops=32)
    nodes = outcomes[0].programs[""][0].graph.nodes()
    assert [n.outputsSize() for n in nodes if n.kind() == "prim::CudaFusionGroup"] == [1, 1]
