"""Weights that autocast casts are cast by one op of a scripted program, and so are their gradients
(csrc_stubs/torchscript/weight_casts.cpp and cast_together.cpp)."""

import copy

import pytest
import torch
from torch import nn

import tsfuser
from kit.support import counted
from tsfuser import _C
from tsfuser.debug.plans import plans_of

pytestmark = [pytest.mark.usefixtures("forgotten", "fused_or_error", "switched_on"), pytest.mark.graphs]

TOGETHER = "tsfuser::cast_together"


@pytest.fixture
def switched_on():
    with tsfuser.fuser():
        yield


@pytest.fixture(params=[False, True], ids=["copied", "in groups"])
def in_groups(request, device):
    """Whether groups cast the weights: on CUDA they do, elsewhere torch copies them."""
    if device == "cuda" and not request.param:
        pytest.skip("groups cast them")
    before = _C.cast_in_groups_everywhere(request.param)
    yield request.param
    _C.cast_in_groups_everywhere(before)


class Layers(nn.Module):
    """Six parameters that are cast: of two convolutions, one of which has a bias, and of two products."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.third, self.last = nn.Linear(8, 12, bias=False), nn.Linear(12, 5)

    def forward(self, x):
        x = torch.sigmoid(self.second(torch.sigmoid(self.first(x) * 2)))
        return self.last(torch.tanh(self.third(x.mean([2, 3])) * 3))


class Written(Layers):
    """A weight is written before it is read."""

    def forward(self, x):
        x = torch.sigmoid(self.second(torch.sigmoid(self.first(x) * 2)))
        with torch.no_grad():
            self.last.weight.mul_(1.5)
        return self.last(torch.tanh(self.third(x.mean([2, 3])) * 3))


class Branching(Layers):
    """How the module is made decides what runs, as in ShuffleNet and, partly, in DenseNet."""

    def __init__(self):
        super().__init__()
        self.stride, self.saving = 1, False
        self.norm, self.other = nn.BatchNorm2d(3, affine=False), nn.BatchNorm2d(3, affine=False)

    def forward(self, x):
        if self.stride == 1:
            x = torch.sigmoid(self.first(self.norm(x)) * 2)
            if self.stride != 2:
                x = torch.sigmoid(self.second(x))
        else:
            x = torch.sigmoid(self.second(torch.tanh(self.first(self.other(x)))))
        a, b = x.chunk(2, 1)
        x = torch.cat((b, a), 1).mean([2, 3])
        if self.saving and bool(x.sum() > 0):
            x = torch.tanh(self.third(x))
        else:
            x = torch.tanh(self.third(x) * 3)
        return self.last(x)


class Explicit(nn.Module):
    """The program casts its weights itself, of which there are 20."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(10))

    def forward(self, x):
        y = x.to(torch.bfloat16)
        for block in self.blocks:
            w, b = block.weight.to(torch.bfloat16), block.bias.to(torch.bfloat16)
            y = torch.sigmoid(torch.nn.functional.linear(y, w, b) * 2)
        return y


class ExplicitlyWritten(Explicit):
    """A weight is written between two casts."""

    def forward(self, x):
        y = x.to(torch.bfloat16)
        for k, block in enumerate(self.blocks):
            if k == 5:
                with torch.no_grad():
                    self.blocks[7].weight.mul_(1.5)
            w, b = block.weight.to(torch.bfloat16), block.bias.to(torch.bfloat16)
            y = torch.sigmoid(torch.nn.functional.linear(y, w, b) * 2)
        return y


halved = []


