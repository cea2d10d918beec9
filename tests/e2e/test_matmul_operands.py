"""Operands of batched matrix products, laid out by the groups that make them."""

import warnings

import pytest
import torch
from torch import Tensor

import tsfuser
from kit.opsweep import plain
from kit.support import assert_matches, fresh, groups, kinds, no_fallback, script, train
from tsfuser.frontends.torchscript import passes
from tsfuser.graph import matmul_operands as operands
from tsfuser.graph.matmul_operands import PACKED


def attend(x: Tensor, w: Tensor):
    """Attention with heads that are views of `x`."""
    n, t, c = x.shape
    q = (x * 2.0).view(n, t, 4, c // 4).transpose(1, 2)
    k = (x + 1.0).view(n, t, 4, c // 4).transpose(1, 2)
    v = (x - w).view(n, t, 4, c // 4).transpose(1, 2)
    scores = torch.softmax(torch.matmul(q, k.transpose(-2, -1)) * 0.1, -1)
    return torch.matmul(scores, v).transpose(1, 2).reshape(n, t, c)


def tensors(device, sizes=(4, 24, 64), gradients=False):
    generator = torch.Generator().manual_seed(5)
    return [
        torch.randn(s, generator=generator).to(device).requires_grad_(gradients) for s in (sizes, sizes[-1:])
    ]


def copies(scripted):
    return [kind for g in groups(scripted) for kind in kinds(g) if kind == "tsfuser::packed"]


def test_operands_leave_the_group_row_by_row(device):
    x, w = tensors(device)
    scripted = fresh(attend)
    with tsfuser.fuser(), no_fallback():
        for _ in range(3):
            got = scripted(x, w)
    assert_matches(got, attend(x, w), attend(x.double(), w.double()), ops=400)
    assert len(copies(scripted)) == 3  # q, k and v
    assert any({"aten::mul", "tsfuser::packed"} <= set(kinds(g)) for g in groups(scripted))


@pytest.mark.parametrize("sizes", [(4, 24, 64), (1, 24, 256), (3, 7, 260), (2, 1, 64), (0, 5, 64)])
def test_other_sizes_of_the_same_program(device, sizes):
    scripted = fresh(attend)
    with tsfuser.fuser():
        for given in ((4, 24, 64), sizes):
            x, w = tensors(device, given)
            for _ in range(3):
                got = scripted(x, w)
            assert_matches(got, attend(x, w), attend(x.double(), w.double()), ops=400)
            assert got.stride() == attend(x, w).stride()


def test_gradients(device):
    def program(q: Tensor, w: Tensor):
        """A product in a differentiable graph; its operand's heads are not one walk through memory."""
        h = torch.tanh(q * w)
        s = torch.softmax(torch.matmul(h, h * 0.5) * 0.125, -1)
        return torch.sigmoid(s) * s

    generator = torch.Generator().manual_seed(6)
    q = torch.randn(2, 32, 4, 32, generator=generator).to(device).transpose(1, 2).detach()
    assert not q.is_contiguous()
    q.requires_grad_()
    w = torch.randn(32, generator=generator).to(device).requires_grad_()
    scripted = fresh(program)
    with tsfuser.fuser(), no_fallback(), passes.watching() as seen:
        out, gradients = train(scripted, (q, w))
    assert any(
        "tsfuser::packed" in str(n.g("Subgraph"))
        for o in seen
        for n in o.graph.findAllNodes("prim::CudaFusionGroup", True)
    )
    want, expected = train(program, (q, w), calls=1)
    exact, exact_gradients = train(program, [t.detach().double().requires_grad_() for t in (q, w)], calls=1)
    for got, eager, true in zip([out, *gradients], [want, *expected], [exact, *exact_gradients]):
        assert_matches(got, eager, true, ops=4000)
        assert got.stride() == eager.stride()


def graph_of(shape, strides):
    both = (
        f"Float({', '.join(map(str, shape))}, strides=[{', '.join(map(str, strides))}], "
        "requires_grad=0, device=cpu)"
    )
    return torch._C.parse_ir(
        f"graph(%a : {both}, %b : {both}):\n  %c : Tensor = aten::matmul(%a, %b)\n  return (%c)"
    )


@pytest.mark.parametrize(
    "shape, strides, made",
    [
        ((8, 4, 32, 32), (4096, 1024, 32, 1), []),  # row-major
        ((8, 4, 32, 32), (4096, 1024, 1, 32), []),  # each matrix transposed
        ((8, 4, 32, 32), (4096, 32, 128, 1), [PACKED]),  # heads
        ((8, 4, 32, 32), (4096, 32, 1, 128), [PACKED]),
        ((8, 1, 32, 32), (1024, 1, 32, 1), []),  # a batch dim of size 1 has any stride
        ((8, 4, 32, 32), (8192, 2048, 64, 2), [PACKED]),  # no dim that products could read
        ((32, 32, 32), (1024, 32, 1), []),
        ((64, 64), (1, 64), []),  # no batch
        ((2, 2, 4, 4), (32, 4, 8, 1), []),  # too small to be worth a kernel
    ],
)
def test_what_is_copied(shape, strides, made):
    graph = operands.pack_operands(graph_of(shape, strides))
    found = [n.kind() for n in graph.nodes()]
    assert found == [*made, *made, "aten::matmul"]


@pytest.mark.parametrize(
    "kind, left, right, like, copied",
    [
        (operands.BACKWARD_SELF, "heads", "heads", "heads", 2),
        (operands.BACKWARD_OTHER, "heads", "rows", "heads", 1),
        (operands.BACKWARD_OTHER, "apart", "apart", "matrix", 2),  # one product sums over the batch
        (operands.BACKWARD_SELF, "apart", "matrix", "apart", 1),
        (operands.BACKWARD_SELF, "rows", "rows", "rows", 0),
    ],
)
def test_what_is_copied_for_gradients(kind, left, right, like, copied):
    types = {
        "heads": "Float(8, 4, 32, 32, strides=[4096, 32, 128, 1], requires_grad=0, device=cpu)",
        "rows": "Float(8, 4, 32, 32, strides=[4096, 1024, 32, 1], requires_grad=0, device=cpu)",
        "apart": "Float(8, 64, 64, strides=[64, 512, 1], requires_grad=0, device=cpu)",
        "matrix": "Float(64, 64, strides=[64, 1], requires_grad=0, device=cpu)",
    }
    graph = torch._C.parse_ir(
        f"graph(%a : {types[left]}, %b : {types[right]}, %s : int[], %l : {types[like]}, %t : bool):\n"
        f"  %c : Tensor = {kind}(%a, %b, %s, %l, %t)\n  return (%c)"
    )
    operands.pack_operands(graph)
    assert [n.kind() for n in graph.nodes()] == [PACKED] * copied + [kind]


def test_one_copy_for_two_products():
    typed = "Float(8, 4, 32, 32, strides=[4096, 32, 128, 1], requires_grad=0, device=cpu)"
    graph = torch._C.parse_ir(
        f"graph(%a : {typed}):\n  %c : Tensor = aten::matmul(%a, %a)\n"
        "  %d : Tensor = aten::matmul(%a, %c)\n  return (%d)"
    )
    operands.pack_operands(graph)
    assert [n.kind() for n in graph.nodes()] == [PACKED, "aten::matmul", "aten::matmul"]
    a = torch.randn(8, 32, 4, 32).transpose(1, 2)
    run = torch._C._create_function_from_graph("f", graph)
    torch.testing.assert_close(run(a), a @ (a @ a))


def test_a_copy_in_row_major_order(device):
    def program(x: Tensor):
        return (x * 2.0).t().clone(memory_format=torch.contiguous_format), x.t().clone(
            memory_format=torch.contiguous_format
        ) + 1.0

    x = torch.randn(33, 65, device=device)
    scripted = fresh(program)
    with tsfuser.fuser(), no_fallback():
        for _ in range(3):
            got = scripted(x)
    for mine, theirs in zip(got, program(x)):
        assert torch.equal(mine, theirs) and mine.stride() == theirs.stride()


def test_an_operand_that_is_written_to_between_two_products(device):
    """A copy made for the first would be out of date."""

    def program(x: Tensor, w: Tensor):
        h = x.view(4, 24, 4, 16).transpose(1, 2)
        t = h.transpose(-2, -1)
        first = torch.matmul(h, t)
        x.add_(1.0)
        return first * 0.5, torch.matmul(h, t) * 0.5, x + w

    x, w = tensors(device)
    scripted = fresh(program)
    with tsfuser.fuser():
        for _ in range(4):
            mine, theirs = x.clone(), x.clone()
            got, want = scripted(mine, w), program(theirs, w)
            for a, b in zip((*got, mine), (*want, theirs)):
                assert_matches(a, b, ops=400)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (0, 2, 3, 1), (3, 2, 1, 0)])
def test_the_layout_of_a_copy(device, order):
    """In groups, and in torch's own hands."""
    typed = torch._C.parse_ir(
        "graph(%x : Tensor):\n  %a : Tensor = tsfuser::packed(%x)\n  %b : Tensor = aten::neg(%a)\n"
        "  return (%b)"
    )
    plain = torch._C.parse_ir("graph(%x : Tensor):\n  %a : Tensor = tsfuser::packed(%x)\n  return (%a)")
    x = torch.randn(3, 4, 5, 6, device=device).permute(order)
    alone = torch._C._create_function_from_graph("alone", plain)(x)
    assert torch.equal(alone, x) and (alone.data_ptr() == x.data_ptr()) == x.is_contiguous()
    assert min(alone.stride()[-2:]) == 1 and (alone.stride(-2) == 1) == (x.stride(-2) < x.stride(-1))
    fused = torch._C._create_function_from_graph("fused", typed)
    with tsfuser.fuser(), no_fallback():
        for _ in range(3):
            got = fused(x)
    assert torch.equal(got, -x) and got.stride() == alone.stride()


def test_operands_of_another_rank_or_layout_later(device):
    def program(q: Tensor, k: Tensor):
        return torch.matmul(q, k)

    scripted = fresh(program)
    q, k = (
        torch.randn(2, 4, 32, 64, device=device),
        torch.randn(2, 32, 4, 64, device=device).permute(0, 2, 3, 1),
    )
    with tsfuser.fuser():
        for _ in range(4):
            torch.testing.assert_close(scripted(q, k), q @ k)
        for a, b in ((q[0, 0], k[0, 0, :, 0]), (q[0, 0, 0], k[0, 0, :, 0]), (q[0], k), (q[0, 0], k[0, 0])):
            torch.testing.assert_close(scripted(a, b), a @ b)
        sparse = q[0, 0].to_sparse()
        torch.testing.assert_close(scripted(sparse, k[0, 0]), sparse @ k[0, 0])


def turn(x: Tensor, y: Tensor):
    """A copy into another layout between products, with nothing else to fuse."""
    return torch.mm(x, y).t().clone(memory_format=torch.contiguous_format)


@pytest.mark.parametrize("sizes", [(65, 64), (64, 65), (1, 130), (130, 1), (3, 0)])
def test_a_copy_into_another_layout_is_a_group_of_its_own(device, sizes):
    rows, columns = sizes
    scripted = fresh(turn)
    with tsfuser.fuser(), no_fallback():
        for m, n in ((96, 80), (rows, columns)):
            x, y = torch.randn(m, 8, device=device), torch.randn(8, n, device=device)
            for _ in range(3):
                got = scripted(x, y)
            want = turn(x, y)
            assert got.equal(want) and got.stride() == want.stride()
    assert [kinds(g) for g in groups(scripted)] == [["aten::t", "aten::clone"]]


def test_a_copy_in_the_same_layout_and_a_small_one_are_torchs(device):
    def straight(x: Tensor, y: Tensor):
        return torch.mm(x, y).clone()

    for program, size in ((straight, 96), (turn, 8)):
        scripted = fresh(program)
        x = torch.randn(size, size, device=device)
        with tsfuser.fuser():
            for _ in range(3):
                got = scripted(x, x)
        assert got.equal(program(x, x)) and not groups(scripted)


LINEAR = {
    "with a bias": "y = torch.layer_norm(x, [c], u).transpose(0, 1)\n    return torch._C._nn.linear(y, w, b)",
    "without": "y = torch.layer_norm(x, [c], u).transpose(0, 1)\n    return torch._C._nn.linear(y, w)",
    "four dims": "y = torch.tanh(x * u).view(n, 2, -1, c).transpose(0, 1)\n"
    "    return torch._C._nn.linear(y, w, b)",
    "returned": "y = torch.tanh(x * u).transpose(0, 1)\n"
    "    return torch.cat([torch._C._nn.linear(y, w, b), y], -1)",
}


@pytest.mark.parametrize("name", LINEAR)
@pytest.mark.parametrize("gradients", [False, True], ids=["inference", "training"])
def test_a_linear_reads_rows_that_lie_together(device, name, gradients):
    source = (
        f"def f(x: Tensor, u: Tensor, w: Tensor, b: Tensor):\n    n, t, c = x.shape\n    {LINEAR[name]}\n"
    )
    eager, scripted = plain(source), script(source)
    with tsfuser.fuser(), no_fallback(), passes.watching() as seen:
        for sizes in [(4, 24, 64)] * 4 + [(1, 24, 64), (4, 2, 64), (6, 8, 16)]:
            generator = torch.Generator().manual_seed(sum(sizes))
            x, u, w, b = (
                torch.randn(s, generator=generator).to(device).requires_grad_(gradients)
                for s in (sizes, sizes[-1:], (8, sizes[-1]), (8,))
            )
            wide = [t.detach().double().requires_grad_(gradients) for t in (x, u, w, b)]
            if not gradients:
                found = [[scripted(x, u, w, b)], [eager(x, u, w, b)], [eager(*wide)]]
            else:
                made = [train(scripted, (x, u, w, b)), train(eager, (x, u, w, b), 1), train(eager, wide, 1)]
                found = [[out, *slopes] for out, slopes in made]
            for got, want, true in zip(*found):
                assert (got is None) == (want is None)
                if got is not None:
                    assert_matches(got, want, true, ops=400)
    made = [g for o in seen for g in o.graph.findAllNodes("prim::CudaFusionGroup", True)]
    assert any(PACKED in kinds(group) for group in made)


def test_a_row_that_does_not_lie_together_stays(device):
    """The library reads such a matrix as it is."""
    scripted = script(
        "def f(x: Tensor, w: Tensor):\n    return torch._C._nn.linear((x * 2.0).transpose(1, 2), w)\n"
    )
    x, w = torch.randn(4, 64, 24, device=device), torch.randn(8, 64, device=device)
    with tsfuser.fuser():
        for _ in range(4):
            assert_matches(scripted(x, w), torch.nn.functional.linear((x * 2).transpose(1, 2), w), ops=64)
    assert PACKED not in str(scripted.graph_for(x, w))


def copies_of_a_backward(result, step):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        result.backward(step)
    return sum(event.name == "aten::clone" for event in profile.events())


#: Linear layers whose backward would copy what was saved, or its gradient.
BACKWARDS = {
    "a saved operand": "y = torch.tanh(x * u).transpose(0, 1)\n    return torch._C._nn.linear(y, w, b) * 0.5",
    "a gradient": "y = torch._C._nn.linear(torch.tanh(x * u), w, b)\n    return torch.sigmoid(y * 2.0) * y",
}


@pytest.mark.parametrize("name", BACKWARDS)
def test_a_backward_reads_rows_that_lie_together(device, name):
    source = (
        f"def f(x: Tensor, u: Tensor, w: Tensor, b: Tensor):\n    n, t, c = x.shape\n    {BACKWARDS[name]}\n"
    )
    eager, scripted = plain(source), script(source)
    with tsfuser.fuser(), no_fallback():
        for call, sizes in enumerate([(4, 24, 64)] * 5 + [(6, 8, 16), (1, 24, 64), (8, 24, 64)]):
            generator = torch.Generator().manual_seed(sum(sizes))
            given = [
                torch.randn(s, generator=generator).to(device).requires_grad_()
                for s in (sizes, sizes[-1:], (48, sizes[-1]), (48,))
            ]
            wide = [t.detach().double().requires_grad_() for t in given]
            step = torch.randn(eager(*given).shape, generator=generator).to(device)
            step = step.transpose(0, 1).contiguous().transpose(0, 1)
            for function, tensors in ((eager, wide), (eager, given), (scripted, given)):
                for t in tensors:
                    t.grad = None
                result = function(*tensors)
                copies = copies_of_a_backward(result, step.to(result.dtype))
                if function == eager:
                    want, exact = [t.grad for t in given], [t.grad for t in wide]
            for t, theirs, true in zip(given, want, exact):
                assert_matches(t.grad, theirs, true, ops=400, strides=False)
            assert call not in (4, 7) or copies == 0


def test_a_linear_of_a_vector(device):
    source = (
        "def f(x: Tensor, w: Tensor):\n    y = torch.tanh(x * 2.0 + 1.0) * x\n"
        "    return torch._C._nn.linear(y, w) * 0.5\n"
    )
    eager, scripted = plain(source), script(source)
    given = [torch.randn(s, device=device).requires_grad_() for s in ((8192,), (8, 8192))]
    with warnings.catch_warnings(record=True) as said, tsfuser.fuser(), no_fallback():
        warnings.simplefilter("always")
        out, gradients = train(scripted, given)
    assert not [w for w in said if issubclass(w.category, tsfuser.TsfuserWarning)]
    want, expected = train(eager, given, calls=1)
    exact, slopes = train(eager, [t.detach().double().requires_grad_() for t in given], calls=1)
    for mine, theirs, true in zip([out, *gradients], [want, *expected], [exact, *slopes]):
        assert_matches(mine, theirs, true, ops=9000)


def test_a_saved_operand_that_is_returned_and_written_to(device):
    """The backward raises, as in eager."""
    scripted = script(
        "def f(x: Tensor, w: Tensor):\n    h = torch.relu(x.transpose(0, 1))\n"
        "    return h, torch._C._nn.linear(h, w)\n"
    )
    x, w = (torch.randn(s, device=device).requires_grad_() for s in ((16, 32, 64), (8, 64)))
    with tsfuser.fuser():
        for _ in range(5):
            h, y = scripted(x, w)
            h.mul_(2.0)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                (h.sum() + y.sum()).backward()
