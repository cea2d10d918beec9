"""Elementwise ops before a chunk move behind it: the gates of a cell are one group, and results stay
eager's, for broadcasts that come later as well. Gradients are eager's, whichever of the chunks get one."""

import pytest
import torch

import tsfuser
from kit.autodiff_only import by_joint_graphs
from kit.support import all_graphs, assert_matches, fresh, fuse, groups, kinds, no_fallback, train

pytestmark = [pytest.mark.filterwarnings("error::tsfuser.TsfuserWarning"), pytest.mark.graphs]


def gates(x, h, w, b):
    y = torch.mm(x, w) + torch.mm(h, w)
    y = y + b
    enter, leave = y.chunk(2, 1)
    return torch.sigmoid(enter) * torch.tanh(leave)


def operands(device, dtype=torch.float32, n=4):
    shapes = (n, 6), (n, 6), (6, 8), (8,)
    return [torch.randn(s, device=device).to(dtype).requires_grad_() for s in shapes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sum_before_a_chunk_joins_the_group_behind_it(device, dtype):
    def one_sum(x, h, w, b):
        y = torch.mm(x, w) + b
        enter, leave = y.chunk(2, 1)
        return torch.sigmoid(enter) * torch.tanh(leave)

    inputs = operands(device, dtype)
    expected, wanted = train(one_sum, inputs, calls=1)
    exact, true = train(one_sum, [x.detach().double().requires_grad_() for x in inputs], calls=1)
    scripted = fresh(one_sum)
    with tsfuser.fuser(), no_fallback():
        out, gradients = train(scripted, inputs)
    assert_matches(out, expected, exact, ops=20)
    for got, want, right in zip(gradients, wanted, true):
        if want is not None:
            assert_matches(got, want, right, ops=60, strides=False)
    # where the result of the product is saved, it adds the bias; else the group does, to each chunk
    is_in_product = any("tsfuser::biased_product" in str(graph) for graph in all_graphs(scripted))
    is_in_group = kinds(groups(scripted)[0]).count("aten::add") == 2
    assert is_in_product != is_in_group and (is_in_group or by_joint_graphs())
    assert "aten::sigmoid" in kinds(groups(scripted)[0])


def test_a_chain_that_is_a_group_already_stays_before_the_chunk(device):
    inputs = [x.detach() for x in operands(device)]
    scripted = fuse(gates, *inputs)
    first = [kinds(g) for g in groups(scripted) if "aten::add" in kinds(g)][0]
    assert first.count("aten::add") == 2 and "aten::sigmoid" not in first
    assert_matches(scripted(*inputs), gates(*inputs), ops=20)


def test_broadcasts_that_come_later_are_right(device):
    def f(x, y):
        p, q, r = (torch.mm(x, x) + torch.mm(y, y)).chunk(3, 1)
        return p * q + r

    def mixed(a, b):
        p, q = (a + b).chunk(2, -1)
        return p * torch.relu(q)

    x = torch.randn(6, 6, device=device)
    assert_matches(fuse(f, x, x)(x, x), f(x, x), ops=30)
    scripted = fuse(mixed, *(torch.randn(3, 4, device=device) for _ in range(2)))
    with tsfuser.fuser():
        for left, right in (
            ((3, 4), (4,)),
            ((3, 1), (3, 4)),
            ((1, 4), (3, 1)),
            ((2, 3, 4), (3, 4)),
            ((0, 4), (4,)),
        ):
            for _ in range(3):
                a, b = torch.randn(left, device=device), torch.randn(right, device=device)
                assert_matches(scripted(a, b), mixed(a, b), ops=4)


def test_sizes_of_the_whole_are_still_told(device):
    def f(a, b):
        y = a + b
        p, q = y.chunk(2, 1)
        return p * q, y.size()

    a, b = torch.randn(3, 4, device=device), torch.randn(4, device=device)
    scripted = fuse(f, a, b)
    assert scripted(a, b)[1] == [3, 4] and kinds(groups(scripted)[0]).count("aten::add") == 2


@pytest.mark.parametrize(
    "body",
    [
        "return p * torch.relu(q), p",  # a chunk leaves: a view of the whole
        "return p * torch.relu(q), y",  # the whole leaves
        "y += 1.0\n    return p * torch.relu(q), a",  # written through the whole
        "p += 1.0\n    return p * torch.relu(q), a",
        "return torch.sort(p, 0)[0] * q, a",  # a chunk is read by what is not fused
        "return p.t() * torch.relu(q).t(), a",
    ],
)
def test_what_could_be_seen_is_not_moved(device, body):
    source = f"def f(a, b):\n    y = torch.mm(a, b) + b\n    p, q = y.chunk(2, 1)\n    {body}\n"
    names = {"torch": torch}
    exec(source, names)
    scripted = torch.jit.CompilationUnit(source).f
    a, b = torch.randn(4, 4, device=device), torch.randn(4, 4, device=device)
    with tsfuser.fuser():
        for _ in range(4):
            got = scripted(a.clone(), b)
    for mine, theirs in zip(got, names["f"](a.clone(), b)):
        assert_matches(mine, theirs, ops=20)
    assert not any(g.findAllNodes("aten::broadcast_tensors", True) for g in all_graphs(scripted))


def test_a_norm_is_not_moved(device):
    def f(x):
        p, q = torch.softmax(torch.mm(x, x), 1).chunk(2, 1)
        return p * torch.relu(q)

    x = torch.randn(4, 4, device=device)
    scripted = fuse(f, x)
    assert_matches(scripted(x), f(x), ops=20)
    found = [kinds(g) for g in groups(scripted)]
    assert found and not any("aten::softmax" in group for group in found)


def test_chunks_of_a_view_do_not_part_its_group(device):
    """As in a rotary embedding. Slices would: their ends are numbers that the view's sizes give."""

    def rotated(x, w, cosines, sines):
        y = torch.mm(x, w).view(2, 4, 3, 8).transpose(1, 2)
        left, right = y.chunk(2, -1)
        return y * cosines + torch.cat((-right, left), -1) * sines

    shapes = (8, 6), (6, 24), (4, 8), (4, 8)
    inputs = [torch.randn(s, device=device).requires_grad_(k < 2) for k, s in enumerate(shapes)]
    expected, wanted = train(rotated, inputs, calls=1)
    scripted = fresh(rotated)
    with tsfuser.fuser(), no_fallback():
        out, gradients = train(scripted, inputs)
    assert_matches(out, expected, ops=40)
    for got, want in zip(gradients, wanted):
        if want is not None:
            assert_matches(got, want, ops=80, strides=False)
    found = [kinds(g) for g in groups(scripted)]
    assert any({"aten::neg", "aten::cat"} <= set(g) and g.count("aten::mul") == 2 for g in found), found


PARTS = {  # the chunks of y, and the results that are made of them; `n` is 2
    "pairs": "p, q = y.chunk(2, 1); return p * 2.0, torch.relu(q) * 3.0",
    "last dim": "p, q, r = y.chunk(3, -1); return torch.relu(p * r), r * 3.0, torch.tanh(q)",
    "first dim": "p, q = y.chunk(2, 0); return torch.sigmoid(p), torch.relu(q)",
    "one": "p, = y.chunk(1, 1); return torch.sigmoid(p), y * 2.0",
    "a number that the call gives": "p, q = y.chunk(n, 1); return p * 2.0, torch.relu(q) * 3.0",
    "twice": "p, q = y.chunk(2, 1); r, s = p.chunk(2, 0); return r * 2.0, torch.relu(s), torch.exp(-q)",
    "a chunk is returned": "p, q = y.chunk(2, 1); return torch.relu(p) * 3.0, q",
    "no use of a chunk": "p, q = y.chunk(2, 1); return torch.relu(p) * 3.0, y * 2.0",
    "the whole is read": "p, q = y.chunk(2, 1); return torch.relu(p), y * 3.0, torch.tanh(q) * q",
    "joined": "p, q = y.chunk(2, 1); return torch.cat([q, p], 1) * 2.0, torch.relu(q)",
    "shuffled": "p, q = y.chunk(2, 1); return torch.stack([p * 2.0, q], 2).flatten(1, 2), torch.tanh(p)",
    "a product reads": "p, q = y.chunk(2, 1); return torch.mm(p.flatten(1), p.flatten(1).t()), torch.tanh(q)",
    "a product alone": "p, q = y.chunk(2, 1); return torch.mm(p.flatten(1), p.flatten(1).t()), q.sort(0)[0]",
    "a list": "c = y.chunk(2, 1); return c[0] * 2.0, torch.relu(c[1])",
    "a list of a loop": "z = y * 0.5; for c in y.chunk(2, 1): z = z + torch.relu(c).sum(); return z, z * 2.0",
    "a branch": "p, q = y.chunk(2, 1); if n > 5: p = p * torch.tanh(q); return torch.relu(p), q * 3.0",
    "written to": "p, q = y.clone().chunk(2, 1); p, q = p * 2.0, torch.tanh(q); p.mul_(q); return p, q * 2.0",
    "the whole is written to": "p, q = y.chunk(2, 1); r = torch.sigmoid(p); y.mul_(2.0); return r, q.tanh()",
}


@pytest.mark.each_value
@pytest.mark.parametrize("shape", [(2, 2, 3), (4, 6, 6), (3, 5, 7), (6, 8, 5)])
@pytest.mark.parametrize("parts", PARTS)
def test_only_some_chunks_get_a_gradient(device, parts, shape):
    """Autodiff's own derivative joins the gradients that there are: for one channel a chunk it gave both
    chunks the gradient of one, without a word. Eager may refuse a program; then so does this one."""
    lines = "".join(f"    {line.strip()}\n" for line in PARTS[parts].split("; "))
    source = f"def f(x, w, n: int):\n    y = torch.tanh(x) * w\n{lines}"
    if "for c in" in source:  # the loop's body is one line
        source = source.replace(": z = z", ":\n        z = z")
    source = source.replace("n > 5: p", "n > 5:\n        p")
    names = {"torch": torch}
    exec(source, names)
    scripted = torch.jit.CompilationUnit(source).f
    torch.manual_seed(0)  # of some numbers the sums cancel to a thousandth, and so do the digits of both
    given = [torch.randn(shape, device=device, requires_grad=True) for _ in range(2)]
    exact = [v.detach().double().requires_grad_() for v in given]

    def run(program, asked, x, w):
        x.grad = w.grad = None
        try:
            results = program(x, w, 2)
            for result in (r for k, r in enumerate(results) if k in asked):
                result.sin().sum().backward(retain_graph=True)
        except (RuntimeError, ValueError) as error:
            return error
        return [r.detach() for r in results], [x.grad, w.grad]

    with tsfuser.fuser():
        for asked in ((0,), (1,), (0, 1), (1,), (0,), (0,), (1,)):
            got, wanted = run(scripted, asked, *given), run(names["f"], asked, *given)
            if isinstance(wanted, Exception):
                assert isinstance(got, Exception), f"eager: {wanted}"
                continue
            assert not isinstance(got, Exception), got
            wide = run(names["f"], asked, *exact)
            for found in zip(got[0] + got[1], wanted[0] + wanted[1], wide[0] + wide[1], strict=True):
                assert_matches(*found, ops=60, strides=False)
