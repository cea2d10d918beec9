"""Compiled programs whose groups write into the inputs, where eager does so: optimizers, buffers."""

import copy

import pytest
import torch
from torch import nn

import tsfuser
from kit.allocations import allocations
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


#: Functions that read the old value of x behind the group, or write it to another input; what y - x is, if
#: there is a y.
READ_AFTERWARDS = {
    swapped: 1,
    later: 2,
    returned: None,
    viewed: None,
    broadcast: 3,
    summed: None,
    normalised: 1,
    beside_a_sum: 2,
    centred: 3,
}


def test_what_is_read_afterwards_is_read_before(device):
    """Then it is copied at the end."""
    square = torch.randn(4, 4, device=device)
    for function, more in READ_AFTERWARDS.items():
        torch._dynamo.reset()
        args = [square] if more is None else [square, square + more]
        ours, plain = [a.clone() for a in args], [a.clone() for a in args]
        run = compiled(function)
        for _ in range(2):
            found, expected = run(*ours), function(*plain)
            for a, b in zip([*ours, *results(found)], [*plain, *results(expected)]):
                assert_matches(a, b, ops=30)


@pytest.mark.parametrize("dynamic", [True, False])
def test_an_input_changes_beside_a_result_with_gaps(dynamic, device):
    """The copy that gives the result its gaps stands at the end, as the one to the input does."""

    def function(x, y):
        x[0] = 5.0
        return (y * x)[..., 1:]

    run = torch.compile(function, backend="tsfuser", dynamic=dynamic)
    before = tsfuser.stats()["left_to_python"]
    ours, plain = torch.ones(5, 4, device=device), torch.ones(5, 4, device=device)
    y = torch.randn(5, 4, device=device)
    found, expected = run(ours, y), function(plain, y)
    assert_matches(found, expected, ops=4)
    assert found.stride() == expected.stride() and torch.equal(ours, plain)
    assert tsfuser.stats()["left_to_python"] == before


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


ROWS = torch.tensor([4, 1])


def product_read(x, w):
    x.mul_(2).add_(1)
    return x @ w


def product_added(x, w):
    x.mul_(2).add_(1)
    product = x @ w
    x.add_(product * 0.5)
    return product


def replaced(x, w):
    product = x @ w
    x.copy_(torch.tanh(product) * 2)


def placed_twice(x, w, at):
    x.index_copy_(0, at, w[:2])
    product = w @ x
    x.index_copy_(0, at + 1, product[:2])
    return w @ x


def set_twice(x, w):
    x[:2] = w[:2]
    product = w @ x
    x[2:4] = product[:2]
    x[:, 3].mul_(2)
    return w @ x


def placed_in_what_a_group_makes(x, w, at):
    x.mul_(0.5).add_(1)
    product = w @ x
    x.index_copy_(0, at, w[:2])
    return product


def scaled_after_a_write(x, w, at):
    x[at] = w[:2]
    product = w @ x
    x.mul_(0.5).clamp_(-1, 1)
    return product


def other_rows(x, w):
    """The first write is to a part of the last one's target."""
    x[1:3].mul_(2)
    product = x @ w
    x[:, 1:].add_(product[:, 1:])
    return product


#: how many matrices of the size of `x` a call allocates: products, and temporary values that they read
SEVERAL = {
    product_read: 1, product_added: 2, replaced: 1, placed_twice: 2, set_twice: 2,
    placed_in_what_a_group_makes: 1, scaled_after_a_write: 2, other_rows: 1,
}  # fmt: skip


@pytest.mark.each_value
@pytest.mark.parametrize("function", SEVERAL)
@pytest.mark.parametrize("dynamic", [True, False])
def test_an_input_that_changes_several_times_is_not_copied(function, dynamic, device):
    run = compiled(function, dynamic=dynamic)
    for n in (96, 96, 128) if dynamic else (96, 96):
        x, w = (torch.randn(n, n, device=device) / n**0.5 for _ in range(2))
        more = [ROWS.to(device)] if function.__code__.co_argcount == 3 else []
        plain, exact, address = x.clone(), x.double(), x.data_ptr()
        expected = results(function(plain, w, *more)), results(function(exact, w.double(), *more))
        for a, b, c in zip(results(run(x, w, *more)), *expected):
            assert_matches(a, b, c, ops=4 * n)
        assert_matches(x, plain, exact, ops=4 * n)
        assert x.data_ptr() == address
    made, _ = allocations(lambda: run(x, w, *more), device)
    assert made < (SEVERAL[function] + 0.5) * x.nbytes


