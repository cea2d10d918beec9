"""Batch and instance norm in and outside training, against eager and against eager in double: the forms of
the op, and running statistics, which they change in place. Gradients are in test_normalization.py."""

import pytest
import torch

import tsfuser
from kit.batch_norms import FORWARD, Normed, check, parameters
from kit.reductions import DTYPES, tensor
from kit.support import assert_matches, counted, fuse, no_fallback, script

pytestmark = pytest.mark.usefixtures("single_nodes")


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_training_and_evaluation(device, memory_format):
    function = Normed(FORWARD)
    x = tensor(4, 3, 5, 6, device=device).contiguous(memory_format=memory_format)
    for training in (True, False):
        check(function, x, parameters(3, device), training, 0.1)
    check(function, x, parameters(3, device), True, 0.25)
    assert "aten::batch_norm" in function.kinds


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_dtypes(target, device, dtype):
    if target == "cpu-fibers" and dtype != torch.bfloat16:
        pytest.skip("on the other targets")
    function = Normed(FORWARD)
    x = tensor(4, 3, 7, device=device, dtype=dtype)
    for training in (True, False):
        check(function, x, parameters(3, device, dtype), training, 0.1)
    if dtype.itemsize == 2:
        check(function, x, parameters(3, device), True, 0.1)
        check(function, x, parameters(3, device), False, 0.1)


@pytest.mark.parametrize(
    "sizes", [(5, 3), (1, 1, 2), (1, 3, 4), (7, 1, 3, 1), (2, 33, 17), (3, 2, 3, 2, 5)], ids=str
)
def test_sizes(target, device, sizes):
    if target == "cpu-fibers" and sizes not in ((1, 1, 2), (2, 33, 17)):
        pytest.skip("on the other targets")
    check(Normed(FORWARD), tensor(*sizes, device=device), parameters(sizes[1], device), True, 0.1)


def test_a_single_value_a_channel_has_no_unbiased_variance():
    actual = check(Normed(FORWARD), tensor(1, 3, 1), parameters(3), True, 0.1)
    assert torch.isnan(actual[-1]).all()


def test_without_parameters_or_running_statistics(target, device):
    if target == "cpu-fibers":
        pytest.skip("on the other targets")
    w, b, m, v = parameters(3, device)
    x = tensor(4, 3, 5, device=device)
    for left in ((None, None, m, v), (w, b, None, None), (None, b, m, v)):
        args = ", ".join("None" if p is None else name for p, name in zip(left, "wbmv"))
        check(Normed(FORWARD.replace("x * 2.0, w, b, m, v", f"x * 2.0, {args}")), x, (w, b, m, v), True, 0.1)


@pytest.mark.parametrize("name", ["permuted", "sliced", "expanded", "narrow"])
def test_layouts(name):
    x = {
        "permuted": tensor(4, 5, 6, 3).permute(2, 0, 1, 3),
        "sliced": tensor(4, 3, 5, 12)[..., ::2],
        "expanded": tensor(4, 3, 5, 1).expand(4, 3, 5, 6),
        "narrow": tensor(4, 1, 5, 6).contiguous(memory_format=torch.channels_last),
    }[name]
    source = FORWARD.replace("x * 2.0", "x").replace(" + x", "")
    for training in (True, False):
        check(Normed(source), x, parameters(x.size(1)), training, 0.1)


@pytest.mark.parametrize("sizes", [(1, 2, 2, 1), (1, 12, 3, 1), (3, 5, 1, 1)], ids=str)
def test_strides_of_dims_of_size_1_do_not_count(sizes):
    source = FORWARD.replace("x * 2.0", "x").replace(" + x", "")
    for order in ((3, 2, 1, 0), (0, 2, 3, 1)):
        back = [order.index(d) for d in range(4)]
        check(
            Normed(source), tensor(*(sizes[d] for d in order)).permute(back), parameters(sizes[1]), True, 0.1
        )


