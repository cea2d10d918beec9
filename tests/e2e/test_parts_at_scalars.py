"""Programs that scale many tensors by a number that they compute: one launch for the number, one for them."""

import pytest
import torch

import tsfuser
from kit.handwritten import CPU, fuse_graph, graph, typed
from kit.support import assert_matches, counted, kinds, no_fallback
from tsfuser.frontends.dynamo.groups.parts_at_scalars import part_at_scalars
from tsfuser.graph.wrapper import GROUP
from tsfuser.grouping.groups import Group

pytestmark = pytest.mark.usefixtures("forgotten", "fused_or_error")
SIZES = [(8, 12), (8,), (3, 5, 7), (1,), (40, 9), (6,), (0, 4), (17,)]


def tensors(device, dtype=torch.float32, scale=3.0):
    generator = torch.Generator().manual_seed(5)
    return [(torch.randn(n, generator=generator) * scale).to(dtype).to(device) for n in SIZES]


def clipped(*gradients):
    norms = torch.stack(torch._foreach_norm(list(gradients)))
    factor = (1.0 / (torch.linalg.vector_norm(norms) + 1e-6)).clamp(max=1.0)
    return torch._foreach_mul(list(gradients), factor)


def check(function, arguments, ops=60):
    run = torch.compile(function, backend="tsfuser")
    with torch.no_grad(), no_fallback():
        run(*arguments)
        with counted() as rise:
            found = run(*arguments)
        eager, exact = function(*arguments), function(*(a.double() for a in arguments))
    for mine, theirs, wanted in zip(found, eager, exact):
        assert_matches(mine, theirs, wanted, ops=ops)
    return rise, run


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [3.0, 1e-3])
def test_gradients_are_clipped_by_two_launches(device, target, dtype, scale):
    rise, run = check(clipped, tensors(device, dtype, scale))
    assert rise["launches"] <= 3 or target == "cpu"  # tensors of several dims have a kernel of their own


@pytest.mark.parametrize("special", [float("nan"), float("inf")])
def test_a_norm_that_is_not_finite_spreads_as_in_eager(device, special):
    given = tensors(device)
    given[1][3] = special
    with torch.no_grad():
        found = torch.compile(clipped, backend="tsfuser")(*given)
        for mine, eager in zip(found, clipped(*given)):
            assert torch.equal(mine.isnan(), eager.isnan()) and torch.equal(mine.isinf(), eager.isinf())


def test_a_step_of_sgd_behind_the_clipping_is_part_of_it(device, target):
    def step(*given):
        parameters, gradients = given[: len(SIZES)], given[len(SIZES) :]
        return [p * 0.999 - g * 0.1 for p, g in zip(parameters, clipped(*gradients))]

    rise, _ = check(step, [*tensors(device), *tensors(device, scale=0.5)])
    assert rise["launches"] <= 4 or target == "cpu"


def test_a_part_that_waits_for_another_one_stays(device):
    """The scalar is a sum of a part's results."""

    def function(x, *others):
        y = x * 2.0
        return [y, *(o * y.sum() for o in others)]

    check(function, tensors(device), ops=200)


def test_each_scales_by_a_number_of_its_own(device):
    def function(*given):
        return [torch.tanh(x * x.sum()) for x in given]

    check(function, tensors(device, scale=0.1), ops=200)


def test_scalars_on_the_cpu_beside_tensors_that_are_not(device):
    def function(rate, *given):
        return [x * (rate * 2.0 + 1.0) for x in given]

    rate = torch.tensor(0.5)
    run = torch.compile(function, backend="tsfuser")
    given = tensors(device)
    with torch.no_grad():
        run(rate, *given)
        for mine, eager in zip(run(rate, *given), function(rate, *given)):
            torch.testing.assert_close(mine, eager)


def test_scalars_of_both_kinds(device):
    """As in a step of an optimizer that counts its steps on the GPU, and has its rate on the CPU."""

    def function(rate, beta, step, *given):
        step, decay = step + 1, 1.0 - rate * 0.01
        size = -rate / (1.0 - beta**step)
        return [step, *(x * decay * (1.0 - beta) + size * x.cos() for x in given)]

    rate, beta, step = torch.tensor(0.5), torch.tensor(0.9), torch.tensor(3.0, device=device)
    run = torch.compile(function, backend="tsfuser")
    given = tensors(device)
    with torch.no_grad(), no_fallback():
        run(rate, beta, step, *given)
        for mine, eager in zip(run(rate, beta, step, *given), function(rate, beta, step, *given)):
            assert mine.device == eager.device
            torch.testing.assert_close(mine, eager)


@pytest.mark.graphs
def test_scalars_that_eager_computes_on_the_cpu_are_in_no_group_of_a_gpu():
    host, scalar, full = typed(device=CPU), typed(), typed(4, 8)
    given = {"%rate": host, "%step": scalar, **{f"%x{k}": full for k in range(6)}}
    lines = [f"%d : {host} = aten::mul(%rate, 2.0)", f"%s : {scalar} = aten::mul(%step, 3.0)"]
    lines += [f"%r : {host} = aten::add(%rate, 1.0, 1)", f"%t : {scalar} = aten::div(%r, %s)"]
    for k in range(6):
        lines += [f"%a{k} = aten::mul(%x{k}, %d)", f"%b{k} = aten::mul(%a{k}, %t)"]
    fused = fuse_graph(graph(given, "\n".join(lines), ", ".join(f"%b{k}" for k in range(6))))
    [whole] = fused.findAllNodes(GROUP, True)
    first, *parts = part_at_scalars(fused, [Group(whole, False)], lambda device: True)
    assert kinds(first.node) == ["aten::mul", "aten::add", "aten::div"]
    assert [kinds(part.node) for part in parts] == [["aten::mul", "aten::mul"]] * 6
    [decay] = fused.findAllNodes("aten::mul", True)
    assert decay.inputsAt(0).debugName() == "rate"


def test_others_read_the_number_too(device):
    def function(*given):
        total = torch.stack([x.sum() for x in given if x.dim() == 1]).sum()
        return [total, *(x + total for x in given)]

    check(function, tensors(device), ops=200)


def test_three_parts_are_one_group(device):
    def function(*given):
        factor = torch.rsqrt(given[0].square().sum())
        return [x * factor for x in given[1:4]]

    run = torch.compile(function, backend="tsfuser")
    given = tensors(device)
    with torch.no_grad():
        run(*given)
    assert " in 1 group " in str(tsfuser.explain(run, *given))


def test_random_numbers_are_drawn_by_one_group(device):
    def function(*given):
        factor = torch.rsqrt(given[0].square().sum() + 1.0)
        return [torch.nn.functional.dropout(x * factor, 0.5) for x in given[1:]]

    run = torch.compile(function, backend="tsfuser")
    given = tensors(device)
    with torch.no_grad():
        run(*given)
        found = run(*given)
    assert " in 1 group " in str(tsfuser.explain(run, *given))
    factor = torch.rsqrt(given[0].square().sum() + 1.0)
    for mine, x in zip(found, given[1:]):
        torch.testing.assert_close(mine, torch.where(mine == 0, mine, 2 * x * factor))