def old_view_read(x, w):
    turned = x.t()
    x.index_copy_(0, ROWS, w[:2])
    x.index_copy_(0, ROWS + 1, w[2:4])
    return turned @ w


def first_write_returned(x, w):
    first = x.index_copy(0, ROWS, w[:2])
    x.copy_(first.index_copy(0, ROWS + 1, w[2:4]))
    return first


def view_of_the_first_write_returned(x, w):
    first = x * 2 + 1
    x.copy_(first.index_copy(0, ROWS + 1, w[2:4]))
    return first.t()


def first_write_read_later(x, w):
    first = x.index_copy(0, ROWS, w[:2])
    x.copy_(first.index_copy(0, ROWS + 1, w[2:4]))
    return first @ w


def what_a_group_makes_read_later(x, w):
    first = x * 2 + 1
    x.copy_(first.index_copy(0, ROWS + 1, w[2:4]))
    return first @ w


def old_value_to_another(x, w):
    old = x * 1
    x.mul_(2).add_(1)
    product = x @ w
    x.sub_(product)
    w.copy_(old)
    return product


def view_read_where_the_new_value_is_made(x, w):
    first = x.t() * 2 + 1
    x.copy_(first.index_copy(0, ROWS, w[:2]))


def view_of_the_old_value_written(x, w):
    x.index_copy_(0, ROWS, w[:2] + x[3:5])
    x.copy_(x.index_copy(0, ROWS, x[1:3]))


def old_value_copied_to_another(x, w):
    w.copy_(x)
    x.mul_(2).add_(1)


def old_value_copied_before_a_part(x, w):
    given = w[:2] * 2
    w.copy_(x)
    x.index_copy_(0, ROWS, given)


def result_kept_beside(x, w):
    x.mul_(2).add_(1)
    made = x * 1
    x.index_copy_(0, ROWS, w[:2])
    return made, x.t() @ w


@pytest.mark.parametrize(
    "function",
    [
        *(old_view_read, first_write_returned, view_of_the_first_write_returned, first_write_read_later),
        *(what_a_group_makes_read_later, old_value_to_another, result_kept_beside),
        *(view_read_where_the_new_value_is_made, view_of_the_old_value_written),
        *(old_value_copied_to_another, old_value_copied_before_a_part),
    ],
)
def test_older_values_are_read_before_they_are_lost(function):
    run = compiled(function)
    for _ in range(2):
        ours = [torch.randn(6, 6) for _ in range(2)]
        plain = [t.clone() for t in ours]
        found, expected = results(run(*ours)), results(function(*plain))
        for a, b in zip([*ours, *found], [*plain, *expected]):
            assert_matches(a, b, ops=40, strides=False)
        for a, b in zip(found, expected):
            a.fill_(9), b.fill_(9)
        for a, b in zip(ours, plain):
            assert_matches(a, b, ops=40)


@pytest.mark.parametrize("fused", [True, False])
def test_a_view_of_a_new_value_is_one_that_the_input_may_not_have(fused, device):
    """The new value has no gaps, the input has."""

    def function(x, w):
        new = x * 2 + 1 if fused else x.index_copy(0, ROWS.to(device), w[:2])
        x.copy_(new)
        return new.view(4, -1) @ w.view(-1, 4)

    base, w = torch.randn(6, 12, device=device), torch.randn(9, 4, device=device).view(6, 6)
    other, run = base.clone(), compiled(function)
    for _ in range(2):
        assert_matches(run(base[:, :6], w), function(other[:, :6], w), ops=40)
        assert_matches(base, other, ops=4)


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


@pytest.mark.each_value(("view", "copy"))
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