NATIVE = """
def f(x, w, b, m, v, training: bool):
    y, mean, rstd = torch.native_batch_norm(x * 2.0, w, b, m, v, training, 0.1, 1e-5)
    return torch.relu(y), mean, rstd
"""
INDEXED = """
def f(x, w, b, m, v, training: bool):
    y, mean, rstd, reserve, index = torch._batch_norm_impl_index(
        x * 2.0, w, b, m, v, training, 0.1, 1e-5, False)
    return torch.relu(y), mean, rstd, reserve, index
"""


FUNCTIONAL = """
def f(x, w, b, m, v, training: bool):
    y, mean, rstd, p, q = torch.ops.aten._native_batch_norm_legit_functional(
        x * 2.0, w, b, m, v, training, 0.1, 1e-5)
    return torch.relu(y), mean, rstd, p, q
"""
LEGIT = """
def f(x, w, b, m, v, training: bool):
    y, mean, rstd = torch.ops.aten._native_batch_norm_legit(x * 2.0, w, b, m, v, training, 0.1, 1e-5)
    z, p, q = torch.ops.aten._native_batch_norm_legit(x, w, b, True, 0.1, 1e-5)
    return torch.relu(y), mean, rstd, torch.relu(z), p, q
"""


@pytest.mark.parametrize("source", [FUNCTIONAL, LEGIT], ids=["functional", "legit"])
def test_forms_that_say_what_they_change(source):
    function = Normed(source)
    check(function, tensor(4, 3, 5), parameters(3), True)
    check(function, tensor(4, 3, 5, dtype=torch.bfloat16), parameters(3), True)


@pytest.mark.parametrize("source", [NATIVE, INDEXED], ids=["native", "indexed"])
def test_what_is_saved(target, device, source):
    if target == "cpu-fibers" and source == NATIVE:
        pytest.skip("on the other targets")
    function = Normed(source)
    for training in (True, False):
        if training or source == NATIVE or device == "cpu":  # else cuDNN, which saves nothing
            check(function, tensor(4, 3, 5, device=device), parameters(3, device), training)
    x = tensor(4, 3, 5, device=device, dtype=torch.bfloat16)
    check(function, x, parameters(3, device), True)
    check(function, x, parameters(3, device, torch.bfloat16), True)


INSTANCE = """
def f(x, w, b, m, v, own: bool):
    return torch.relu(torch.instance_norm(x * 2.0, w, b, m, v, own, 0.1, 1e-5, False)) + x
"""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_instance_norm(target, device, dtype):
    if target == "cpu-fibers" and dtype == torch.bfloat16:
        pytest.skip("on the other targets")
    function = Normed(INSTANCE)
    x = tensor(4, 3, 5, 6, device=device, dtype=dtype)
    for own in (True, False):
        check(function, x, parameters(3, device, dtype), own)
    check(function, x.contiguous(memory_format=torch.channels_last), parameters(3, device, dtype), True)
    check(function, tensor(1, 1, 9, device=device, dtype=dtype), parameters(1, device, dtype), True)


# ---- changes in place


def test_readers_of_the_running_statistics_see_what_eager_sees(device):
    """Before and after the change; the groups keep the order, or leave it to the original nodes."""
    source = """
def f(x, m, v):
    before = m * 2.0
    y = torch.relu(torch.batch_norm(x * 2.0, None, None, m, v, True, 0.1, 1e-5, False))
    again = torch.relu(torch.batch_norm(y * 2.0, None, None, m, v, True, 0.1, 1e-5, False))
    return before, y, again, m * 2.0 + v
"""
    fused, plain = script(source), script(source)
    x, (m, v) = tensor(4, 3, 5, device=device), parameters(3, device)[2:]
    for _ in range(4):
        mine, eager = (m.clone(), v.clone()), (m.clone(), v.clone())
        with tsfuser.fuser(), no_fallback():
            actual = fused(x, *mine)
        for a, e in zip((*actual, *mine), (*plain(x, *eager), *eager)):
            assert_matches(a, e, ops=16)


