"""The gradients of `matmul`, `mm` and `bmm` in scripted training: an op each, for all numbers of dims."""

import itertools

import pytest
import torch
from torch import Tensor

import tsfuser
from kit.opsweep import plain
from kit.support import all_graphs, assert_matches, fresh, no_fallback, script, train

pytestmark = pytest.mark.graphs

SOURCE = """
def f(x, y):
    return torch.sigmoid(torch.matmul(torch.tanh(x), torch.tanh(y)) * 0.5)
"""
#: Sizes of both operands; the batch dims of some are broadcast.
SIZES = [
    ((5,), (5,)),
    ((5,), (5, 3)),
    ((4, 5), (5,)),
    ((4, 5), (5, 3)),
    ((2, 4, 5), (5,)),
    ((2, 4, 5), (5, 3)),
    ((5,), (2, 5, 3)),
    ((4, 5), (2, 5, 3)),
    ((2, 4, 5), (2, 5, 3)),
    ((1, 4, 5), (2, 5, 3)),
    ((2, 4, 5), (1, 5, 3)),
    ((3, 2, 4, 5), (5,)),
    ((3, 2, 4, 5), (5, 3)),
    ((3, 2, 4, 5), (2, 5, 3)),
    ((5,), (3, 2, 5, 3)),
    ((4, 5), (3, 2, 5, 3)),
    ((3, 1, 4, 5), (1, 2, 5, 3)),
    ((3, 2, 1, 5), (3, 2, 5, 1)),
    ((3, 2, 4, 1), (3, 2, 1, 3)),
]
OTHERS = {
    "mm": [((4, 5), (5, 3)), ((1, 5), (5, 1)), ((4, 0), (0, 3)), ((0, 5), (5, 3))],
    "bmm": [((2, 4, 5), (2, 5, 3)), ((1, 4, 5), (1, 5, 1)), ((2, 4, 0), (2, 0, 3)), ((0, 4, 5), (0, 5, 3))],
}
EMPTY = [((0, 5), (5, 3)), ((4, 0), (0, 3)), ((2, 4, 0), (0, 3)), ((0, 4, 5), (5, 3)), ((2, 4, 5), (2, 5, 0))]


def leaves(sizes, device, moving=(True, True), order="rows"):
    """Random tensors; of `order` "columns" their matrices lie column by column, of "apart" with gaps."""
    generator = torch.Generator().manual_seed(3)
    made = []
    for size, moves in zip(sizes, moving):
        size = list(size)
        if len(size) > 1 and order == "columns":
            size[-1], size[-2] = size[-2], size[-1]
        x = torch.randn([*size[:-1], size[-1] * 2], generator=generator).to(device)
        x = x[..., ::2] if order == "apart" else x[..., : size[-1]].contiguous()
        if len(size) > 1 and order == "columns":
            x = x.transpose(-1, -2)
        made.append(x.detach().requires_grad_(moves))
    return made


def trained(source, inputs):
    """The scripted function, after its result and gradients have been compared with eager's."""
    scripted = script(source)
    with tsfuser.fuser(), no_fallback():
        got = train(scripted, inputs)
    eager = plain(source)
    want = train(eager, inputs, calls=1)
    exact = train(eager, [x.detach().double().requires_grad_(x.requires_grad) for x in inputs], calls=1)
    for actual, theirs, true in zip(*([out, *gradients] for out, gradients in (got, want, exact))):
        assert_matches(actual, theirs, true, ops=400)
    return scripted


def text_of(scripted):
    return "\n".join(map(str, all_graphs(scripted)))


@pytest.mark.parametrize("sizes", SIZES + EMPTY, ids=str)
def test_all_numbers_of_dims(device, sizes):
    text = text_of(trained(SOURCE, leaves(sizes, device)))
    assert "tsfuser::matmul_backward_self" in text and "tsfuser::matmul_backward_other" in text


