"""Casts, `where` with a number and `masked_fill`, which TorchScript's autodiff knows no derivative of, in
training."""

import pytest
import torch
from torch import Tensor

import tsfuser
from kit.opsweep import plain
from kit.support import assert_matches, fresh, no_fallback, script, train
from tsfuser import _C, options
from tsfuser.graph.wrapper import GROUP

pytestmark = pytest.mark.graphs

INF = float("inf")


def chosen(x: Tensor, w: Tensor, mask: Tensor):
    return torch.softmax(torch.where(mask, x * w, -10000.0), -1)


def chosen_first(x: Tensor, w: Tensor, mask: Tensor):
    return torch.where(mask, 0.25, torch.exp(x)) * w


def filled(x: Tensor, w: Tensor, mask: Tensor):
    return torch.softmax((x * w).masked_fill(mask, -10000.0), -1)


def filled_with_infinity(x: Tensor, w: Tensor, mask: Tensor):
    return torch.tanh(torch.masked_fill(x * w, mask, float("-inf"))) * w


def widened(x: Tensor, w: Tensor, mask: Tensor):
    wide = x.float()
    return (wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-6)).type_as(x) * w


def narrowed(x: Tensor, w: Tensor, mask: Tensor):
    return torch.tanh((x * w).to(torch.bfloat16) * 2).float() * w


PROGRAMS = [chosen, chosen_first, filled, filled_with_infinity, widened, narrowed]


def operands(device, dtype=torch.float32, sizes=(6, 33)):
    generator = torch.Generator().manual_seed(5)
    x, w = (
        torch.randn(s, generator=generator).to(device, dtype).requires_grad_() for s in (sizes, sizes[-1:])
    )
    return x, w, (torch.rand(sizes, generator=generator) > 0.4).to(device)


def functions(body):
    """A function of that body, as Python and scripted."""
    source = f"def f(x: Tensor, w: Tensor, m: Tensor):\n    return {body}\n"
    return plain(source), script(source)


def graphs_of(program, arguments):
    """The scripted function, trained, and the graphs that the pass saw."""
    from tsfuser.frontends.torchscript import passes

    scripted = fresh(program)
    with tsfuser.fuser(), passes.watching() as seen:
        for _ in range(4):
            scripted(*arguments).sum().backward()
    return scripted, [outcome.graph for outcome in seen]


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("program", PROGRAMS)
def test_gradients(device, program, dtype):
    arguments = operands(device, dtype)
    scripted = fresh(program)
    with tsfuser.fuser(), no_fallback():
        out, gradients = train(scripted, arguments)
    want, expected = train(program, arguments, calls=1)
    wide = [t.detach().double().requires_grad_() for t in arguments[:2]]
    exact, exact_gradients = train(program, (*wide, arguments[2]), calls=1)
    precision = (
        torch.bfloat16
        if program is narrowed
        else torch.float32
        if dtype == torch.float64 and program is widened
        else None
    )
    for got, eager, true in zip([out, *gradients], [want, *expected], [exact, *exact_gradients]):
        assert_matches(got, eager, true, ops=80, precision=precision)


@pytest.mark.parametrize("program", PROGRAMS)
def test_nothing_is_left_out_of_the_groups(device, program):
    scripted, graphs = graphs_of(program, operands(device, torch.bfloat16))
    outside = {
        n.kind()
        for graph in [*graphs, scripted.graph_for(*operands(device, torch.bfloat16))]
        for n in graph.nodes()
    } & {"aten::to", "aten::where", "aten::masked_fill", "aten::softmax"}
    assert not outside
    assert sum(len(graph.findAllNodes(GROUP, True)) for graph in graphs) == 2  # one forward, one backward
    assert "prim::DifferentiableGraph" in str(scripted.graph_for(*operands(device, torch.bfloat16)))


def test_a_gradient_that_is_not_finite_stays_where_it_was_chosen(device):
    """TorchScript's own formula multiplies it by 0."""

    def program(x: Tensor, mask: Tensor):
        return torch.where(mask, x * 2.0, 1.0) * 3.0

    x, _, mask = operands(device)
    incoming = torch.full_like(x, INF)
    scripted = fresh(program)
    with tsfuser.fuser(), no_fallback():
        for _ in range(4):
            x.grad = None
            scripted(x, mask).backward(incoming)
    assert torch.equal(x.grad, torch.where(mask, INF, 0.0))


def test_of_two_tensors_as_well(device):
    def program(x: Tensor, y: Tensor, mask: Tensor):
        return torch.where(mask, x * 2.0, y) * 3.0

    x, w, mask = operands(device)
    scripted = fresh(program)
    with tsfuser.fuser(), no_fallback():
        for _ in range(4):
            x.grad = w.grad = None
            scripted(x, w, mask).backward(torch.full_like(x, INF))
    assert torch.equal(x.grad, torch.where(mask, INF, 0.0))
    assert torch.equal(w.grad, torch.where(mask, 0.0, INF).sum(0))