def test_statistics_that_share_memory_are_left_to_eager(device):
    function = Normed(FORWARD)
    x, (w, b, m, v) = tensor(4, 3, 5, device=device), parameters(3, device)
    check(function, x, (w, b, m, v), True, 0.1)

    def shared(f):
        both = m.clone()
        return f(x, w, b, both, both, True, 0.1), both

    with tsfuser.fuser(), counted() as rise:
        actual = shared(function.scripted)
    assert rise["launches"] == 0 and sum(rise["fallbacks"].values()) == 1
    for a, e in zip(actual, shared(function.plain)):
        assert_matches(a, e, ops=16)
    check(function, x, (w, b, m, v), True, 0.1)


def test_a_failed_compile_changes_the_statistics_once(device, monkeypatch):
    from tsfuser.errors import CompileError
    from tsfuser.planning import compile as pipeline

    def fail(*args):
        raise CompileError("the compiler failed")

    monkeypatch.setattr(pipeline, "functions", fail)
    function = Normed(FORWARD)
    x, (w, b, m, v) = tensor(4, 3, 5, device=device), parameters(3, device)
    tsfuser.reset()
    with tsfuser.fuser(), pytest.warns(tsfuser.TsfuserWarning, match="the compiler failed"):
        for _ in range(3):
            mine, eager = (m.clone(), v.clone()), (m.clone(), v.clone())
            function.scripted(x, w, b, *mine, True, 0.1)
    function.plain(x, w, b, *eager, True, 0.1)
    for a, e in zip(mine, eager):
        assert_matches(a, e, ops=16)
    tsfuser.reset()


def test_a_result_that_nobody_uses_still_changes_the_statistics():
    """In the graph as the pass gets it: torch drops such nodes itself, if it may."""
    source = """
def f(x, m, v):
    y = torch.relu(torch.batch_norm(x * 2.0, None, None, m, v, True, 0.1, 1e-5, False))
    return x * 3.0
"""
    x, (m, v) = tensor(4, 3, 5), parameters(3)[2:]
    fused, plain = script(source), script(source)
    for _ in range(4):
        mine, eager = (m.clone(), v.clone()), (m.clone(), v.clone())
        with tsfuser.fuser():
            fused(x, *mine)
        plain(x, *eager)
        for a, e in zip(mine, eager):
            assert_matches(a, e, ops=16)


def test_results_of_which_only_sizes_are_asked_still_change_the_statistics(device):
    source = """
def f(x, m, v):
    y = torch.batch_norm(x * 2.0, None, None, m, v, True, 0.1, 1e-5, False)
    z = torch.relu(y) * 2.0
    return z.size(), (x * 3.0).relu()
"""
    x, (m, v) = tensor(4, 3, 5, device=device), parameters(3, device)[2:]
    fused, plain = script(source), script(source)
    with tsfuser.fuser():
        for _ in range(3):
            mine, eager = (m.clone(), v.clone()), (m.clone(), v.clone())
            assert fused(x, *mine)[0] == [4, 3, 5]
    plain(x, *eager)
    for a, e in zip(mine, eager):
        assert_matches(a, e, ops=16)


def test_a_module(target, device):
    """Its counter, and its statistics over some steps, of which the first are profiled and the last are
    fused."""
    if target == "cpu-fibers":
        pytest.skip("on the other targets")

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = torch.nn.BatchNorm2d(3)

        def forward(self, x):
            return torch.relu(self.norm(x * 2.0)) + x

    plain = Block().to(device)
    scripted = torch.jit.script(Block().to(device))
    for step in range(5):
        x = tensor(4, 3, 5, 6, device=device, seed=step)
        mine, own = (x.clone().requires_grad_() for _ in range(2))
        with tsfuser.fuser(), counted() as rise:
            y = scripted(mine)
            y.sum().backward()
        z = plain(own)
        z.sum().backward()
        for a, e in ((y.detach(), z.detach()), (mine.grad, own.grad)):
            assert_matches(a, e, ops=64)
    assert rise["launches"] > 0 and not rise["fallbacks"]
    for a, e in zip(scripted.buffers(), plain.buffers()):
        assert_matches(a, e, ops=64)
    for module in (scripted, plain):
        module.eval()
    assert_matches(fuse(scripted, x)(x), plain(x), ops=64)
