"""Batch and instance norm in and outside training, against eager and against eager in double: results,
running statistics, gradients."""

import pytest
import torch

import tsfuser
from kit.batch_norms import FORWARD, Normed, check, parameters
from kit.reductions import DTYPES, tensor
from kit.support import assert_matches, counted, fuse, groups, no_fallback, script

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
    check(function, x, parameters(3, device, dtype), True, 0.1)
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
    for own in (True, False):
        check(function, tensor(4, 3, 5, 6, device=device, dtype=dtype), parameters(3, device, dtype), own)
    check(function, tensor(1, 1, 9, device=device, dtype=dtype), parameters(1, device, dtype), True)


def test_a_large_mean_costs_no_accuracy(device):
    x = tensor(8, 3, 700, device=device) + 1e4
    function = Normed(
        "def f(x, m, v):\n    return torch.relu(torch.batch_norm(x, None, None, m, v, True, 0.1, 1e-5, "
        "False)) * 2.0\n"
    )
    m, v = (p.clone() for p in parameters(3, device)[2:])
    with tsfuser.fuser(), no_fallback():
        for _ in range(3):
            mine = m.clone(), v.clone()
            actual = (function.scripted(x, *mine), *mine)
    plain, exact = (m.clone(), v.clone()), (m.double(), v.double())
    eager = (function.plain(x, *plain), *plain)
    truth = (function.plain(x.double(), *exact), *exact)
    for a, e, r in zip(actual, eager, truth):
        assert float((a - r).abs().max()) <= 2 * float((e - r).abs().max()) + 2e-6 * float(r.abs().max())


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


# ---- derivatives


def trained(function, x, parameters, *rest, calls=1):
    """Result, running statistics and the gradients of x, weight and bias."""
    for _ in range(calls):
        leaves = [
            None if p is None else p.detach().clone(memory_format=torch.preserve_format).requires_grad_()
            for p in (x, *parameters[:2])
        ]
        statistics = [p.clone() for p in parameters[2:]]
        y = function(*leaves, *statistics, *rest)
        y.backward(tensor(*y.shape, seed=9).to(y.device, y.dtype))
    return [y.detach(), *statistics, *(p.grad for p in leaves if p is not None)]


def check_training(source, x, parameters, *rest, ops=64):
    function = Normed(source)
    with tsfuser.fuser(), no_fallback():
        actual = trained(function.scripted, x, parameters, *rest, calls=4)
    eager = trained(function.plain, x, parameters, *rest)
    exact = trained(function.plain, x.double(), [p.double() for p in parameters], *rest)
    for a, e, r in zip(actual, eager, exact):
        assert_matches(a, e, r, ops=ops, precision=x.dtype)
    assert {"aten::_batch_norm_impl_index", "aten::_batch_norm_impl_index_backward"} <= function.kinds


@pytest.mark.parametrize("training", [True, False])
def test_gradients(device, training):
    check_training(FORWARD, tensor(4, 3, 5, 6, device=device), parameters(3, device), training, 0.1)


def test_gradients_of_channels_last(device):
    x = tensor(4, 3, 5, 6, device=device).contiguous(memory_format=torch.channels_last)
    check_training(FORWARD, x, parameters(3, device), True, 0.1)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_gradients_in_other_dtypes(dtype):
    x = tensor(4, 3, 7, dtype=dtype)
    check_training(FORWARD, x, parameters(3, dtype=dtype), True, 0.1)
    if dtype == torch.bfloat16:
        check_training(FORWARD, x, parameters(3), True, 0.1)
        check_training(FORWARD, x, parameters(3), False, 0.1)


MASKED = """
def f(dy, x, w, mean, rstd, m, v, training: bool, mask: List[bool]):
    a, b, c = torch.ops.aten.native_batch_norm_backward(dy * 2.0, x, w, m, v, mean, rstd, training, 1e-5,
                                                        mask)
    found = [a][:0]
    if mask[0]:
        found.append(a)
    if mask[1]:
        found.append(b)
    if mask[2]:
        found.append(c)
    return found
"""


def test_gradients_that_are_masked_off(device):
    fused, plain = script(MASKED), script(MASKED)
    dy, x = tensor(4, 3, 5, device=device), tensor(4, 3, 5, device=device, seed=1)
    w, mean, m, v = parameters(3, device)
    masks = [[True] * 3] * 3 + [
        [True, False, False],
        [False, True, False],
        [False, False, True],
        [True, True, False],
    ]
    for training in (True, False):
        # eager's CUDA kernels take one or the other, by the mask
        saved = (mean, v) if training else (m, torch.rsqrt(v + 1e-5))
        inputs = (dy, x, w, *saved, m, v)
        for mask in masks:
            eager = plain(*inputs, training, mask)
            with tsfuser.fuser(), no_fallback():
                actual = fused(*inputs, training, mask)
            assert len(actual) == len(eager) == sum(mask)
            for a, e in zip(actual, eager):
                assert_matches(a, e, ops=64)
    assert groups(fused)


def test_gradcheck():
    source = FORWARD.replace("torch.relu(y)", "y * y")
    function = script(source)
    x, w, b = (
        p.requires_grad_()
        for p in (tensor(3, 2, 2, dtype=torch.float64), *parameters(2, dtype=torch.float64)[:2])
    )
    m, v = parameters(2, dtype=torch.float64)[2:]
    with tsfuser.fuser(), no_fallback():
        for _ in range(3):
            function(x, w, b, m, v, True, 0.1).sum().backward()
        assert torch.autograd.gradcheck(lambda *p: function(*p, m, v, True, 0.1), (x, w, b))


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