def kept_elements(program, arguments):
    """How many elements of the size of x the groups of the forward store, and of which dtypes."""
    _, graphs = graphs_of(program, arguments)
    [group] = graphs[0].findAllNodes(GROUP, True)
    return sorted(
        str(v.type().dtype())
        for v in group.g("Subgraph").outputs()
        if v.type().sizes() == list(arguments[0].shape)
    )


@pytest.mark.parametrize("program", [chosen, filled])
def test_an_operand_that_is_asked_for_its_dtype_is_not_stored(device, program):
    assert kept_elements(program, operands(device)) == ["torch.float32"]  # the softmax's result


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.float16])
def test_dtypes_follow_the_rules_of_python_numbers(device, dtype):
    def program(x: Tensor, z: Tensor, mask: Tensor):
        return (
            torch.where(mask, x, 1.5),
            torch.where(mask, 2, x),
            torch.where(mask, z, 1.5),
            torch.where(mask, 1, z),
            x.masked_fill(mask, 1),
        )

    _, _, mask = operands(device)
    x, z = torch.ones(mask.shape, dtype=dtype, device=device), torch.ones([], dtype=dtype, device=device)
    scripted = fresh(program)
    with tsfuser.fuser(), no_fallback():
        for _ in range(4):
            got = scripted(x, z, mask)
    for mine, theirs in zip(got, program(x, z, mask)):
        assert mine.dtype == theirs.dtype and torch.equal(mine, theirs)


def test_a_tensor_of_the_same_value_is_no_number(device):
    """torch pools equal constants."""

    def program(x: Tensor, mask: Tensor):
        return torch.where(mask, x, 1.5), x * torch.tensor(1.5, dtype=torch.float64)

    x, mask = torch.ones([], device=device), torch.ones([], dtype=torch.bool, device=device)
    traced = torch.jit.trace(program, (x, mask))
    with tsfuser.fuser():
        for _ in range(4):
            got = traced(x, mask)
    assert [t.dtype for t in got] == [t.dtype for t in program(x, mask)]


def test_a_cast_that_is_written_to_is_the_tensor_itself(device):
    """`float` of a float32 tensor is that tensor: who writes to one writes to both."""

    def program(x: Tensor, w: Tensor):
        y = x * w
        z = y.float()
        z.mul_(2.0)
        return y + 1.0, z

    x, w, _ = operands(device)
    scripted = fresh(program)
    with tsfuser.fuser():
        for _ in range(4):
            x.grad = None
            y, z = scripted(x, w)
            (y.sum() + z.sum()).backward()
    want = program(x, w)
    assert torch.equal(y, want[0]) and torch.equal(z, want[1])


@pytest.mark.parametrize("program", [chosen, chosen_first, filled])
def test_double_backward(device, program):
    x, w, mask = operands(device, torch.float64, (3, 4))
    scripted = fresh(program)
    with tsfuser.fuser():
        for _ in range(4):
            scripted(x, w, mask).sum().backward()
        assert torch.autograd.gradcheck(lambda x, w: scripted(x, w, mask), (x, w), nondet_tol=1e-12)
        assert torch.autograd.gradgradcheck(lambda x, w: scripted(x, w, mask), (x, w), nondet_tol=1e-12)


def test_other_dtypes_in_later_calls(device):
    scripted = fresh(widened)
    with tsfuser.fuser():
        for dtype in (
            torch.bfloat16,
            torch.bfloat16,
            torch.bfloat16,
            torch.float32,
            torch.float64,
            torch.float16,
        ):
            x, w, mask = operands(device, dtype)
            scripted(x, w, mask).sum().backward()
            got = x.grad
            x.grad = w.grad = None
            widened(x, w, mask).sum().backward()
            assert_matches(got, x.grad, ops=200, precision=torch.float32 if dtype == torch.float64 else None)


def test_nnc_finds_all_as_it_was_when_it_is_on():
    """Torch asks about all ops only while NNC, which would be confused by that, is off."""

    def asks():
        state = _C.ask_about_all(False)
        _C.ask_about_all(state)
        return state

    assert not asks()
    with tsfuser.fuser():
        assert asks()
        torch._C._jit_set_texpr_fuser_enabled(True)
        assert not asks()
        torch._C._jit_set_texpr_fuser_enabled(False)
        assert asks()
    assert not asks()


def test_a_result_may_be_written_to_before_the_backward(device):
    """Eager keeps it for no backward."""

    def program(x: Tensor, mask: Tensor):
        y = (x * 2.0).masked_fill(mask, 0.5)
        z = torch.where(mask, x * 3.0, 0.5)
        return y, z

    x, _, mask = operands(device)
    scripted = fresh(program)
    with tsfuser.fuser():
        for _ in range(4):
            x.grad = None
            y, z = scripted(x, mask)
            with torch.no_grad():
                y.zero_()
                z.zero_()
            (y.sum() + z.sum()).backward()
    assert torch.equal(x.grad, torch.where(mask, 0.0, 2.0) + torch.where(mask, 3.0, 0.0))


