"""The backward computes values again from a tensor that is in memory anyway: from a product and a copy of the
bias that is added to it, and with `keep_inputs` from the program's inputs."""

import math

import pytest
import torch
from torch import Tensor

import tsfuser
from kit.autodiff_only import by_joint_graphs
from kit.support import assert_matches, fresh, kinds, no_fallback
from tsfuser import options
from tsfuser.frontends.torchscript import passes

pytestmark = pytest.mark.graphs

SIZES = (12, 16, 24)


def biased(x: Tensor, w: Tensor, b: Tensor):
    return torch.nn.functional.gelu(torch.mm(x, w) + b)


def read_twice(x: Tensor, w: Tensor, b: Tensor):
    p = torch.mm(x, w)
    return (p * 0.5 + 0.25) * torch.sigmoid(p) * b


def viewed(x: Tensor, w: Tensor, b: Tensor):
    """The product is made by another differentiable graph, which asking for its size ends."""
    p = torch.mm(torch.tanh(x), w)
    h = (p + b.exp()).view(p.size(0) // 2, 2, p.size(1))
    return h * torch.tanh(h)


PROGRAMS = [biased, read_twice, viewed]


def operands(device, dtype=torch.float64, sizes=SIZES):
    generator = torch.Generator().manual_seed(5)
    m, k, n = sizes
    made = [torch.randn(s, generator=generator, dtype=torch.float64) / 2 for s in ((m, k), (k, n), (n,))]
    return [t.to(device, dtype).requires_grad_() for t in made]


def step(function, tensors, change=None):
    out = function(*tensors)
    result = out[0] if isinstance(out, tuple) else out
    if change is not None:
        with torch.no_grad():
            change(*tensors, out)
    return [result.detach(), *torch.autograd.grad(result.square().sum(), tensors)]


def assert_close(got, want):
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs)


def is_backward(graph):
    return graph.findNode("prim::AutogradAllNonZero") is not None


def stored(seen, elements=SIZES[0] * SIZES[2]):
    """How many tensors of so many elements the groups of forwards store."""
    count = 0
    for optimised in seen:
        for group in optimised.graph.findAllNodes("prim::CudaFusionGroup", True):
            if not is_backward(optimised.graph):
                sizes = [v.type().sizes() for v in group.g("Subgraph").outputs() if str(v.type()) != "int"]
                count += sum(s is not None and math.prod(s) == elements for s in sizes)
    return count


def trained(function, tensors, change=None):
    """What the fourth step of the scripted function gives, and how many large tensors its forward stores."""
    scripted = fresh(function)
    with tsfuser.fuser(), no_fallback(), passes.watching() as seen:
        for _ in range(4):
            got = step(scripted, [t.detach().clone().requires_grad_() for t in tensors], change)
    return got, stored(seen)


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_forward_stores_its_result_only(device, program):
    tensors = operands(device, torch.float32)
    got, count = trained(program, tensors)
    assert count == 1 or by_joint_graphs()  # which keeps fewer bytes, if it writes more
    exact = step(program, [t.detach().double().requires_grad_() for t in tensors])
    for mine, theirs, true in zip(got, step(program, tensors), exact, strict=True):
        assert_matches(mine, theirs, true, ops=16, strides=False)


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("sizes", [(2, 1, 1), (4, 3, 130), (0, 4, 8)])
def test_other_sizes(device, program, sizes):
    scripted = fresh(program)
    with tsfuser.fuser():
        for _ in range(4):
            step(scripted, operands(device))
        got = step(scripted, operands(device, sizes=sizes))
    assert_close(got, step(program, operands(device, sizes=sizes)))


@pytest.mark.parametrize("program", PROGRAMS)
def test_second_derivatives(device, program):
    def derivatives(function, tensors):
        first = torch.autograd.grad(function(*tensors).square().sum(), tensors, create_graph=True)
        return [*first, *torch.autograd.grad(sum(t.square().sum() for t in first), tensors)]

    scripted = fresh(program)
    with tsfuser.fuser():
        for _ in range(4):
            got = derivatives(scripted, operands(device))
    assert_close(got, derivatives(program, operands(device)))


