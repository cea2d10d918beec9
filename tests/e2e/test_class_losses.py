"""Losses of class indices, and what else takes few elements of a tensor that its own group computes: the log
of a softmax is not stored for them."""

import re

import pytest
import torch
import torch.nn.functional as F

import tsfuser
from kit.lookups import indices
from kit.support import assert_matches, counted, fuse, groups, kinds, no_fallback, stored, train

pytestmark = [pytest.mark.filterwarnings("error::tsfuser.TsfuserWarning")]
HOST = pytest.mark.parametrize("target", ["cpu", "cpu-fibers"])
REDUCTIONS = ["none", "mean", "sum"]


def loss_of(name, reduction, weighted, ignored=-100):
    weight = "weight=w, " if weighted else ""
    how = f"{weight}reduction='{reduction}', ignore_index={ignored}"
    call = {"cross entropy": f"F.cross_entropy(x * 2.0, t, {how})",
            "nll": f"F.nll_loss(F.log_softmax(x, 1), t, {how})"}[name]  # fmt: skip
    space = {"F": F}
    exec(f"def f(x, t, w):\n    return {call}\n", space)
    return space["f"], call


def compiled(function):
    return torch.compile(function, backend="tsfuser", fullgraph=True)


def check(function, run, x, t, w):
    exact = function(x.double(), t, w.double())
    with no_fallback(), torch.no_grad():
        run(x, t, w)
        with counted() as rise:  # kernels that find a class out of range leave the rest to eager's ops
            found = run(x, t, w)
        assert_matches(found, function(x, t, w), exact, ops=60)
    assert rise["launches"]


