"""Compiled programs whose groups write into the inputs, where eager does so: optimizers, buffers."""

import copy

import pytest
import torch
from torch import nn

import tsfuser
from kit.support import assert_matches

pytestmark = [pytest.mark.graphs, pytest.mark.usefixtures("forgotten", "fused_or_error")]

STORE = "tsfuser::store"


def groups():
    """How many groups there have been in this process."""
    return tsfuser.stats()["groups"]


def stores(before):
    """How many results each group writes in place, of those that came after the first `before`."""
    return [str(tsfuser._C.group_graph(k)).count(STORE) for k in range(before, groups())]


def compiled(function, **choices):
    return torch.compile(function, backend="tsfuser", **choices)


def results(value):
    """The tensors that a function returned: none, one or some."""
    return [] if value is None else [value] if isinstance(value, torch.Tensor) else list(value)


OPTIMIZERS = {
    "adam": (lambda p: torch.optim.Adam(p, lr=1e-2, foreach=True), 3),
    "adamw": (lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True, weight_decay=0.1), 3),
    "amsgrad": (lambda p: torch.optim.Adam(p, lr=1e-2, foreach=True, amsgrad=True), 4),
    "sgd": (lambda p: torch.optim.SGD(p, lr=1e-2, foreach=True, weight_decay=0.1), 1),
    "momentum": (lambda p: torch.optim.SGD(p, lr=1e-2, foreach=True, momentum=0.9, nesterov=True), 3),
    "rmsprop": (lambda p: torch.optim.RMSprop(p, lr=1e-2, foreach=True, momentum=0.9), 3),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_write_parameters_and_states_in_place(name, device):
    make, written = OPTIMIZERS[name]
    shapes = [(5, 7), (33,), (5, 7), (2, 3, 4), (1,), (64, 32)]
    ours = [nn.Parameter(torch.randn(s, device=device)) for s in shapes]
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    exact = [nn.Parameter(p.detach().double()) for p in ours]
    optimizers = [make(p) for p in (ours, theirs, exact)]
    step, known = compiled(optimizers[0].step), groups()
    addresses = [p.data_ptr() for p in ours]
    for _ in range(4):
        for p, q, r in zip(ours, theirs, exact):
            p.grad = torch.randn_like(p)
            q.grad, r.grad = p.grad.clone(), p.grad.double()
        versions = [p._version for p in ours]
        for run in (step, optimizers[1].step, optimizers[2].step):
            run()
        assert all(p._version > v for p, v in zip(ours, versions))
    assert [p.data_ptr() for p in ours] == addresses
    for p, q, r in zip(ours, theirs, exact):
        assert_matches(p.detach(), q.detach(), r.detach(), 100)
    # on a GPU the count of Adam's steps is a tensor there, too
    assert max(stores(known)) - written in (0, device == "cuda")
    assert tsfuser.stats()["fallbacks"] == {}


def test_a_buffer_is_written_where_it_lies(device):
    def function(average, x):
        y = torch.tanh(x) * 2
        average.mul_(0.9).add_(y * 0.1)
        return y + 1

    average, x = torch.randn(6, 8, device=device), torch.randn(6, 8, device=device)
    plain, before, known = average.clone(), average.data_ptr(), groups()
    run = compiled(function)
    for _ in range(3):
        assert_matches(run(average, x), function(plain, x), ops=20)
        assert_matches(average, plain, ops=20)
    assert average.data_ptr() == before and sum(stores(known)) == 1


@pytest.mark.parametrize("form", ["transposed", "strided", "offset"])
def test_inputs_with_gaps_and_other_layouts(form, device):
    def function(x, y):
        x.mul_(2).add_(y)

    base = torch.randn(8, 12, device=device)
    other = base.clone()
    views = {"transposed": lambda t: t.t(), "strided": lambda t: t[:, ::2], "offset": lambda t: t[1:, 3:]}
    x, plain = views[form](base), views[form](other)
    y = torch.randn_like(x)
    run = compiled(function)
    for _ in range(2):
        run(x, y)
        function(plain, y)
        assert_matches(base, other, ops=4)