def returned(x: Tensor, w: Tensor, b: Tensor):
    p = torch.mm(x, w)
    return torch.nn.functional.gelu(p + b), p


@pytest.mark.parametrize(
    "program, change, large",  # large: tensors that the forward stores
    [
        (biased, lambda x, w, b, out: b.add_(3.0), 1),  # eager's sum keeps no operand: b is copied
        (returned, lambda x, w, b, out: out[1].zero_(), 2),  # the program gets the product: the sum is kept
    ],
)
def test_what_is_written_to_before_the_backward(device, program, change, large):
    got, count = trained(program, operands(device), change)
    assert count == large or by_joint_graphs()
    assert_close(got, step(program, operands(device), change))


def view_before_its_tensor(x: Tensor, w: Tensor, b: Tensor):
    p = torch.mm(x, w)
    h = p + b
    return torch.nn.functional.gelu(h), p * h.view(-1, w.size(1))


def test_a_view_that_is_kept_before_its_tensor(device):
    """What is computed again comes in the order of the forward, whatever that of the kept values."""
    both = lambda function: lambda *given: torch.cat(function(*given), 1)
    scripted = fresh(view_before_its_tensor)
    with tsfuser.fuser(), no_fallback():
        for _ in range(5):
            got = step(both(scripted), operands(device))
    assert_close(got, step(both(view_before_its_tensor), operands(device)))


def chain(x: Tensor, w: Tensor, b: Tensor):
    p = torch.mm(x, w)
    for _ in range(20):
        p = torch.tanh(p + b)
    return p


def test_of_a_long_chain_some_values_are_kept(device):
    """Each is computed again by a few ops only."""
    got, count = trained(chain, operands(device))
    assert (1 if by_joint_graphs() else 3) <= count <= 8  # each of a region by up to 64
    assert_close(got, step(chain, operands(device)))


def two_products(x: Tensor, w: Tensor, b: Tensor):
    return torch.nn.functional.gelu(torch.mm(x, w) + torch.mm(x * 2.0, w * b))


def test_two_tensors_are_not_kept_for_one(device):
    got, count = trained(two_products, operands(device))
    assert count == 2
    assert_close(got, step(two_products, operands(device)))


# ---- keep_inputs


def given(x: Tensor, w: Tensor, b: Tensor):
    h = x * 0.5 + 0.25
    return h * torch.sigmoid(x) + (w.sum() + b.sum()) * 0.0


def given_and_biased(x: Tensor, w: Tensor, b: Tensor):
    return torch.nn.functional.gelu(x + b[:1]) + (w.sum() + b.sum()) * 0.0


@pytest.mark.parametrize("program", [given, given_and_biased])
@pytest.mark.parametrize("enabled", [False, True])
def test_inputs_are_kept_where_that_is_enabled(device, program, enabled):
    sizes = (12, 16, 8)
    tensors, scripted = operands(device, sizes=sizes), fresh(program)
    with (
        options.override(enable={"keep_inputs": ""} if enabled else {}),
        tsfuser.fuser(),
        no_fallback(),
        passes.watching() as seen,
    ):
        for _ in range(4):
            got = step(scripted, tensors)
        count = stored(seen, 12 * 16)
        change = lambda x, w, b, out: x.add_(1.0)
        if enabled:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                step(scripted, operands(device, sizes=sizes), change)
        else:
            changed = step(scripted, operands(device, sizes=sizes), change)
            assert_close(changed, got)
    assert count == 1 if enabled else count > 1
    assert_close(got, step(program, tensors))


def writes(x: Tensor, w: Tensor, b: Tensor):
    h = torch.exp(x * 0.5) * w.mean()
    y = torch.tanh(h) * h
    with torch.no_grad():
        x.add_(1.0)
    return y + b.sum() * 0.0