@pytest.mark.parametrize(
    "body",
    [
        "(x * 2).masked_fill(m, 0.5) * w + x",
        "torch.tanh(x.masked_fill(m, 2.0)) * 3",
        "torch.where(m, x * 2, 1.0) + 1",
    ],
)
@pytest.mark.parametrize("transposed", [True, False])
def test_strides_are_those_of_eager(device, body, transposed):
    """`masked_fill` gives a row-major tensor whatever the layouts, `where` does not."""
    x, w, mask = operands(device, sizes=(5, 5))
    x, mask = (x.detach().t().requires_grad_(), mask.t()) if transposed else (x, mask)
    eager, scripted = functions(body)
    want = eager(x, w, mask)
    [expected] = torch.autograd.grad(want.t().contiguous().sum(), x)
    for _ in range(4):
        with tsfuser.fuser():
            got = scripted(x, w, mask)
            [gradient] = torch.autograd.grad(got.t().contiguous().sum(), x)
        assert got.stride() == want.stride()
    assert gradient.stride() == expected.stride()  # while torch profiles they are those of `where`


@pytest.mark.each_value
@pytest.mark.parametrize(
    "body",
    [
        "torch.where(m, x, 1.5) * 2j",
        "x.masked_fill(m, 0.5) * 2j",
        "torch.where(m, x, 1.5) * w",
        "x.masked_fill(m, 1.0) * w",
        "x * w * w",
    ],
)
@pytest.mark.parametrize("dtype", [torch.complex64, torch.float32])
def test_gradients_of_complex_numbers_are_eagers(device, body, dtype):
    """Autodiff's formulas conjugate nothing."""
    _, w, m = operands(device)
    x = torch.randn(m.shape, dtype=dtype, device=device, requires_grad=True)
    eager, scripted = functions(body)

    def gradients(function):
        out = function(x, w, m)
        incoming = torch.full_like(out, 1 + 2j if out.is_complex() else 1.5)
        return torch.autograd.grad(out, (x, w), incoming, allow_unused=True)

    expected = gradients(eager)
    with tsfuser.fuser():
        for _ in range(4):
            for mine, theirs in zip(gradients(scripted), expected):
                assert (mine is None) == (theirs is None)
                assert mine is None or torch.allclose(mine, theirs, rtol=1e-4, atol=1e-4)


def test_large_integers_are_not_filled_through_a_float(device):
    def program(x: Tensor, m: Tensor):
        return x.masked_fill(m, 0.5) + 1

    _, _, m = operands(device)
    x = torch.full(m.shape, 2**24 + 1, device=device)
    scripted = fresh(program)
    with tsfuser.fuser():
        for _ in range(4):
            scripted(x.float(), m)
        for _ in range(2):
            assert torch.equal(scripted(x, m), program(x, m))


def test_what_looks_like_masked_fill_is_left_as_it_is(device):
    """It does not raise for numbers that the dtype cannot hold."""

    def program(x: Tensor, m: Tensor):
        return torch.where(m, -1e10, x).type_as(x).contiguous() + 1

    _, _, m = operands(device)
    x = torch.ones(m.shape, dtype=torch.float16, device=device)
    try:
        expected = program(x, m)
    except RuntimeError:
        pytest.skip("eager raises, as torch 2.11 does on CUDA")
    scripted = fresh(program)
    with tsfuser.fuser():
        for _ in range(4):
            assert torch.equal(scripted(x, m), expected)


# ---- the steps over forward and backward


def larger(x: Tensor, w: Tensor, mask: Tensor):
    return torch.max(x * 2.0, w * x)


@pytest.mark.parametrize("program, step", [(chosen, "choose_gradients"), (larger, "share_ties")])
def test_a_step_is_logged_where_it_changes_a_graph(program, step, capsys):
    with options.override(log_levels={"graph_fuser": 1}):
        graphs_of(program, operands("cpu"))
    logged = capsys.readouterr().err
    assert {name for name in ("choose_gradients", "share_ties") if f"After {name}" in logged} == {step}


@pytest.mark.graphs
def test_casts_before_and_behind_a_write_stay_two():
    """The first has two readers, each of which gets a cast of its own."""
    text = (
        "def f(x):\n    i = x.to(torch.int32)\n    x.div_(x * x + 1)\n    return torch.logsumexp(x, [0]), i\n"
    )
    scripted = torch.jit.CompilationUnit(text).f
    with tsfuser.fuser(), torch.autocast("cpu", torch.bfloat16):
        for _ in range(4):
            x = torch.tensor([2.625, 1.0], dtype=torch.bfloat16)
            found, _ = scripted(x)
            torch.testing.assert_close(found, torch.logsumexp(x.float(), 0))


def test_places_of_a_condition(device):
    def program(x: Tensor):
        places = torch.where(x > 0)
        return (torch.exp(x) + places[0].size(0)) * 2

    scripted = fresh(program)
    with tsfuser.fuser():
        for k in range(4):
            x = torch.randn(k + 3, 4, device=device)
            torch.testing.assert_close(scripted(x), program(x))
