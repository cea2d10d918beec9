"""Compiled graphs with ops from outside torch: read from disk where the code by which an op is traced is what
it was, and only there."""

import builtins
import types
import warnings

import pytest
import torch

import tsfuser
from kit.stored_graphs import again, empty_store
from kit.support import assert_matches, run_python
from tsfuser.errors import Refusal
from tsfuser.frontends.dynamo.stored import custom_ops

#: An op with a derivative, as a program has it; the parts in braces are changed.
SOURCE = """
import torch

FACTOR = {factor}

def helper(gradient, scale):
    return gradient * scale * {helper}

@torch.library.custom_op("stored_ops::scaled", mutates_args=())
def scaled(x: torch.Tensor, scale: float{more}) -> torch.Tensor:
    return {kernel}

@scaled.register_fake
def _(x, scale{plain}):
    return {fake}

def setup(ctx, inputs, output):
    ctx.scale = {setup}

def made(shift):
    def backward(ctx, gradient, again=True):
        return {backward}
    return backward

scaled.register_autograd(made({shift}), setup_context=setup)
"""
PARTS = {
    "factor": "2.0",
    "helper": "FACTOR / 2",
    "more": "",
    "plain": "",
    "kernel": "x * scale",
    "fake": "torch.empty_like(x)",
    "setup": "inputs[1]",
    "backward": "helper(gradient, ctx.scale) + shift, None",
    "shift": "0",
}


def program(**parts):
    """The op's module, its names made anew, as in a process whose files hold this."""
    module = types.ModuleType("stored_ops_program")
    source = SOURCE.format(**{**PARTS, **parts})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the op was there before
        exec(builtins.compile(source, "stored_ops_program.py", "exec"), module.__dict__)
    return module


def called(module, *more):
    return lambda x: torch.tanh(module.scaled(x + 1, 0.5, *more)) * 3


def run(function, rows=4):
    x = (torch.arange(rows * 6.0).view(rows, 6) / 7).requires_grad_()
    y = function(x)
    y.sum().backward()
    return y.detach(), x.grad


@pytest.fixture(autouse=True)
def store(tmp_path):
    with empty_store(tmp_path / "cache", stored_graphs=True, stored_plans=True) as folder:
        yield folder


def check(function):
    """Compiles it as another process does, and compares with eager. Returns how many graphs were read."""
    found, wanted = run(again(function)), run(function)
    for ours, eagers in zip(found, wanted):
        assert_matches(ours, eagers, ops=40)
    return tsfuser.stats()["graphs_read"]


def test_what_was_traced_once_is_read():
    assert check(called(program())) == 0
    assert check(called(program())) == 1


CHANGES = [
    {"factor": "3.0"},
    {"helper": "FACTOR / 2 + 1"},
    {"fake": "torch.zeros_like(x)"},
    {"setup": "inputs[1] * 2"},
    {"backward": "gradient * ctx.scale, None"},
    {"shift": "1"},
    {"backward": "helper(gradient, ctx.scale) * (1 if again else 2) + shift, None"},
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: next(iter(change)))
def test_no_hit_where_the_traced_code_differs(change):
    assert check(called(program())) == 0
    assert check(called(program(**change))) == 0
    assert check(called(program(**change))) == 1
    assert check(called(program())) == 1


def test_no_hit_where_the_schema_differs():
    assert check(called(program())) == 0
    change = {"more": ", more: int = 3", "plain": ", more=3", "backward": "gradient * ctx.scale, None, None"}
    assert check(called(program(**change))) == 0


def test_the_kernel_is_that_of_the_process():
    check(called(program()))
    other = called(program(kernel="x * scale + 1"))
    (found, _), (wanted, _) = run(again(other)), run(other)
    assert tsfuser.stats()["graphs_read"] == 1
    assert_matches(found, wanted, ops=40)