@torch.jit.ignore
def halve(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        for weight in halved[-1]:
            weight.mul_(0.5)
    return x


class Ignored(Layers):
    """A function of Python, which torch does not look into, writes to a weight."""

    def forward(self, x):
        x = torch.sigmoid(self.second(torch.sigmoid(self.first(x) * 2)))
        return self.last(torch.tanh(self.third(halve(x.mean([2, 3]))) * 3))


def images(device):
    return torch.randn(4, 3, 6, 6, device=device)


def pair(kind, device):
    torch.manual_seed(0)
    plain = kind().to(device)
    ours = copy.deepcopy(plain)
    # else it shares what was compiled for the last one of its class
    torch.jit._recursive.concrete_type_store = torch.jit._recursive.ConcreteTypeStore()
    return plain, ours, torch.jit.script(ours)


def step(module, x):
    for p in module.parameters():
        p.grad = None
    with torch.autocast(x.device.type, torch.bfloat16):
        out = module(x)
    out.float().square().sum().backward()
    return out


def casts(scripted, x):
    with torch.autocast(x.device.type, torch.bfloat16):
        scripted(x)
        plans = list(plans_of(scripted.get_debug_state()))
    return [node for plan in plans for node in plan.graph.findAllNodes(TOGETHER)]


def assert_near(found, expected, part=0.03):
    """Both are of bfloat16 arithmetic, in other orders; one rounding is at most 0.004 of a number."""
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert (found.double() - expected.double()).norm() <= part * expected.double().norm()


def steps_agree(plain, ours, scripted, x, steps=5):
    """Results and gradients, of each step."""
    for _ in range(steps):
        expected, found = step(plain, x), step(scripted, x)
        assert_near(found.detach(), expected.detach())
        for p, q in zip(ours.parameters(), plain.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None)
            if p.grad is not None:
                assert_near(p.grad, q.grad)


def test_a_step_casts_all_weights_by_one_op(device, in_groups):
    plain, ours, scripted = pair(Layers, device)
    x = images(device)
    steps_agree(plain, ours, scripted, x)
    [node] = casts(scripted, x)
    assert len(list(node.inputsAt(0).node().inputs())) >= 4
    assert tsfuser.stats()["fallbacks"] == {}


@pytest.mark.usefixtures("kept_branches")
def test_casts_in_branches_that_modules_decide_are_in_one_op(device):
    plain, ours, scripted = pair(Branching, device)
    x = images(device)
    steps_agree(plain, ours, scripted, x, 4)
    for stride, saving in ((2, False), (2, True), (1, True), (1, False)):
        for module in (plain, scripted):
            module.stride, module.saving = stride, saving
        steps_agree(plain, ours, scripted, x, 1)
        steps_agree(plain, ours, scripted, -x, 1)
    [node] = casts(scripted, x)
    given = [v.node().s("name") for v in node.inputsAt(0).node().inputs()]
    assert sorted(given) == ["bias"] + ["weight"] * 7  # six of them in branches
    with torch.profiler.profile() as seen:
        casts(scripted, x)
    copies = [e.count for e in seen.key_averages() if e.key == "aten::_foreach_copy_"]
    assert copies == ([] if device == "cuda" else [1])


def laid_out(device, dtype=torch.float32):
    """Weights of many sizes and layouts: more than one launch takes, without elements, with gaps."""
    generator = torch.Generator().manual_seed(4)

    def make(*sizes):
        return torch.randn(sizes, generator=generator).to(device, dtype)

    weights = [make(k + 1, 5) for k in range(90)]
    weights += [make(7, 6, 3, 3).contiguous(memory_format=torch.channels_last), make(9, 4).t(), make(0, 3)]
    weights += [make(8, 10)[:, ::2], make(33)[1:], make(), make(300, 257)]
    weights[0].view(-1)[:4] = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0])
    return weights


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_casts_and_gradients_are_torchs(device, in_groups, dtype):
    weights = [w.requires_grad_() for w in laid_out(device)]
    gradients = laid_out(device, dtype)
    for _ in range(3):
        on = [True] * len(weights)
        with counted() as rise:
            found = torch.ops.tsfuser.cast_together(weights, on, True, True, dtype, dtype, False)
        back = torch.autograd.grad(found, weights, gradients)
        for made, weight in (*zip(found, weights), *zip(back, gradients)):
            wanted = weight.detach().to(made.dtype)
            assert made.stride() == wanted.stride()
            torch.testing.assert_close(made.detach(), wanted, rtol=0, atol=0, equal_nan=True)
        assert {made.dtype for made in found} == {dtype} and {g.dtype for g in back} == {torch.float32}
    assert rise["fallbacks"] == {}
    assert bool(rise["launches"]) == in_groups and rise["launches"] < 16


def test_gradients_are_cast_back_by_one_node(device):
    _, _, scripted = pair(Layers, device)
    for _ in range(5):
        out = step(scripted, images(device))
    names, todo = [], [out.grad_fn]
    seen = set()
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            names.append(node.name())
            todo += [following for following, _ in node.next_functions]
    assert names.count("tsfuser::CastBackward") == 1


def test_weights_without_gradients_and_weights_that_are_not_cast(device, in_groups):
    """One is frozen, one is in bfloat16 by itself, and one gets its gradient by its own hook."""
    plain, ours, scripted = pair(Layers, device)
    calls = []
    for module in (plain, ours):
        module.second.weight.requires_grad_(False)
        module.third.weight.data = module.third.weight.data.bfloat16()
        module.first.weight.register_hook(lambda g: calls.append(g.dtype) or g * 2)
    x = images(device)
    steps_agree(plain, ours, scripted, x)
    assert len(casts(scripted, x)) == 1
    assert set(calls) == {torch.float32}