def test_what_is_read_afterwards_is_read_before(device):
    """The old value has a reader behind the group, or goes to another input: then it is copied at the end."""

    def swapped(x, y):
        z = torch.sin(x) + 1
        x.copy_(torch.cos(y) * 2)
        y.copy_(z)

    def later(x, w):
        y = torch.sigmoid(x * 2)
        product = x @ w
        x.copy_(y)
        return torch.tanh(product) * 2

    def returned(x):
        y = torch.tanh(x * 2)
        x.copy_(y)
        return y

    def viewed(x):
        y = x.t() + 1
        x.mul_(2).add_(1)
        return y.exp()

    def broadcast(x, y):
        z = x[0] * y
        x.mul_(3).add_(1)
        return z

    def summed(x):
        total = x.sum(0)
        x.div_(2).add_(total)
        return total

    def normalised(x, y):
        x.add_(y)
        return torch.softmax(x.float(), -1)

    def beside_a_sum(x, y):
        x.add_(y)
        return torch.atan2(x, torch.std(y, [1, 0], unbiased=False, keepdim=True) + 1)

    def centred(x, y):
        x.mul_(y)
        return x - x.mean(0), x.sum(1)

    square = torch.randn(4, 4, device=device)
    for function, args in (
        (swapped, (square, square + 1)),
        (later, (square, square + 2)),
        (returned, (square,)),
        (viewed, (square,)),
        (broadcast, (square, square + 3)),
        (summed, (square,)),
        (normalised, (square, square + 1)),
        (beside_a_sum, (square, square + 2)),
        (centred, (square, square + 3)),
    ):
        torch._dynamo.reset()
        ours, plain = [a.clone() for a in args], [a.clone() for a in args]
        run = compiled(function)
        for _ in range(2):
            found, expected = run(*ours), function(*plain)
            for a, b in zip([*ours, *results(found)], [*plain, *results(expected)]):
                assert_matches(a, b, ops=30)


def test_what_cannot_be_written_in_place_keeps_nothing_else_from_it(device):
    """As the count of Adam's steps on a GPU: all rows read what the first one would change."""

    def function(x, y, row):
        row.sigmoid_().add_(1)
        x.mul_(row).add_(y)
        y.mul_(x)

    run, known = compiled(function), groups()
    for rows in (300, 300, 0, 1):
        ours = [torch.randn(s, device=device) for s in ((rows, 40), (rows, 40), (40,))]
        plain, addresses = [t.clone() for t in ours], [t.data_ptr() for t in ours]
        run(*ours)
        function(*plain)
        for a, b in zip(ours, plain):
            assert_matches(a, b, ops=20)
        assert [t.data_ptr() for t in ours] == addresses
    assert stores(known)[0] == 2


def test_sizes_that_vary(device):
    def function(x, y):
        x.mul_(y).add_(1)

    run, known = compiled(function, dynamic=True), groups()
    for rows, columns in ((4, 6), (3, 6), (9, 2), (2, 2)):
        x, y = (torch.randn(rows, columns, device=device) for _ in range(2))
        plain = x.clone()
        run(x, y)
        function(plain, y)
        assert_matches(x, plain, ops=4)
    assert sum(stores(known)) > 0 and tsfuser.stats()["fallbacks"] == {}


def test_operands_that_lie_beside_each_other(device):
    def function(x, y):
        x.mul_(2).add_(y)

    base = torch.randn(9, device=device)
    other = base.clone()
    run = compiled(function)
    for _ in range(2):
        run(base[:4], base[4:8])
        function(other[:4], other[4:8])
        assert_matches(base, other, ops=4)


