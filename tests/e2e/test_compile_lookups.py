"""Lookups with `torch.compile(backend="tsfuser")`: one kernel with what is around them; gradients."""

import math

import pytest
import torch
import torch.nn.functional as F

import tsfuser
from kit.lookups import indices
from kit.support import assert_matches, counted, no_fallback, train

pytestmark = [pytest.mark.usefixtures("forgotten", "fused_or_error")]


def bucket(distance, buckets=32, most=128):
    """T5's: of the first half of the distances each has one of its own, others share them by logarithm."""
    ahead = (distance > 0).long() * (buckets // 2)
    far, half = distance.abs(), buckets // 4
    shared = half + (torch.log(far.float() / half) / math.log(most / half) * half).long()
    return ahead + torch.where(far < half, far, shared.clamp(max=buckets // 2 - 1))


def relative_positions(scores, table):
    here = torch.arange(scores.size(-1), device=scores.device)
    bias = F.embedding(bucket(here[None, :] - here[:, None]), table)
    return torch.softmax(scores + bias.permute(2, 0, 1)[None], -1)


#: The program, and the sizes of its tensors and, behind a number below which they are, of its indices.
PROGRAMS = {
    "embedding and norm": (
        lambda i, w, p: F.layer_norm(F.embedding(i, w) + p, (24,)), [(40, (3, 9)), (40, 24), (9, 24)]
    ),
    "gather and weight": (lambda x, i, w: x.gather(1, i) * w, [(7, 33), (33, (7, 5)), (7, 5)]),
    "rows and relu": (lambda x, i: x.index_select(0, i).relu() + 1.0, [(9, 16), (9, (20,))]),
    "relative positions": (relative_positions, [(2, 4, 20, 20), (32, 4)]),
    "messages of a graph": (lambda x, i, w: x[i] * w[:, None], [(9, 16), (9, (30,)), (30,)]),
    "differences on edges": (
        lambda x, i, j: (x[i] - x[j]).square().sum(-1), [(9, 3), (9, (30,)), (9, (30,))]
    ),
    "a table of pairs": (lambda x, i, j: torch.tanh(x[i[:, None], j] * 2.0), [(9, 7), (9, (5,)), (7, (6,))]),
    "one place of each row": (
        lambda i, s: s.new_zeros(s.size(0), 33).scatter_add(1, i, s.exp()).cos(), [(33, (7, 1)), (7, 1)]
    ),
    "experts": (lambda x, i, w: (x[i] * w[..., None]).sum(1), [(9, 16), (9, (6, 2)), (6, 2)]),
}  # fmt: skip


def made(sizes, device):
    found = []
    for size in sizes:
        if len(size) == 2 and isinstance(size[1], tuple):
            found.append(indices(size[1], size[0], device))
        else:
            found.append(torch.randn(size, device=device))
    return found


def exactly(inputs):
    return [x.detach().double() if x.is_floating_point() else x for x in inputs]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_one_kernel(device, target, name, dynamic):
    function, sizes = PROGRAMS[name]
    inputs, run = made(sizes, device), torch.compile(function, backend="tsfuser", dynamic=dynamic)
    with no_fallback(), torch.no_grad():
        run(*inputs)
        with counted() as rise:
            found = run(*inputs)
        assert_matches(found, function(*inputs), function(*exactly(inputs)), ops=60)
    assert rise["launches"] == 1 and " in 1 group and 1 kernel" in str(tsfuser.explain(run, *inputs))


@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients(device, name):
    function, sizes = PROGRAMS[name]
    inputs, run = made(sizes, device), torch.compile(function, backend="tsfuser")
    wide = [x.requires_grad_() if x.is_floating_point() else x for x in exactly(inputs)]
    inputs = [x.requires_grad_() if x.is_floating_point() else x for x in inputs]
    exact, wanted = train(function, wide, calls=1)
    eager, gradients = train(function, inputs, calls=1)
    with no_fallback(), counted() as rise:
        found, own = train(run, inputs, calls=2)
    assert_matches(found, eager, exact, ops=60)
    for mine, eagers, exactly_ in zip(own, gradients, wanted):
        assert_matches(mine, eagers, exactly_, ops=100)
    assert rise["launches"] >= 2


@pytest.mark.parametrize("target", ["cpu", "cpu-fibers"])
@pytest.mark.parametrize(
    "name", ["gather and weight", "messages of a graph", "embedding and norm", "one place of each row"]
)
def test_an_index_out_of_range_raises_what_eager_raises(device, target, name):
    function, sizes = PROGRAMS[name]
    inputs, run = made(sizes, device), torch.compile(function, backend="tsfuser")
    with torch.no_grad():
        run(*inputs)
        [place] = [k for k, x in enumerate(inputs) if not x.is_floating_point()]
        inputs[place] = inputs[place].clone()
        inputs[place].view(-1)[4] = 1000
        with pytest.raises((IndexError, RuntimeError)) as expected:
            function(*inputs)
        with pytest.raises(type(expected.value)) as found:
            run(*inputs)
    assert str(found.value).startswith(str(expected.value))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    "sizes, dim", [((7, 33), 1), ((5, 4, 9), 0), ((3, 1, 6), 1), ((4, 3, 5), -2), ((6,), 0)]
)
def test_the_gradient_of_a_gather_of_one_place_is_part_of_a_group(device, dtype, sizes, dim):
    """torch has zeros and a scatter for it."""

    def function(x, i):
        return (x * 2).gather(dim, i) * 3

    run = torch.compile(function, backend="tsfuser")
    x = torch.randn(sizes).to(dtype).to(device).requires_grad_()
    i = indices([1 if d == dim % x.dim() else n for d, n in enumerate(sizes)], sizes[dim], device)
    eager, wanted = train(function, [x, i], calls=1)
    with no_fallback():
        train(run, [x, i], calls=1)
        with counted() as rise:
            found, own = train(run, [x, i], calls=1)
    assert torch.equal(found, eager) and torch.equal(own[0], wanted[0])
    assert own[0].stride() == wanted[0].stride() and rise["launches"] == 2


@pytest.mark.parametrize("count, rows", [(2, 7), (1, 5), (0, 7)])
def test_a_gradient_of_several_places_or_of_a_part_is_torchs(device, count, rows):
    def function(x, i):
        return (x * 2).gather(1, i) * 3

    x, i = torch.randn(7, 33, device=device, requires_grad=True), indices((rows, count), 33, device)
    _, wanted = train(function, [x, i], calls=1)
    with no_fallback():
        _, own = train(torch.compile(function, backend="tsfuser"), [x, i], calls=2)
    torch.testing.assert_close(own[0], wanted[0])


def test_a_loss_of_chosen_tokens_reads_the_logits_once_in_its_backward(device):
    def function(x, i):
        return torch.log_softmax(x.float(), -1).gather(-1, i.unsqueeze(-1)).squeeze(-1)

    x = torch.randn(9, 130).bfloat16().to(device).requires_grad_()
    i, run = indices((9,), 130, device), torch.compile(function, backend="tsfuser")
    _, wanted = train(function, [x.detach().double().requires_grad_(), i], calls=1)
    _, eager = train(function, [x, i], calls=1)
    with no_fallback():
        train(run, [x, i], calls=1)
        with counted() as rise:
            _, own = train(run, [x, i], calls=1)
    assert_matches(own[0], eager[0], wanted[0], ops=60)
    assert rise["launches"] == 2