@pytest.mark.parametrize("order", ["rows", "columns", "apart"])
@pytest.mark.parametrize("moving", [(True, True), (True, False), (False, True)], ids=str)
@pytest.mark.parametrize("name", OTHERS)
def test_matrices_and_batches_of_them(device, name, moving, order):
    for sizes in OTHERS[name]:
        text = text_of(trained(SOURCE.replace("matmul", name), leaves(sizes, device, moving, order)))
        assert ("tsfuser::matmul_backward_self" in text, "tsfuser::matmul_backward_other" in text) == moving


@pytest.mark.parametrize("moving", [(True, False), (False, True)])
@pytest.mark.parametrize("sizes", [((4, 5), (5, 3)), ((2, 4, 5), (5, 3)), ((3, 1, 4, 5), (2, 5, 3))], ids=str)
def test_one_operand_gets_a_gradient(device, sizes, moving):
    text = text_of(trained(SOURCE, leaves(sizes, device, moving)))
    assert ("tsfuser::matmul_backward_self" in text, "tsfuser::matmul_backward_other" in text) == moving


@pytest.mark.parametrize("order", ["columns", "apart"])
@pytest.mark.parametrize("sizes", [s for s in SIZES if len(s[0]) > 1 and len(s[1]) > 1], ids=str)
def test_operands_that_are_not_row_major(device, sizes, order):
    trained(SOURCE, leaves(sizes, device, order=order))


def test_other_sizes_of_the_same_program(device):
    scripted, eager = script(SOURCE), plain(SOURCE)
    with tsfuser.fuser():
        for sizes in itertools.islice(itertools.cycle(SIZES + EMPTY), 2 * len(SIZES + EMPTY)):
            inputs = leaves(sizes, device)
            (got, gradients), (want, expected) = (train(f, inputs, calls=1) for f in (scripted, eager))
            for actual, theirs in zip([got, *gradients], [want, *expected]):
                torch.testing.assert_close(actual, theirs)


@pytest.mark.parametrize("name", ["mm", "matmul"])
def test_the_gradient_of_a_matrix_lies_as_in_eager(device, name):
    """`torch.autograd.grad` shows the layout that the backward gives; `x.grad` has that of x."""
    source = SOURCE.replace("matmul", name)
    scripted, eager = script(source), plain(source)
    for order in ("columns", "rows"):
        inputs = leaves(((4, 5), (5, 3)), device, order=order)
        with tsfuser.fuser(), no_fallback():
            for _ in range(4):
                found = torch.autograd.grad(scripted(*inputs).square().sum(), inputs)
        want = torch.autograd.grad(eager(*inputs).square().sum(), inputs)
        for actual, theirs in zip(found, want):
            assert (
                actual.stride()
                == theirs.stride()
                == ((1, theirs.size(0)) if order == "columns" else theirs.stride())
            )
            torch.testing.assert_close(actual, theirs)


@pytest.mark.parametrize("name, inside", [("addmm", False), ("linear", True)])
def test_what_is_added_to_a_product_has_the_layout_of_the_gradient(device, name, inside):
    """So that of `bmm` stays row-major, as in eager, where `addmm` adds a matrix; a bias has one dim."""

    def addmm(q: Tensor, b: Tensor, x: Tensor, w: Tensor):
        k = torch.addmm(b, x, w).t().unsqueeze(0)
        return torch.bmm(q, k) * 0.5 + 1.0

    def linear(q: Tensor, b: Tensor, x: Tensor, w: Tensor):
        k = torch.nn.functional.linear(x, w, b[0]).t().unsqueeze(0)
        return torch.bmm(q, k) * 0.5 + 1.0

    program = {"addmm": addmm, "linear": linear}[name]
    weight = (7, 5) if name == "addmm" else (5, 7)
    inputs = leaves(((1, 4, 5), (6, 5), (6, 7), weight), device, (True,) * 4)
    scripted = fresh(program)
    with tsfuser.fuser():
        for _ in range(5):
            found = torch.autograd.grad(scripted(*inputs).square().sum(), inputs)
    want = torch.autograd.grad(program(*inputs).square().sum(), inputs)
    for actual, theirs in zip(found, want):
        assert actual.stride() == theirs.stride()
        torch.testing.assert_close(actual, theirs)
    nodes = [n for g in all_graphs(scripted) for n in g.findAllNodes("tsfuser::matmul_backward_other", True)]
    assert any(list(n.inputs())[4].toIValue() for n in nodes) == inside