@pytest.mark.each_value(("name", "reduction"), ("reduction", "weighted"))
@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize("name", ["cross entropy", "nll"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("ignored", [-100, 2])
def test_losses(device, target, name, reduction, weighted, ignored):
    function, _ = loss_of(name, reduction, weighted, ignored)
    run = compiled(function)
    for shape in [(7, 33), (1, 5), (300, 9)]:
        x, w = torch.randn(shape, device=device), torch.rand(shape[1], device=device)
        t = indices(shape[:1], shape[1], device)
        t[::3] = ignored
        check(function, run, x, t, w)
    check(function, run, x, t.fill_(ignored), w)  # all of them


@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("size", [(), (3,), (3, 5)], ids=str)
def test_dtypes_and_dims_behind_the_classes(device, dtype, size):
    function, _ = loss_of("cross entropy", "mean", True)
    x, w = torch.randn(6, 17, *size, device=device, dtype=dtype), torch.rand(17, device=device, dtype=dtype)
    check(function, compiled(function), x, indices((6, *size), 17, device), w)


@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_no_rows(device, reduction):
    function, _ = loss_of("cross entropy", reduction, False)
    x, t, w = torch.randn(0, 5, device=device), indices((0,), 5, device), torch.rand(5, device=device)
    with torch.no_grad():
        for found in (compiled(function), function):
            result = found(x, t, w)
            assert_matches(result, function(x, t, w))


@pytest.mark.usefixtures("forgotten")
def test_special_values(device):
    """What is not of the class of a row counts in its sum only; an ignored row counts not at all."""
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([[inf, 0.0, 1.0], [-inf, 0.0, 1.0], [nan, 1.0, 2.0], [0.0, -inf, -inf]], device=device)
    function, _ = loss_of("cross entropy", "none", False)
    run, w = compiled(function), torch.rand(3, device=device)
    for t in ([0, 0, 0, 0], [1, 1, 1, 1], [-100, 2, -100, 2]):
        check(function, run, x, torch.tensor(t, device=device), w)


@HOST
@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_class_out_of_range_raises_what_eager_raises(device, target, reduction):
    function, _ = loss_of("cross entropy", reduction, True)
    run, x, w = compiled(function), torch.randn(6, 5), torch.rand(5)
    with torch.no_grad():
        run(x, indices((6,), 5, device), w)
        for wrong in (5, -1, -99, 1 << 40):
            t = indices((6,), 5, device)
            t[4] = wrong
            with pytest.raises(IndexError) as expected:
                function(x, t, w)
            with pytest.raises(IndexError) as found:
                run(x, t, w)
            assert str(found.value).startswith(str(expected.value))


@pytest.mark.graphs
@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_the_log_of_the_softmax_is_not_stored(device, reduction):
    function, call = loss_of("nll", reduction, True)
    scripted = torch.jit.script(fresh_of(call))
    x, t, w = torch.randn(40, 50, device=device), indices((40,), 50, device), torch.rand(50, device=device)
    fuse(scripted, x, t, w)
    [group] = groups(scripted)
    assert kinds(group) == ["aten::log_softmax", "aten::nll_loss_nd"] and stored(group) == 1
    with no_fallback(), counted() as rise:
        assert_matches(scripted(x, t, w), function(x, t, w), ops=60)
    assert rise["launches"] == (1 if reduction == "none" else 2)


def fresh_of(call):
    import linecache

    source = f"def f(x, t, w):\n    return {call}\n"
    name = f"<loss {call}>"
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    space = {"F": F, "__name__": __name__}
    exec(compile(source, name, "exec"), space)
    return space["f"]


TAKEN = {
    "log_softmax": lambda x, i: torch.log_softmax(x, 1).gather(1, i),
    "softmax": lambda x, i: torch.softmax(x * 2.0, -1).gather(-1, i) * 3.0,
    "elementwise": lambda x, i: ((x * 2.0).tanh() + x.exp()).gather(1, i),
    "rows": lambda x, i: (x * 2.0).tanh().index_select(0, i[:3, 0]) + 1.0,
    "a bias": lambda x, i: (x + x[0]).tanh().gather(1, i),
    "a column": lambda x, i: (x + x[:, :1]).tanh().gather(1, i),
    "a sum": lambda x, i: (x - x.sum(1, keepdim=True)).gather(1, i),
    "a transpose": lambda x, i: torch.log_softmax(x.t(), 0).gather(0, i.t()),
    "a part of a cast": lambda x, i: torch.log_softmax((x * 2.0).double()[2:], 1).gather(1, i[2:]),
    "a part": lambda x, i: torch.log_softmax(x[2:, 3:], 1).gather(1, i[2:] // 2),
    "dims merged after it": lambda x, i: (
        torch.log_softmax(x.view(4, 3, -1), -1).view(12, -1).gather(1, i) * 2.0
    ),
    "its transpose": lambda x, i: torch.log_softmax(x, 1).t().gather(0, i.t()),
    "merged dims": lambda x, i: torch.log_softmax(x.view(4, 3, -1).view(12, -1), 1).gather(1, i),
    "other readers": lambda x, i: (torch.log_softmax(x, 1).gather(1, i), torch.log_softmax(x, 1) * 2.0),
    "a cast": lambda x, i: torch.log_softmax(x.double(), 1).gather(1, i),
    "16 bits": lambda x, i: torch.log_softmax(x.bfloat16().float(), 1).gather(1, i),
    "a row": lambda x, i: F.embedding(i[:1], (x * 2.0).exp()) + 1.0,
}


@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize("name", TAKEN)
def test_few_elements_of_a_tensor_are_computed_where_they_are(device, target, name):
    x, i = torch.randn(12, 40, device=device), indices((12, 2), 12, device)
    with no_fallback(), torch.no_grad():
        run = compiled(TAKEN[name])
        run(x, i)
        with counted() as rise:
            found = run(x, i)
        expected, exact = TAKEN[name](x, i), TAKEN[name](x.double(), i)
    parts = found if isinstance(found, tuple) else (found,)
    for part, eager, exactly in zip(
        parts, *((v if isinstance(v, tuple) else (v,)) for v in (expected, exact))
    ):
        assert_matches(part, eager, None if name == "16 bits" else exactly, ops=60)
    report = str(tsfuser.explain(run, x, i))
    assert rise["launches"] <= 2 and " in 1 group " in report
    assert re.search(r"group \d+: .*(gather|index_select|embedding)", report)


@pytest.mark.graphs
@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize("before", [torch.softmax, lambda x, dim: x - x.sum(dim, keepdim=True)])
def test_a_part_of_what_has_sums_is_stored_first(device, before):
    def function(x, i):
        return torch.log_softmax(before(x, 1)[2:], 1).gather(1, i[2:]) * 2.0 + before(x, 1)[2:].gather(
            1, i[2:]
        )

    x, i, run = torch.randn(12, 40, device=device), indices((12, 2), 12, device), compiled(function)
    with no_fallback(), torch.no_grad():
        assert_matches(run(x, i), function(x, i), function(x.double(), i), ops=60)
        report = str(tsfuser.explain(run, x, i))
    assert " in 2 groups " in report and "gather" in report.rpartition("group ")[2]


@pytest.mark.graphs
@pytest.mark.usefixtures("forgotten")
def test_what_is_taken_often_is_stored_first(device):
    def function(x, i):
        return (x * 2.0).tanh().index_select(0, i) + 1.0

    x, run = torch.randn(12, 40, device=device), compiled(function)
    with torch.no_grad():
        for count in (30, 2, 50):
            i = indices((count,), 12, device)
            assert_matches(run(x, i), function(x, i), ops=20)
    assert "2 groups" in str(tsfuser.explain(run, x, indices((30,), 12, device)))


@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_training(device, target, reduction):
    function, call = loss_of("cross entropy", reduction, True, ignored=3)
    x, w = torch.randn(20, 9, device=device, requires_grad=True), torch.rand(9, device=device)
    t = indices((20,), 9, device)
    exact = x.detach().double().requires_grad_()
    expected, (wanted,) = train(function, (exact, t, w.double()), calls=1)
    eager, (gradient,) = train(function, (x, t, w), calls=1)
    scripted = torch.jit.script(fresh_of(call))
    for run in (compiled(function), scripted):
        with tsfuser.fuser():
            found, (made,) = train(run, (x, t, w))
        assert_matches(found, eager, expected, ops=60)
        assert_matches(made, gradient, wanted, ops=60)
