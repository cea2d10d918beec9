"""Results of softmax that the backward computes again, of the product in front of it."""

import pytest
import torch
from torch import Tensor

import tsfuser
from kit.autodiff_only import by_joint_graphs
from kit.support import assert_matches, fresh, kinds, no_fallback, script
from tsfuser.frontends.torchscript import passes

SOURCE = """def program(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, s: float):
    scores = torch.matmul(q, k.transpose(-2, -1))
    weights = torch.{op}({scores}, {dim})
    return torch.matmul({weights}, v)
"""
#: What is taken the softmax of.
SCORES = {
    "the product": "scores",
    "scaled": "scores * s",
    "a mask that is added": "scores / s + mask",
    "a mask that is kept": "torch.where(mask > 0.1, scores * 0.5, -10000.0)",
    "a filled mask": "(scores * 0.5).masked_fill(mask > 0.1, -10000.0)",
    "ops": "torch.tanh(scores * 0.25) * 4.0 + mask * 2.0",
    "two readers": "scores * torch.sigmoid(scores * 0.5)",
}


def source(scores="scores", op="softmax", dim=-1, weights="(weights * 2.0)"):
    return SOURCE.format(scores=SCORES.get(scores, scores), op=op, dim=dim, weights=weights)


def plain(text):
    scope = {"torch": torch, "Tensor": Tensor}
    exec(text, scope)
    return scope["program"]


def operands(device, dtype=torch.float32, sizes=(2, 3, 24, 8), mask=(24,)):
    generator = torch.Generator().manual_seed(3)
    made = [torch.randn(*sizes, generator=generator, dtype=torch.float64) for _ in range(3)]
    q, k, v = (x.to(device, dtype).requires_grad_() for x in made)
    return q, k, v, torch.rand(*mask, generator=generator, dtype=torch.float64).to(device, dtype)


def trained(function, tensors, autocast=False, calls=1):
    q, k, v, mask = tensors
    for _ in range(calls):
        with torch.autocast(q.device.type, torch.bfloat16, enabled=autocast):
            y = function(q, k, v, mask, 0.375)
        gradients = torch.autograd.grad((y.double() ** 2).sum(), (q, k, v))
    return [y.detach(), *gradients]


def exact(function, tensors):
    return trained(function, [t.detach().double().requires_grad_(t.requires_grad) for t in tensors])


def computed(seen):
    """How many groups of backwards compute a softmax."""
    groups = [kinds(g) for o in seen for g in o.graph.findAllNodes("prim::CudaFusionGroup", True)]
    again = [
        g for g in groups if "_softmax_backward_data" in str(g) or "_log_softmax_backward_data" in str(g)
    ]
    return sum("aten::softmax" in g or "aten::log_softmax" in g for g in again)


def first_order(function, tensors, moving):
    return torch.autograd.grad((function(*tensors) ** 2).sum(), moving)


def second_order(function, tensors, moving):
    """Gradients, and those of their squares."""
    first = torch.autograd.grad((function(*tensors) ** 2).sum(), moving, create_graph=True)
    return [*first, *torch.autograd.grad(sum((t**2).sum() for t in first), moving)]


def check_both_orders(scripted, eager, tensors, moving):
    """A softmax is computed again, and first and second derivatives of float64 are eager's."""
    with tsfuser.fuser(), passes.watching() as seen:
        first = [first_order(scripted, tensors, moving) for _ in range(4)][-1]
        # a joint graph keeps it where a mask is large beside it
        assert computed(seen) >= (0 if by_joint_graphs() else 1)
        second = [second_order(scripted, tensors, moving) for _ in range(5)][-1]
    want = second_order(eager, tensors, moving)
    for mine, theirs in zip([*first, *second], [*want[: len(moving)], *want]):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.each_value
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("scores", SCORES)
def test_gradients(device, scores, autocast):
    text, tensors = source(scores), operands(device)
    scripted = script(text)
    with tsfuser.fuser(), no_fallback(), passes.watching() as seen:
        got = trained(scripted, tensors, autocast, 4)
    assert computed(seen) == 1
    for mine, theirs, true in zip(got, trained(plain(text), tensors, autocast), exact(plain(text), tensors)):
        precision = torch.bfloat16 if autocast else torch.float32
        assert_matches(mine, theirs, true, ops=400, strides=False, precision=precision)  # those of q's copy


@pytest.mark.parametrize("op", ["softmax", "log_softmax"])
@pytest.mark.parametrize("dim", [-1, 1, 2])
@pytest.mark.parametrize("sizes", [(2, 3, 24, 8), (1, 5, 1, 3), (3, 1, 130, 1), (1, 2, 1030, 4)])
def test_dims_and_sizes(device, op, dim, sizes):
    text, tensors = source("scaled", op, dim), operands(device, sizes=sizes)
    scripted, first = script(text), operands(device)
    with tsfuser.fuser(), no_fallback(), passes.watching() as seen:
        trained(scripted, first, calls=4)
        got = trained(scripted, tensors)
    assert computed(seen) == 1
    for mine, theirs, true in zip(got, trained(plain(text), tensors), exact(plain(text), tensors)):
        assert_matches(mine, theirs, true, ops=4000)