UNSURE = {
    "an object": {"helper": "HOLDER.value"},
    "an import": {"fake": "__import__('json') and torch.empty_like(x)"},
    "a list": {"helper": "LIST[0]"},
    "ops by name": {"backward": "getattr(torch.ops, 'aten').mul(gradient, ctx.scale), None"},
}


@pytest.mark.parametrize("what", UNSURE)
def test_any_doubt_is_a_miss(store, what):
    for _ in range(2):
        module = program(**UNSURE[what])
        module.HOLDER, module.LIST = types.SimpleNamespace(value=2.0), [2.0]
        assert check(called(module)) == 0
    assert not list(store.glob("??/*.graph"))


def registered_elsewhere():
    library = torch.library.Library("stored_ops_other", "FRAGMENT")
    library.define("plus(Tensor x) -> Tensor")
    library.impl("plus", lambda x: x + 1, "CompositeExplicitAutograd")
    return library


def test_other_ways_to_register_are_a_miss(store):
    library = registered_elsewhere()
    x = torch.randn(3, 4)
    function = lambda x: torch.ops.stored_ops_other.plus(x * 2).relu() * 3
    for _ in range(2):
        assert torch.equal(again(function)(x), function(x))
    assert tsfuser.stats()["graphs_read"] == 0 and not list(store.glob("??/*.graph"))
    library._destroy()


def test_a_kernel_from_elsewhere_is_a_miss():
    op = program().scaled._opoverload
    custom_ops.of_op(op)
    library = torch.library.Library("stored_ops", "IMPL")
    library.impl("scaled", lambda x, scale: x * scale, "AutogradCPU")
    with pytest.raises(Refusal, match="may change"):
        custom_ops.of_op(op)
    library._destroy()


def test_ops_that_a_derivative_calls_belong_to_it():
    inner = """
import torch

@torch.library.custom_op("stored_ops::inner", mutates_args=())
def inner(x: torch.Tensor) -> torch.Tensor:
    return x * {factor}

@inner.register_fake
def _(x):
    return torch.{like}(x)
"""

    def both(like="empty_like", factor=4):
        holder = types.ModuleType("stored_ops_inner")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exec(
                builtins.compile(inner.format(like=like, factor=factor), "inner.py", "exec"), holder.__dict__
            )
        outer = program(backward="torch.ops.stored_ops.inner(gradient) * ctx.scale, None")
        outer.holder = holder
        return called(outer)

    assert check(both()) == 0
    assert check(both()) == 1
    assert check(both(like="zeros_like")) == 0
    assert check(both(factor=5)) == 1  # today's kernel


def test_precompiled_graphs_ask_for_their_ops():
    digests = custom_ops.of_module(torch.fx.symbolic_trace(lambda x: program().scaled._opoverload(x, 0.5)))
    assert list(digests) == ["stored_ops.scaled.default"] and custom_ops.are_unchanged(digests)
    program(kernel="x + scale")
    assert custom_ops.are_unchanged(digests)
    program(shift="2")
    assert not custom_ops.are_unchanged(digests)
    assert not custom_ops.are_unchanged({"stored_ops.none.default": ""})


def test_two_processes(store, tmp_path):
    source = (
        SOURCE.format(**PARTS)
        + """
import tsfuser
compiled = torch.compile(lambda x: torch.tanh(scaled(x + 1, 0.5)) * 3, backend="tsfuser")
x = torch.arange(24.0).view(4, 6).requires_grad_()
y = compiled(x)
y.sum().backward()
print(tsfuser.stats()["graphs_read"], y.sum().item(), x.grad.sum().item())
"""
    )
    settings = dict(TSFUSER_CACHE_DIR=str(store), TSFUSER_STORED_GRAPHS="1", TSFUSER_STORED_PLANS="1")
    first, second = (run_python(tmp_path, source, **settings)[1].split() for _ in range(2))
    assert (first[0], second[0]) == ("0", "1") and first[1:] == second[1:]