def test_what_the_program_writes_to_itself_is_not_kept(device):
    scripted = fresh(writes)
    with options.override(enable={"keep_inputs": ""}), tsfuser.fuser():
        for _ in range(4):
            x, w, b = operands(device)
            got = step(lambda x, w, b: scripted(x * 1.0, w, b), (x, w, b))
    want = step(lambda x, w, b: writes(x * 1.0, w, b), operands(device))
    assert_close(got, want)


# ---- copies of inputs


def three_factors(x: Tensor, w: Tensor, b: Tensor):
    return torch.tanh(x * 2.0) * torch.sigmoid(x) * torch.exp(x * -0.5) + (w.sum() + b.sum()) * 0.0


def two_biased(x: Tensor, w: Tensor, b: Tensor):
    """A copy of the bias, too."""
    return torch.tanh(x * 2.0 + b) * torch.sigmoid(x + b) + w.sum() * 0.0


def one_factor(x: Tensor, w: Tensor, b: Tensor):
    return torch.tanh(x * 2.0) + torch.mm(torch.sort(x, 0)[0], w) + b


def read_by_two(x: Tensor, w: Tensor, b: Tensor):
    """One result, which is kept for two derivatives."""
    y = torch.tanh(x)
    return torch.layer_norm(y, [16]) * w.sum() + b.sum() * 0.0


def two_inputs(x: Tensor, w: Tensor, b: Tensor):
    return torch.tanh(x + b) * torch.sigmoid(x * 2.0 + w)


SQUARE = (16, 16, 16)


def copied(graph):
    """The copies of whole tensors that groups of a forward store, but for those of small ones."""
    groups = [] if is_backward(graph) else graph.findAllNodes("prim::CudaFusionGroup", True)
    for group in groups:
        for node in group.g("Subgraph").findAllNodes("aten::clone", False):
            sizes = node.output().type().sizes()
            if sizes is None or math.prod(sizes) == 16 * 16:
                yield node.kind()


@pytest.mark.parametrize(
    "program, expected",
    [(given, 2), (three_factors, 2), (two_biased, 2), (one_factor, 2), (two_inputs, 3), (read_by_two, None)],
)
def test_an_input_is_copied_where_it_stands_for_several_results(device, program, expected):
    """The result, and what is kept; the program may write to the input before the backward."""
    scripted = fresh(program)
    with tsfuser.fuser(), no_fallback(), passes.watching() as seen:
        for _ in range(4):
            got = step(scripted, operands(device, sizes=SQUARE))
        count = stored(seen, 16 * 16)
        changed = step(scripted, operands(device, sizes=SQUARE), lambda x, w, b, out: x.add_(1.0))
    assert expected is None or count == expected
    copies = [kind for o in seen for kind in copied(o.graph)]
    assert bool(copies) == (program in (given, three_factors, two_biased))
    assert_close(got, step(program, operands(device, sizes=SQUARE)))
    assert_close(changed, got)


@pytest.mark.parametrize("program", [given, three_factors])
def test_what_is_computed_of_a_copy_is_differentiated_again(device, program):
    x, w, b = (t.double().requires_grad_() for t in operands(device, sizes=(3, 4, 4)))
    scripted = fresh(program)
    with tsfuser.fuser():
        for _ in range(3):
            scripted(x, w, b).sum().backward()
        assert torch.autograd.gradgradcheck(lambda x: scripted(x, w, b), (x.detach().requires_grad_(),))


def test_no_copy_of_an_input_in_32_bits_stands_for_two_in_16(device):
    def program(x: Tensor):
        y = x.to(torch.bfloat16)
        return torch.tanh(y * 2.0) * torch.sigmoid(y)

    scripted = fresh(program)
    x = torch.randn(16, 16, device=device, requires_grad=True)
    with tsfuser.fuser(), passes.watching() as seen:
        for _ in range(4):
            scripted(x).float().sum().backward()
    forward = [o.graph for o in seen if o.graph.findNode("prim::AutogradAllNonZero") is None]
    outputs = [node for graph in forward for node in graph.findAllNodes("prim::CudaFusionGroup", True)]
    assert "aten::clone" not in {kind for group in outputs for kind in kinds(group)}