def test_what_is_copied_to_an_input_is_copied_once(device):
    """And what is copied to it has other readers."""

    def function(cache, at, x):
        filled = cache.index_copy(1, at, torch.tanh(x) * 2)
        cache.copy_(filled)
        return torch.exp(filled) + 1

    def swapped(x, y, z):
        old = x * 1
        x.copy_(y)
        y.copy_(z)
        z.copy_(old)

    cache, x = torch.randn(3, 8, 4, device=device), torch.randn(3, 2, 4, device=device)
    at, plain, run = torch.tensor([5, 1], device=device), cache.clone(), compiled(function)
    for _ in range(2):
        assert_matches(run(cache, at, x), function(plain, at, x), ops=10)
        assert_matches(cache, plain, ops=10)
    with torch.profiler.profile() as profile:
        run(cache, at, x)
    names = [event.name for event in profile.events()]
    assert names.count("aten::index_copy_") == 1 and not {"aten::index_copy", "aten::copy"} & {*names}
    three, others = ([torch.full((4,), k, device=device) for k in (1.0, 2.0, 3.0)] for _ in range(2))
    compiled(swapped)(*three)
    swapped(*others)
    assert all(map(torch.equal, three, others))


VIEWS = {
    "view": lambda y: y.view(-1),
    "transpose": lambda y: y.t(),
    "element": lambda y: y[0],
    "half": lambda y: y.chunk(2)[1],
    "detached view": lambda y: y.detach().view(-1),
}


COPIES = {
    "copy": lambda made: torch.empty_like(made).copy_(made),
    "scatter": lambda made: torch.zeros_like(made).slice_scatter(made, 1, 0, 6),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("copy", COPIES)
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_view_of_a_copy_does_not_lie_in_what_was_copied(view, copy, dynamic, device):
    """Neither in another result nor in what the backward reads, both of which would change with it."""

    def function(x):
        made = torch.exp(x)
        copied = COPIES[copy](made)
        return made * 1, made, VIEWS[view](copied)

    run = compiled(function, dynamic=dynamic)
    for _ in range(2):
        x = torch.randn(4, 6, device=device, requires_grad=True)
        first, second, last = run(x)
        with torch.no_grad():
            last.detach().fill_(100)
        assert_matches(second.detach(), torch.exp(x.detach()), ops=4)
        (first.sum() + second.sum()).backward()
        assert_matches(x.grad, 2 * torch.exp(x.detach()), ops=4)


def test_running_statistics_are_written_where_they_lie(device):
    model = nn.Sequential(nn.BatchNorm2d(6), nn.ReLU()).to(device)
    twin, run = copy.deepcopy(model), compiled(model)
    addresses = [b.data_ptr() for b in model.buffers()]
    for _ in range(3):
        x = torch.randn(4, 6, 5, 5, device=device) * 2 + 1
        for network, each in ((run, model), (twin, twin)):
            each.zero_grad()
            network(x).square().sum().backward()
        found, expected = ([*each.buffers(), *(p.grad for p in each.parameters())] for each in (model, twin))
        for ours, theirs in zip(found, expected):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-3)
    assert [b.data_ptr() for b in model.buffers()] == addresses
    with torch.profiler.profile() as profile:
        run(x)
    assert not {"aten::_foreach_copy_", "aten::copy_"} & {event.name for event in profile.events()}


def test_training_with_a_compiled_optimizer_has_the_losses_of_aot_eager(device):
    """Which computes what the steps contribute in float32, as each compiled optimizer does."""
    model = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.LayerNorm(12), nn.Linear(12, 2)).double().to(device)
    twin, losses, known = copy.deepcopy(model), [], groups()
    for each, backend in ((model, "tsfuser"), (twin, "aot_eager")):
        optimizer = torch.optim.Adam(each.parameters(), lr=1e-2, foreach=True)
        step, forward = (torch.compile(f, backend=backend) for f in (optimizer.step, each))
        torch.manual_seed(0)
        for _ in range(20):
            x = torch.randn(16, 6, dtype=torch.float64, device=device)
            loss = (forward(x) - torch.sin(x[:, :2])).square().mean()
            optimizer.zero_grad()
            loss.backward()
            step()
            losses.append(loss.detach())
    torch.testing.assert_close(torch.stack(losses[:20]), torch.stack(losses[20:]), rtol=1e-6, atol=1e-8)
    if device != "cuda":  # there the count of Adam's steps is a float32 tensor of the group
        assert max(stores(known)) == 3


def test_check_compares_what_is_written_in_place():
    def function(x, y):
        x.mul_(2).add_(y)
        return y * 2

    x, y = torch.randn(8), torch.randn(8)
    report = tsfuser.check(compiled(function), x, y)
    assert report.compared and not report.unfused