@pytest.mark.parametrize("kind", [Written, Ignored])
def test_weights_that_may_be_written_are_cast_where_they_are_read(device, kind):
    plain, ours, scripted = pair(kind, device)
    x = images(device)
    for _ in range(4):
        halved.append([plain.last.weight])
        expected = step(plain, x)
        halved.append([ours.last.weight])
        found = step(scripted, x)
        assert_near(found.detach(), expected.detach())
        assert torch.equal(ours.last.weight, plain.last.weight)
    halved.append([])
    assert casts(scripted, x) == []


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inference_casts_all_weights_by_one_op(device, in_groups, mode):
    plain, ours, scripted = pair(Layers, device)
    x = images(device)
    with mode(), torch.autocast(x.device.type, torch.bfloat16):
        for _ in range(4):
            assert_near(scripted(x), plain(x))
        assert len(casts(scripted, x)) == 1
    with torch.no_grad():
        for p, q in zip(ours.parameters(), plain.parameters(), strict=True):
            p.copy_(q.mul_(0.5))
    with mode(), torch.autocast(x.device.type, torch.bfloat16):  # eager keeps casts until such a block ends
        assert_near(scripted(x), plain(x))


def test_inference_after_training(device):
    plain, ours, scripted = pair(Layers, device)
    x = images(device)
    steps_agree(plain, ours, scripted, x)
    with torch.no_grad(), torch.autocast(x.device.type, torch.bfloat16):
        assert_near(scripted(x), plain(x))
    with torch.autocast(x.device.type, torch.bfloat16), torch.inference_mode():
        assert_near(scripted(x), plain(x))


def test_a_graph_that_is_kept_and_gradients_of_gradients(device, in_groups):
    plain, ours, scripted = pair(Layers, device)
    x = images(device)
    steps_agree(plain, ours, scripted, x)
    found = []
    for module, parameters in ((plain, plain), (scripted, ours)):
        with torch.autocast(x.device.type, torch.bfloat16):
            loss = module(x).float().square().sum()
        weight = parameters.third.weight
        loss.backward(retain_graph=True)
        [first] = torch.autograd.grad(loss, weight, create_graph=True)
        [second] = torch.autograd.grad(first.square().sum(), weight)
        found.append([first.detach(), second])
    for ours_, plain_ in zip(found[1], found[0], strict=True):
        assert_near(ours_, plain_)


def plain_step(module, x):
    for p in module.parameters():
        p.grad = None
    out = module(x)
    if out.requires_grad:
        out.float().square().sum().backward()
    return out


def explicit_steps_agree(plain, ours, scripted, x, steps=5):
    for _ in range(steps):
        expected, found = plain_step(plain, x), plain_step(scripted, x)
        assert_near(found.detach(), expected.detach())
        for p, q in zip(ours.parameters(), plain.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None)
            if p.grad is not None:
                assert p.grad.dtype == q.grad.dtype
                assert_near(p.grad, q.grad)
    plans = list(plans_of(scripted.get_debug_state()))
    return [node for plan in plans for node in plan.graph.findAllNodes(TOGETHER)]


@pytest.mark.parametrize("gradients", [True, False])
def test_casts_of_the_program_are_made_in_parts(device, in_groups, gradients):
    plain, ours, scripted = pair(Explicit, device)
    x = torch.randn(4, 8, device=device)
    with torch.set_grad_enabled(gradients):
        found = explicit_steps_agree(plain, ours, scripted, x)
    assert [node.inputsAt(0).node().inputsSize() for node in found] == [16, 4]
    assert tsfuser.stats()["fallbacks"] == {}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_weights_of_other_dtypes_that_the_program_casts(device, dtype):
    """Also later, when the graph is made, and where no gradient is asked for."""
    plain, ours, scripted = pair(Explicit, device)
    x = torch.randn(4, 8, device=device)
    for k in (3, 4):
        for module in (plain, ours):
            module.blocks[k].weight.data = module.blocks[k].weight.data.to(dtype)
        assert explicit_steps_agree(plain, ours, scripted, x)
    for module in (plain, ours):
        module.blocks[0].weight.requires_grad_(False)
        module.blocks[3].weight.requires_grad_(False)
    explicit_steps_agree(plain, ours, scripted, x)


def test_a_traced_program(device):
    plain, ours, _ = pair(Layers, device)
    x = images(device)
    with torch.autocast(x.device.type, torch.bfloat16, cache_enabled=False):
        traced = torch.jit.trace(ours, (x,), check_trace=False)
    for _ in range(5):
        expected, found = step(plain, x), plain_step(traced, x)
        assert_near(found.detach(), expected.detach())
        for p, q in zip(ours.parameters(), plain.parameters(), strict=True):
            assert p.grad.dtype == q.grad.dtype
            assert_near(p.grad, q.grad)
    plans = list(plans_of(traced.get_debug_state()))
    assert sum(len(plan.graph.findAllNodes(TOGETHER)) for plan in plans) == 1


def test_a_weight_that_is_written_between_casts_of_the_program(device):
    plain, ours, scripted = pair(ExplicitlyWritten, device)
    assert explicit_steps_agree(plain, ours, scripted, torch.randn(4, 8, device=device)) == []
    assert torch.equal(ours.blocks[7].weight, plain.blocks[7].weight)
