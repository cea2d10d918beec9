"""Scripted modules as CUDA graphs, by torch.cuda.make_graphed_callables: the captures of forward and backward
hold fused kernels, and a replay does what a direct call does."""

import copy

import pytest
import torch
import torch.nn.functional as F

import tsfuser
from kit.support import assert_matches, counted, no_fallback

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_cuda = pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")


class Block(torch.nn.Module):
    """Pointwise ops, a norm, a product and a norm over the batch, with parameters of each kind."""

    def __init__(self, width: int, p: float):
        super().__init__()
        self.p = p
        self.norm = torch.nn.LayerNorm(width)
        self.linear = torch.nn.Linear(width, width)
        self.batch = torch.nn.BatchNorm1d(width)
        self.scale = torch.nn.Parameter(torch.rand(width))

    def forward(self, x):
        y = F.gelu(self.norm(x) * self.scale)
        y = F.dropout(self.linear(y), self.p, self.training)
        return self.batch(torch.sigmoid(y) * x)


class Branching(torch.nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.rand(width))

    def forward(self, x):
        y = torch.tanh(x * self.scale) + x
        if y.size(0) > 8:
            y = torch.sigmoid(y) * x
        else:
            y = torch.relu(y) - x
        return torch.softmax(y, -1) * self.scale


class Autocasting(torch.nn.Module):
    def __init__(self, run):
        super().__init__()
        self.run = run

    def forward(self, x):
        with torch.autocast(DEVICE, torch.bfloat16, cache_enabled=False):
            return self.run(x)


def scripted(module):
    """Shares nothing with other modules of its class."""
    torch.jit._recursive.concrete_type_store = torch.jit._recursive.ConcreteTypeStore()
    return torch.jit.script(module)


@pytest.fixture(autouse=True)
def fused_only():
    torch.manual_seed(11)
    with no_fallback(), tsfuser.fuser():
        yield
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def step(module, x, gradient):
    """The result, and the gradients of the parameters and of the input."""
    module.zero_grad(set_to_none=True)
    x = x.detach().requires_grad_()
    out = module(x)
    out.backward(gradient)
    return [t.detach().clone() for t in (out, x.grad, *(p.grad for p in module.parameters()))]


def graphed(module, x, **options):
    return torch.cuda.make_graphed_callables(module, (x.detach().clone().requires_grad_(),), **options)


def inputs():
    return torch.randn(96, 48, device=DEVICE), torch.randn(96, 48, device=DEVICE)


@pytest.mark.parametrize("make, steps", [(lambda: Block(48, 0.25), 3), (lambda: Branching(48), 5)])
@pytest.mark.parametrize("with_autocast", [False, True])
@pytest.mark.parametrize("training", [True, False])
def test_what_is_recorded_is_fused(make, steps, with_autocast, training):
    """As many steps as the guide says are enough: the next one launches what all later ones do."""
    module = scripted(make().to(DEVICE).train(training))
    module = Autocasting(module) if with_autocast else module
    x, gradient = inputs()
    launches = []
    for _ in range(steps + 4):
        with counted() as rise, torch.set_grad_enabled(training):
            out = module(x.detach().requires_grad_(training))
            if training:
                torch.autograd.grad(out, tuple(module.parameters()), gradient.to(out.dtype))
        launches.append(rise["launches"])
        assert rise["fallbacks"] == {}
    assert set(launches[steps:]) == {launches[-1]} and launches[-1] > 0


@needs_cuda
def test_a_replay_gives_what_a_direct_call_gives():
    """With as many steps before the capture as torch takes by itself."""
    module = Block(48, 0.0).to(DEVICE)
    other = copy.deepcopy(module)
    x, gradient = inputs()
    with counted() as rise:
        replayed = graphed(scripted(module), x)
    assert rise["launches"] > 0 and rise["fallbacks"] == {}
    module.load_state_dict(other.state_dict())  # the steps before the capture have moved the running averages
    for _ in range(3):
        x, gradient = inputs()
        with counted() as rise:
            found = step(replayed, x, gradient)
        assert rise["launches"] == 0
        for mine, eager in zip(found, step(other, x, gradient)):
            assert_matches(mine, eager, ops=200)
        for name, value in other.named_buffers():
            assert_matches(dict(module.named_buffers())[name], value, ops=20)


@needs_cuda
@pytest.mark.parametrize("make", [lambda: Block(48, 0.25), lambda: Branching(48)])
def test_kernels_of_a_replay_are_those_of_a_direct_call(make):
    def names(call):
        call()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            call()
            torch.cuda.synchronize()
        return sorted(e.name for e in profile.events() if e.name.startswith("fused_"))

    module = make().to(DEVICE)
    x, gradient = inputs()
    plain = scripted(module)
    for _ in range(8):
        step(plain, x, gradient)
    direct = names(lambda: step(plain, x, gradient))
    replayed = graphed(scripted(copy.deepcopy(module)), x, num_warmup_iters=5)
    assert direct and names(lambda: step(replayed, x, gradient)) == direct


@needs_cuda
def test_dropout_in_a_replay():
    """Each replay draws a mask of its own, which its backward uses, too."""

    class Dropped(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(64))

        def forward(self, x):
            return F.dropout(torch.relu(x) * self.scale, 0.5, self.training)

    module = Dropped().to(DEVICE)
    x = torch.rand(512, 64, device=DEVICE) + 1.0
    replayed = graphed(scripted(module), x)
    masks = []
    for _ in range(3):
        out, of_x, of_scale = step(replayed, x, torch.ones_like(x))
        mask = out != 0
        assert 0.4 < mask.float().mean() < 0.6
        assert_matches(out, x * mask * 2.0, ops=4)
        assert_matches(of_x, mask * 2.0, ops=4)
        assert_matches(of_scale, (x * mask * 2.0).sum(0), ops=600)
        masks.append(mask)
    assert not torch.equal(masks[0], masks[1]) and not torch.equal(masks[1], masks[2])


@needs_cuda
def test_under_autocast():
    module = Block(48, 0.0).to(DEVICE)
    other = Autocasting(copy.deepcopy(module))
    exact = copy.deepcopy(module).double()
    x, gradient = inputs()
    replayed = graphed(Autocasting(scripted(module)), x)
    mine, eager, true = (
        step(replayed, x, gradient),
        step(other, x, gradient),
        step(exact, x.double(), gradient.double()),
    )
    for found, theirs, right in zip(mine, eager, true):
        off, eagers = ((t.double() - right).norm() / right.norm() for t in (found, theirs))
        assert off <= 2 * eagers + 1e-6


@needs_cuda
def test_evaluation_calls_the_module_with_any_shape():
    module = Block(48, 0.25).to(DEVICE)
    x, _ = inputs()
    replayed = graphed(scripted(module), x).eval()
    module.eval()  # the replayed one is a script, with a mode of its own
    with torch.no_grad():
        for _ in range(3):
            replayed(x)
        for rows in (7, 200, 33):
            x = torch.randn(rows, 48, device=DEVICE)
            with counted() as rise:
                out = replayed(x)
            assert rise["launches"] > 0
            assert_matches(out, module(x), ops=50)


@needs_cuda
def test_a_replay_of_inference():
    module = Block(48, 0.25).to(DEVICE).eval()
    x, _ = inputs()
    with torch.no_grad():
        replayed = torch.cuda.make_graphed_callables(scripted(module), (x.clone(),))
        for _ in range(3):
            x = torch.randn_like(x)
            with counted() as rise:
                out = replayed(x)
            assert rise["launches"] == 0
            assert_matches(out, module(x), ops=50)
