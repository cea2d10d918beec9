"""Compiled optimizers, and all else that does the same to many tensors, as few launches: on CUDA, and where
fibers run what a GPU would get. Kernels for CPU tensors are launched one by one."""

import pytest
import torch
from torch import nn

import tsfuser
from kit.support import assert_matches
from tsfuser.frontends.dynamo.groups import gradient_casts, weight_casts

pytestmark = pytest.mark.usefixtures("forgotten", "fused_or_error")

SHAPES = [(5, 7), (33,), (130, 5), (2, 3, 4), (64, 32), (700,), (1, 9)]


def compiled(function, **choices):
    return torch.compile(function, backend="tsfuser", **choices)


def launches(function, *args):
    """What it gives, and by how many launches."""
    before = tsfuser.stats()["launches"]
    found = function(*args)
    return found, tsfuser.stats()["launches"] - before


def expected(target, many, few):
    return many if target == "cpu" else few


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=3e-3, foreach=True, weight_decay=0.2, amsgrad=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=3e-2, foreach=True, momentum=0.7),
    "adam in a loop": lambda p: torch.optim.Adam(p, lr=3e-3, foreach=False),
    "one op": lambda p: torch.optim.SGD(p, lr=3e-2, foreach=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_of_an_optimizer_is_a_launch_a_kernel(name, device, target):
    """The parameters of two dtypes are two kernels."""
    dtypes = [torch.float32, torch.float64]
    ours = [nn.Parameter(torch.randn(s, device=device, dtype=d)) for d in dtypes for s in SHAPES]
    theirs, exact = ([nn.Parameter(p.detach().to(d)) for p in ours] for d in (None, torch.double))
    steps = [OPTIMIZERS[name](p).step for p in (ours, theirs, exact)]
    steps[0] = compiled(steps[0])
    counts = []
    for _ in range(5):
        for p, q, r in zip(ours, theirs, exact):
            p.grad = torch.randn_like(p)
            q.grad, r.grad = p.grad.clone(), p.grad.double()
        counts.append(launches(steps[0])[1])
        for step in steps[1:]:
            step()
    for p, q, r in zip(ours, theirs, exact):
        assert_matches(p.detach(), q.detach(), r.detach(), 100)
    assert counts[-1] == expected(target, 0 if name == "one op" else len(ours), 2)
    assert tsfuser.stats()["fallbacks"] == {}


def added(xs, ys):
    return torch._foreach_sigmoid(torch._foreach_add(xs, ys))


def tensors(sizes, device):
    return [[torch.randn(n, device=device) for n in sizes] for _ in range(2)]


def test_another_number_of_tensors_of_other_sizes_compiles_nothing(device, target):
    run, made = compiled(added), []
    for sizes in (range(3, 9), (5, 64, 300, 7), range(20, 40)):
        xs, ys = tensors(sizes, device)
        for _ in range(2):
            found, count = launches(run, xs, ys)
            for ours, plain in zip(found, added(xs, ys)):
                assert_matches(ours, plain, ops=8)
        assert count == expected(target, len(sizes), 1)
        made.append(tsfuser.stats()["kernels_compiled"] + tsfuser.stats()["disk_hits"])
    assert made == [1, 1, 1]


def test_a_few_tensors_are_launched_one_by_one(device):
    """And by the kernel in its usual form, which others may have, too."""
    xs, ys = tensors((4, 5, 6), device)
    run = compiled(added)
    for _ in range(2):
        found, count = launches(run, xs, ys)
    for ours, plain in zip(found, added(xs, ys)):
        assert_matches(ours, plain, ops=8)
    assert count == 3


def test_more_tensors_than_a_table_has_room_for(device, target):
    xs, ys = tensors(range(1, 151), device)
    run = compiled(added)
    for _ in range(2):
        found, count = launches(run, xs, ys)
    for ours, plain in zip(found, added(xs, ys)):
        assert_matches(ours, plain, ops=8)
    assert expected(target, 149, 1) < count <= expected(target, 150, 3)


def test_groups_that_read_each_other_are_launched_one_after_the_other(device, target):
    """Level by level: chains of two groups, which a product keeps apart in one of them."""

    def function(xs, ys):
        firsts = [torch.sigmoid(x + y) for x, y in zip(xs, ys)]
        total = sum(firsts[1:], firsts[0])
        return [torch.tanh(first.t() @ total) * 2 for first in firsts], firsts

    xs, ys = ([torch.randn(6, 6, device=device) for _ in range(5)] for _ in range(2))
    run = compiled(function)
    for _ in range(3):
        for ours, plain in zip(run(xs, ys), function(xs, ys)):
            for a, b in zip(ours, plain):
                assert_matches(a, b, ops=60)


def test_tensors_of_no_elements_and_tensors_that_are_let_go(device):
    """What a program drops right away lies where the next allocation may be."""

    def function(xs):
        return torch._foreach_tanh(torch._foreach_mul([x @ x for x in xs], 2))

    sizes = (0, 8, 8, 8, 0, 8)
    run, xs = compiled(function), [torch.randn(n, n, device=device) for n in sizes]
    for _ in range(3):
        for a, b in zip(run(xs), function(xs)):
            assert_matches(a, b, ops=40)


def test_random_numbers_are_those_of_the_same_seed(device):
    def function(xs):
        return [torch.nn.functional.dropout(x * 2, 0.5) + 1 for x in xs]

    run, xs = compiled(function), [torch.randn(40, device=device) for _ in range(5)]
    run(xs)
    found = []
    for _ in range(2):
        torch.manual_seed(3)
        found.append(run(xs))
    for a, b, x in zip(*found, xs):
        assert torch.equal(a, b)
        assert ((a == 1) | torch.isclose(a, 4 * x + 1)).all()


def test_an_observer_sees_each_group_by_itself(device, target):
    xs, ys = tensors(range(3, 9), device)
    run = compiled(added)
    run(xs, ys)
    report = tsfuser.check(run, xs, ys)
    assert report.compared and not report.unfused


WIDTHS = (8, 16, 24, 8, 40, 16)


def cast_weights(device, count=5, bias=False):
    """Launches of forward and backward, which cast `count` weights and their gradients, from the second step
    on. Results are eager's."""
    torch.manual_seed(3)
    layers = [nn.Linear(a, b, bias=bias, device=device) for a, b in zip(WIDTHS, WIDTHS[1:])][:count]
    model, x = nn.Sequential(*layers), torch.randn(6, WIDTHS[0], device=device)
    found = []
    function = compiled(model)
    for run in (model, function, function, function):
        model.zero_grad()
        with torch.autocast(x.device.type, torch.bfloat16):
            out, forward = launches(run, x)
        _, backward = launches(lambda: out.sum().backward())
        found.append([out, *(p.grad for p in model.parameters())])
    for results in found[1:]:
        for given, eager in zip(results, found[0]):
            assert given.dtype == eager.dtype and given.stride() == eager.stride()
            torch.testing.assert_close(given, eager, rtol=0.02, atol=0.02)  # a few roundings to bfloat16
    return forward, backward


def test_weights_and_their_gradients_are_cast_by_one_launch_each(device, target):
    """For CPU tensors, and where they are few, the weights are cast by torch's op."""
    assert cast_weights(device) == expected(target, (0, 5), (1, 1))
    assert cast_weights(device, 2) == (0, 2)


def test_biases_are_cast_with_the_weights(device, target):
    """They are read by products, and not kept."""
    forward, _ = cast_weights(device, bias=True)
    assert forward == expected(target, 0, 1)


def test_an_inference_casts_a_weight_where_it_is_read(device, monkeypatch):
    monkeypatch.setattr(weight_casts, "_SMALL", 0)
    weights = [torch.randn(8, 8, device=device) for _ in range(5)]

    def function(x):
        for weight in weights:
            x = x.bfloat16() @ weight.bfloat16()
        return x

    x = torch.randn(3, 8, device=device)
    found, count = launches(compiled(function), x)
    wanted = function(x)
    torch.testing.assert_close(found, wanted, rtol=0.05, atol=0.05 * wanted.abs().max().item())
    assert count == 0


@pytest.mark.parametrize("most, few", [(16 * 24 * 4, 5), (4 * (16 * 40 + 40 * 8 + 8 * 24 + 24 * 16), 2)])
def test_a_launch_casts_no_more_than_its_part(device, target, monkeypatch, most, few):
    """The backward begins with the last weight. Parts of less than four are launched one by one."""
    monkeypatch.setattr(gradient_casts, "_TOGETHER", most)
    assert cast_weights(device)[1] == expected(target, 5, few)


def test_a_gradient_that_is_read_is_cast_where_it_is_made(device, target):
    """Of five weights, two are one: their gradients are added."""
    weights = [torch.randn(8, 8, device=device, requires_grad=True) for _ in range(4)]

    def function(x):
        for weight in (*weights, weights[1]):
            x = (x.bfloat16() @ weight.bfloat16()).float()
        return x

    function, x = compiled(function), torch.randn(5, 8, device=device)
    for _ in range(2):
        given = torch.autograd.grad(function(x).sum(), weights)
    exact = x.double()
    doubles = [w.detach().double().requires_grad_() for w in weights]
    for weight in (*doubles, doubles[1]):
        exact = exact @ weight
    for a, b in zip(given, torch.autograd.grad(exact.sum(), doubles)):
        torch.testing.assert_close(a.double(), b, rtol=0.1, atol=0.1 * b.abs().max().item())