@pytest.mark.parametrize(
    "scores", ["the product", "a mask that is added", "a mask that is kept", "ops", "two readers"]
)
def test_second_derivatives(device, scores):
    q, k, v, mask = operands(device, torch.float64, (2, 2, 6, 3), (6,))
    text = source(scores)
    check_both_orders(script(text), plain(text), (q, k, v, mask, 0.375), (q, k, v))


def test_views_between_the_ops(device):
    """As in Swin's attention over shifted windows, where each window has a mask."""

    def program(q: Tensor, k: Tensor, v: Tensor, mask: Tensor):
        n, heads, length = q.size(0), q.size(1), q.size(2)
        scores = torch.matmul(q, k.transpose(-2, -1)) * 0.5
        scores = scores.view(n // mask.size(0), mask.size(0), heads, length, length)
        scores = (scores + mask.unsqueeze(1).unsqueeze(0)).view(-1, heads, length, length)
        return torch.matmul(torch.softmax(scores, -1) * 2.0, v)

    scripted, tensors = fresh(program), operands(device, torch.float64, (40, 3, 6, 8), (2, 6, 6))
    check_both_orders(scripted, program, tensors, tensors[:3])
    others = operands(device, torch.float64, (6, 2, 7, 4), (3, 7, 7))
    with tsfuser.fuser():
        got = first_order(scripted, others, others[:3])
    for mine, theirs in zip(got, first_order(program, others, others[:3])):
        torch.testing.assert_close(mine, theirs)


def test_a_dim_that_the_call_names(device):
    def program(q: Tensor, k: Tensor, v: Tensor, dim: int):
        weights = torch.softmax(torch.matmul(q, k.transpose(-2, -1)) * 0.5, dim)
        return torch.matmul(weights * 2.0, v)

    q, k, v, _ = operands(device)
    scripted = fresh(program)
    with tsfuser.fuser(), no_fallback():
        for dim in (-1, -1, -1, -1, 2, 1, -1):
            y = scripted(q, k, v, dim)
            got = [y.detach(), *torch.autograd.grad((y**2).sum(), (q, k, v))]
            y = program(q, k, v, dim)
            want = [y.detach(), *torch.autograd.grad((y**2).sum(), (q, k, v))]
            for mine, theirs in zip(got, want):
                assert_matches(mine, theirs, ops=400)


@pytest.mark.parametrize("autocast", [False, True])
def test_what_is_kept(device, autocast):
    """Of a dropout's operand the product, in the dtype that it has, and nothing in float32 under autocast."""
    text = source("a mask that is added", weights="torch.dropout(weights, 0.25, True)")
    q, k, v, mask = operands(device)
    scripted, kept = script(text), []

    def pack(tensor):
        kept.append((tensor.numel(), tensor.dtype))
        return tensor

    with tsfuser.fuser(), no_fallback():
        for _ in range(6):
            kept.clear()
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                with torch.autocast(q.device.type, torch.bfloat16, enabled=autocast):
                    y = scripted(q, k, v, mask, 0.375)
            torch.autograd.grad(y.sum(), q)
    rows = 2 * 3 * 24 * 24
    dtypes = sorted(str(dtype) for count, dtype in kept if count == rows and dtype.is_floating_point)
    assert dtypes == [str(torch.bfloat16 if autocast else torch.float32)] * 2  # scores, and v's other operand


@pytest.mark.parametrize("calls", [1, 4])
def test_a_mask_that_is_written_to_before_the_backward(device, calls):
    text, (q, k, v, mask) = source("a mask that is added"), operands(device)
    scripted, want = script(text), trained(plain(text), (q, k, v, mask))
    with tsfuser.fuser(), no_fallback():
        trained(scripted, (q, k, v, mask), calls=calls)
        other = mask.clone()
        y = scripted(q, k, v, other, 0.375)
        other.fill_(float("nan"))
        got = [y.detach(), *torch.autograd.grad((y.double() ** 2).sum(), (q, k, v))]
    for mine, theirs in zip(got, want):
        assert_matches(mine, theirs, ops=400)


CHAINS = {
    "direct": "torch.softmax(torch.softmax(scores, -1), 1)",
    "a mask between": "torch.softmax(torch.log_softmax(scores, -1) + mask, 1)",
    "three": "torch.softmax(torch.softmax(torch.softmax(scores, -1) - mask, 1), -1)",
}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("chain", CHAINS)
def test_one_softmax_of_another(device, chain, autocast):
    text, tensors = source().replace("torch.softmax(scores, -1)", CHAINS[chain]), operands(device)
    scripted = script(text)
    with tsfuser.fuser(), no_fallback():
        got = trained(scripted, tensors, autocast, 4)
    precision = torch.bfloat16 if autocast else torch.float32
    for mine, theirs, true in zip(got, trained(plain(text), tensors, autocast), exact(plain(text), tensors)):
        assert_matches(mine, theirs, true, ops=4000, strides=False, precision=precision)


@pytest.mark.parametrize("chain", CHAINS)
def test_second_derivatives_of_one_softmax_of_another(device, chain):
    text = source().replace("torch.softmax(scores, -1)", CHAINS[chain])
    q, k, v, mask = operands(device, torch.float64, (2, 2, 6, 3), (6,))
    check_both_orders(script(text), plain(text), (q, k, v, mask, 0.375), (q, k, v))


def test_a_number_with_a_gradient_that_fills(device):
    """The form that autodiff knows has the operands in another order."""

    def program(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, number: Tensor):
        scores = (torch.matmul(q, k.transpose(-2, -1)) * 0.5).masked_fill(mask > 0.5, number)
        return torch.matmul(torch.softmax(scores, -1) * 2.0, v) * number

    q, k, v, mask = operands(device, torch.float64, (2, 2, 6, 3), (6,))
    number = torch.tensor(-1.5, dtype=torch.float64, device=device, requires_grad=True)
    scripted, moving = fresh(program), (q, k, v, number)
    with tsfuser.fuser():
        got = [second_order(scripted, (q, k, v, mask, number), moving) for _ in range(6)][-1]
    for mine, theirs in zip(got, second_order(program, (q, k, v, mask, number), moving)):
        torch.testing.assert_close(mine, theirs)


def test_a_mask_with_a_gradient(device):
    text, (q, k, v, mask) = source("a mask that is added"), operands(device, torch.float64)
    mask.requires_grad_()
    check_both_orders(script(text), plain(text), (q, k, v, mask, 0.375), (q, k, v, mask))


def test_a_mask_whose_gradient_is_asked_for_in_some_calls(device):
    text, (q, k, v, mask) = source("a mask that is added"), operands(device)
    scripted, eager = script(text), plain(text)
    with tsfuser.fuser():
        for turn in range(10):
            mask.requires_grad_(turn > 3 and turn % 2 == 1)
            leaves = [t for t in (q, k, v, mask) if t.requires_grad]
            got, want = (
                torch.autograd.grad((f(q, k, v, mask, 0.375) ** 2).sum(), leaves) for f in (scripted, eager)
            )
            for mine, theirs in zip(got, want):
                assert_matches(mine, theirs, ops=400)


def test_what_is_looked_up_in_a_table(device):
    """As relative positions in Swin's attention, with gradients for the table."""

    def program(q: Tensor, k: Tensor, v: Tensor, table: Tensor, index: Tensor):
        bias = table[index].view(q.size(-2), q.size(-2), q.size(1)).permute(2, 0, 1).contiguous().unsqueeze(0)
        weights = torch.softmax(torch.matmul(q, k.transpose(-2, -1)) * 0.5 + bias, -1)
        return torch.matmul(weights * 2.0, v)

    q, k, v, _ = operands(device, torch.float64, (40, 3, 6, 8), (6,))
    generator = torch.Generator().manual_seed(4)
    table = torch.randn(11, 3, generator=generator, dtype=torch.float64).to(device).requires_grad_()
    index = torch.randint(0, 11, (36,), generator=generator).to(device)
    check_both_orders(fresh(program), program, (q, k, v, table, index), (q, k, v, table))


def test_a_large_mask_is_not_copied(device):
    text, tensors = source("a mask that is added"), operands(device, mask=(2, 3, 24, 24))
    scripted = script(text)
    with tsfuser.fuser(), no_fallback(), passes.watching() as seen:
        got = trained(scripted, tensors, calls=4)
    assert seen and computed(seen) == 0
    for mine, theirs, true in zip(got, trained(plain(text), tensors), exact(plain(text), tensors)):
        assert_matches(mine, theirs, true, ops=400)


@pytest.mark.parametrize(
    "weights", ["weights", "(weights * torch.cumsum(weights, -1))", "(weights * v.sum() * weights)"]
)
def test_a_result_that_is_in_memory_or_read_elsewhere_is_kept(device, weights):
    text, tensors = source(weights=weights), operands(device)
    scripted = script(text)
    with tsfuser.fuser(), no_fallback(), passes.watching() as seen:
        got = trained(scripted, tensors, calls=4)
    assert seen and computed(seen) == 0
    for mine, theirs, true in zip(got, trained(plain(text), tensors), exact(plain(text), tensors)):
        assert_matches(mine, theirs, true, ops=4000)


def test_scores_that_the_program_has_are_not_kept_instead(device):
    text = source().replace("    return torch.matmul(", "    return scores, torch.matmul(")
    q, k, v, mask = operands(device)
    scripted = script(text)

    def run(function):
        scores, y = function(q, k, v, mask, 0.375)
        scores.detach().zero_()
        return torch.autograd.grad((y**2).sum(), (q, k, v))

    with tsfuser.fuser(), no_fallback(), passes.watching() as seen:
        for _ in range(4):
            got = run(scripted)
    assert seen and computed(seen) == 0
    for mine, theirs in zip(got, run(plain(text))):
        assert_matches(mine, theirs, ops=400)