@pytest.mark.parametrize("moving", [(True, True), (True, False), (False, True)], ids=str)
def test_no_operand_is_kept_for_its_layout(device, moving):
    """Where one operand alone gets a gradient, that one is not read for it."""
    scripted = trained(SOURCE, leaves(((2, 4, 5), (2, 5, 3)), device, moving))
    names = [f"tsfuser::matmul_backward_{which}" for which in ("self", "other")]
    nodes = [n for g in all_graphs(scripted) for name in names for n in g.findAllNodes(name, True)]
    assert len(nodes) == sum(moving)
    for node in nodes:
        like = list(node.inputs())[3].type().kind()
        assert like == ("TensorType" if all(moving) else "NoneType")


def test_second_derivatives(device):
    scripted, eager = script(SOURCE), plain(SOURCE)
    inputs = leaves(((2, 4, 5), (2, 5, 3)), device)
    with tsfuser.fuser():
        for _ in range(4):
            found = []
            for function in (scripted, eager):
                first = torch.autograd.grad(function(*inputs).sum(), inputs, create_graph=True)
                found.append(torch.autograd.grad(sum((g * g).sum() for g in first), inputs))
            for actual, theirs in zip(*found):
                torch.testing.assert_close(actual, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("keys, inside", [("torch.matmul(k, w)", True), ("torch.tanh(k)", False)])
def test_a_gradient_lies_in_memory_as_its_operand(device, keys, inside):
    """The scores of an attention read the keys transposed: the gradient of the keys is row-major again, so
    that nothing reads it column by column; but where the program may get it, it lies as in eager."""
    source = (
        f"def f(q, k, w):\n    n, t, c = k.shape\n    keys = ({keys}).view(n, t, 2, 8).permute(0, 2, 3, 1)\n"
    )
    source += "    return torch.softmax(torch.matmul(torch.tanh(q), keys * 0.5), -1) * 2.0\n"
    scripted, eager = script(source), plain(source)
    inputs = leaves(((3, 2, 5, 8), (3, 6, 16), (16, 16)), device, (True,) * 3)
    with tsfuser.fuser(), no_fallback():
        for _ in range(5):
            found = torch.autograd.grad(scripted(*inputs).square().sum(), inputs, allow_unused=True)
    want = torch.autograd.grad(eager(*inputs).square().sum(), inputs, allow_unused=True)
    for actual, theirs in zip(found, want):
        if theirs is not None:
            assert_matches(actual, theirs, ops=4000)
    nodes = [n for g in all_graphs(scripted) for n in g.findAllNodes("tsfuser::matmul_backward_other", True)]
    assert any(list(n.inputs())[4].toIValue() for n in nodes) == inside


def test_what_lies_column_by_column(device):
    graph = torch._C.parse_ir(
        "graph(%q : Tensor, %g : Tensor, %s : int[]?, %k : Tensor, %b : bool):\n"
        "  %r : Tensor = tsfuser::matmul_backward_other(%q, %g, %s, %k, %b)\n  return (%r)"
    )
    run = torch._C._create_function_from_graph("f", graph)
    for sizes in [(2, 3), (2,), ()]:
        q, g = torch.randn(*sizes, 8, 16, device=device), torch.randn(*sizes, 8, 6, device=device)
        keys = torch.randn(*sizes, 6, 16, device=device)
        for like, transposed in (
            (keys.transpose(-2, -1), True),
            (keys.transpose(-2, -1).contiguous(), False),
        ):
            for batches in (True, False):
                for dims in (list(like.shape), None):
                    found = run(q, g, dims, like, batches)
                    assert found.stride(-2) == (1 if transposed and (batches or not sizes) else 6)
                    torch.testing.assert_close(found, q.transpose(-2, -1) @ g)
