"""lightning-thunder with tsfuser as an executor: results are eager's, regions are where they pay."""

import importlib
import importlib.util

import pytest
import torch
import torch.nn.functional as F
from packaging.version import Version
from torch import nn

import tsfuser
from kit import thunders
from kit.support import assert_matches
from kit.thunders import strict  # noqa: F401  a fixture of all tests here
from tsfuser.errors import TsfuserWarning

if importlib.util.find_spec("thunder") is None:
    pytest.skip("lightning-thunder is not installed", allow_module_level=True)


thunder = region = None  # modules: `loaded` imports them, so that collecting tests imports no thunder


@pytest.fixture(autouse=True, scope="module")
def loaded():
    global thunder, region
    try:
        thunder = thunders.load()
    except ImportError as error:
        pytest.skip(str(error))
    region = importlib.import_module("tsfuser.frontends.thunder.region")


pytestmark = pytest.mark.graphs
TERMS = 200  # the longest sums of the models


def jit(function, **choices):
    return thunder.jit(function, executors=["tsfuser", "sdpa"], **choices)


def regions(jitted, backward=False):
    """The symbols of the regions of the last trace."""
    traces = thunder.last_backward_traces(jitted) if backward else thunder.last_traces(jitted)
    return thunders.regions(traces[-1])


class RMSNorm(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(1 + torch.randn(size) / 8)

    def forward(self, x):
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (wide * scale).type_as(x) * self.weight


class Block(nn.Module):
    """A block of a GPT with its attention written out."""

    def __init__(self, size, heads):
        super().__init__()
        self.heads = heads
        self.before, self.between = RMSNorm(size), nn.LayerNorm(size)
        self.qkv, self.out = nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.up, self.down = nn.Linear(size, 4 * size), nn.Linear(4 * size, size)

    def forward(self, x):
        batch, length, size = x.shape
        parts = self.qkv(self.before(x)).split(size, 2)
        q, k, v = (p.view(batch, length, self.heads, size // self.heads).transpose(1, 2) for p in parts)
        scores = (q @ k.transpose(-2, -1)) * (size // self.heads) ** -0.5
        seen = torch.tril(torch.ones(length, length, dtype=torch.bool, device=x.device))
        weights = F.softmax(scores.masked_fill(~seen, float("-inf")), -1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(batch, length, size))
        return x + self.down(F.gelu(self.up(self.between(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(50, 16), nn.Embedding(8, 16)
        self.blocks = nn.Sequential(Block(16, 2))
        self.head = nn.Linear(16, 50, bias=False)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        return F.cross_entropy(self.head(self.blocks(x)).view(-1, 50), tokens.view(-1))


MODELS = {
    "mlp": lambda: (nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4), nn.Softmax(-1)), (4, 8)),
    "rms": lambda: (RMSNorm(16), (4, 16)),
    "block": lambda: (Block(16, 2), (2, 8, 16)),
}


def step(model, function, x):
    """The output, and the gradients of the parameters for a loss of made-up weights."""
    model.zero_grad()
    out = function(x)
    weights = torch.linspace(-1, 1, out.numel(), device=out.device).view(out.shape).to(out.dtype)
    (out * weights).sum().backward()
    return [out.detach(), *(p.grad.clone() for p in model.parameters())]


def assert_steps(model, jitted, x):
    actual, eager = step(model, jitted, x), step(model, model, x)
    model.double()
    exact = step(model, model, x.double() if x.is_floating_point() else x)
    model.float()
    for ours, theirs, wanted in zip(actual, eager, exact):
        assert_matches(ours, theirs, wanted, ops=TERMS, strides=False)


@pytest.mark.parametrize("name", [pytest.param("block", marks=pytest.mark.long), "mlp", "rms"])
def test_models_train_as_in_eager(name, device):
    model, shape = MODELS[name]()
    model.to(device)
    jitted = jit(model)
    assert_steps(model, jitted, torch.randn(shape, device=device))
    assert regions(jitted) and regions(jitted, backward=True)
    assert tsfuser.stats()["launches"] > 0


@pytest.mark.long  # thunder's own, in test_thunder_models.py, trains always
def test_a_gpt_trains_as_in_eager(device):
    model = GPT().to(device)
    jitted = jit(model)
    assert_steps(model, jitted, torch.randint(0, 50, (2, 8), device=device))
    assert len(regions(jitted)) >= 4 and len(regions(jitted, backward=True)) >= 3


def test_the_executor_is_found_by_call_and_by_name():
    def function(x):
        return x.sigmoid() * 2 + 1

    x = torch.randn(4, 8)
    for executors in (["tsfuser"], [tsfuser.thunder_executor()]):
        jitted = thunder.jit(function, executors=executors)
        assert_matches(jitted(x), function(x), ops=4)
        (found,) = regions(jitted)
        assert found.sym.name == "tsfuser0" and "tsfuser0(" in str(thunder.last_traces(jitted)[-1])


def lone_view(x):
    return x.view(2, 16)


def views(x):
    return x.view(2, 4, 4).transpose(1, 2).unsqueeze(0), x.reshape(-1), x[1:, ::2]


def view_between_products(x):
    return ((x @ x.t()).view(2, 8) @ torch.ones(8, 8)).view(4, 4)


@pytest.mark.parametrize("function", [lone_view, views, view_between_products])
def test_views_alone_make_no_region(function):
    """Seed 003: a region of metadata ops is a kernel that cannot do better than torch."""
    jitted, x = jit(function), torch.randn(4, 8)
    actual, eager = jitted(x), function(x)
    for ours, theirs in zip(*((r if isinstance(r, tuple) else (r,)) for r in (actual, eager))):
        assert torch.equal(ours, theirs)
    assert regions(jitted) == []


@pytest.mark.parametrize("asked, count", [({}, 1), ({"fusion_type": "consecutive"}, 0)], ids=str)
def test_ops_with_a_product_between_them_are_one_region(asked, count):
    def function(x, first, second):
        return F.silu(F.linear(x, first)) * F.linear(x, second)

    inputs = [torch.randn(8, 8) for _ in range(3)]
    jitted = jit(function, **asked)
    assert_matches(jitted(*inputs), function(*inputs), function(*(x.double() for x in inputs)), ops=32)
    assert len(regions(jitted)) == count


def test_views_join_regions_that_compute():
    jitted, x = jit(lambda x: (x * 2).view(2, 16).transpose(0, 1) + 1), torch.randn(4, 8)
    assert_matches(jitted(x), (x * 2).view(2, 16).transpose(0, 1) + 1, strides=False)
    assert len(regions(jitted)) == 1


PROGRAMS = {
    "numbers first": lambda x: (2 - x) * (3 + x) * 0.5,
    "number over tensor": lambda x: 2 / (x * x + 1) + 1,
    "where": lambda x: torch.where(x > 0, 1.0, 2) + torch.where(x > 0, x, 0),
    "integer sum": lambda x: x.to(torch.int32).sum(1) + 1,
    "sum to bool": lambda x: (x > 0).sum() * 2,
    "prod": lambda x: x.prod(0) * 2 + 1,
    "variance": lambda x: x.var(1) + torch.var_mean(x, 1, correction=2)[0] * x.std(1, correction=0),
    "integer division": lambda x: torch.div((x * 9).to(torch.int64), 2) + 1,
    "floor division": lambda x: torch.floor_divide((x * 9).to(torch.int64), -2) * 3 + 1,
    "to int8": lambda x: (x * 3).to(torch.int8) + 1,
    "bfloat16": lambda x: F.silu(x.bfloat16()) * 2 + F.gelu(x.bfloat16()),
    "broadcast": lambda x: x.sum(0).unsqueeze(0).expand(4, 8) * x + x[:, :1],
    "double number": lambda x: x * torch.ones((), dtype=torch.float64) + 1,
    "no elements": lambda x: x[:0] * 2 + 1,
    "complex": lambda x: (x * 1j).real + 1,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_ops_mean_is_torchs(name, device):
    function, x = PROGRAMS[name], torch.randn(4, 8, device=device)
    jitted = jit(function)
    eager = function(x)
    precision = torch.bfloat16 if name == "bfloat16" else None
    exact = function(x.double()) if eager.is_floating_point() and precision is None else None
    for _ in range(2):
        assert_matches(jitted(x), eager, exact, ops=32, strides=False, precision=precision)
    if name not in ("complex", "double number", "no elements"):
        assert regions(jitted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
def test_one_over_a_tensor_is_in_a_region(dtype, device):
    """The gradient of silu has it."""

    def function(x):
        return 1 / (x + 3) * x.float() + 1

    x = torch.arange(-2, 30, device=device).reshape(4, 8).to(dtype)
    jitted = jit(function)
    exact = 1 / (x.double() + 3) * x.double() + 1
    assert_matches(jitted(x), function(x), exact, ops=8, precision=dtype if dtype.itemsize == 2 else None)
    [_], names = (
        regions(jitted),
        [symbol.sym.name for symbol in thunders.outside(thunder.last_traces(jitted)[-1])],
    )
    assert not names


def test_one_trace_serves_other_strides():
    """thunder's prologue asks for no strides: a program is made for each."""

    def function(x):
        return (x * 2 + 1).reshape(-1).sigmoid()

    jitted = jit(function)
    for x in (torch.randn(4, 8), torch.randn(8, 4).t(), torch.randn(4, 16)[:, ::2]):
        assert_matches(jitted(x), function(x), ops=8)
    assert thunder.cache_misses(jitted) == 1 and len(regions(jitted)) == 1


def test_symbolic_values():
    def function(x, n, a):
        return torch.softmax(x * n + a, -1) * x

    jitted = jit(function, cache="symbolic values")
    for rows, n, a in ((4, 3, 2.5), (6, 5, 1.5), (6, 5, -1.5), (4, 3, 2.5)):
        x = torch.randn(rows, 8)
        assert_matches(jitted(x, n, a), function(x, n, a), ops=32)
    assert regions(jitted)


ARGUMENTS = {
    "a dtype": (lambda x, to: (x * 2 + 1).to(to) * 2, [torch.bfloat16, torch.float64]),
    "a device": (lambda x, to: (x * 2 + 1) * torch.ones(8, device=to, dtype=x.dtype), [torch.device("cpu")]),
    "a tensor's": (lambda x, to: x.sigmoid() * 2 + to.to(x), [torch.arange(8)]),
    "a number": (lambda x, n: (x * n + n) / 3, [3, 2.5, -1]),
    "sizes": (lambda x, n: (x * n + 1).view(-1, x.shape[0]) * x.shape[1], [2]),
}


@pytest.mark.each_value
@pytest.mark.parametrize("cache", ["constant values", "symbolic values"])
@pytest.mark.parametrize("name", ARGUMENTS)
def test_dtypes_devices_and_numbers_as_arguments(name, cache):
    function, others = ARGUMENTS[name]
    for other in others:
        jitted = jit(
            function, cache=cache
        )  # thunder, with any executor, takes a later dtype for the first one
        for rows in (4, 6):
            x = torch.randn(rows, 8)
            eager = function(x, other)
            precision = torch.bfloat16 if eager.dtype is torch.bfloat16 else None
            assert_matches(jitted(x, other), eager, ops=16, strides=False, precision=precision)
            assert regions(jitted)


def test_zeros_of_both_signs_are_two_numbers():
    def function(x, a):
        return (x * a).reciprocal()

    jitted, x = jit(function, cache="symbolic values"), torch.ones(4)
    for a in (0.0, -0.0):
        assert torch.equal(jitted(x, a), function(x, a))


def test_behind_the_last_program_a_region_runs_unfused(monkeypatch):
    monkeypatch.setattr(region, "MOST_PROGRAMS", 2)
    jitted = jit(lambda x: x.sigmoid() * 2 + 1)
    for x in (torch.randn(4, 8), torch.randn(8, 4).t(), torch.randn(4, 16)[:, ::2], torch.randn(4, 8)):
        assert_matches(jitted(x), x.sigmoid() * 2 + 1, ops=8, strides=False)
    (found,) = regions(jitted)
    (call,) = found._call_ctx.values()
    assert len(call._programs) == 2


@pytest.mark.passes_fail
def test_a_mistake_of_ours_runs_unfused(monkeypatch):
    jitted, x = jit(lambda x: x.sigmoid() * 2 + 1), torch.randn(4, 8)

    def broken(*args):
        raise RuntimeError("no graph today")

    monkeypatch.setattr(region, "graph_of", broken)
    with pytest.warns(TsfuserWarning, match="thunder region tsfuser0 gave up.*no graph today"):
        assert torch.equal(jitted(x), x.sigmoid() * 2 + 1)


def test_regions_are_made_when_they_are_called(monkeypatch):
    """thunder makes the callable of a region several times."""
    made = []
    original = region.compile_graph
    monkeypatch.setattr(region, "compile_graph", lambda *args: made.append(1) or original(*args))
    jitted, x = jit(lambda x: (x.sigmoid() * 2 + 1).sum(0)), torch.randn(4, 8)
    jitted(x)
    jitted(x)
    assert len(regions(jitted)) == len(made) == 1


def dropped(x, p):
    return F.dropout(x.sigmoid() * 2 + 1, p) * 3


@pytest.mark.parametrize("p", [0.5, 0.1])
def test_dropout_draws_one_mask_inside_of_a_region(p, device):
    """The backward takes the mask of the forward; each call draws another, which the seed decides."""
    x = torch.ones(64, 64, device=device, requires_grad=True)
    jitted = jit(dropped)
    torch.manual_seed(3)
    out = jitted(x, p)
    out.sum().backward()
    assert torch.equal(out != 0, x.grad != 0)
    assert abs((out == 0).double().mean() - p) < 0.05
    values = (x.sigmoid() * 2 + 1).detach().double() * 3 / (1 - p)
    assert_matches(
        out.detach(), torch.where(out != 0, values, 0).float(), torch.where(out != 0, values, 0), ops=8
    )
    again = jitted(x, p)
    torch.manual_seed(3)
    assert not torch.equal(again, out) and torch.equal(jitted(x, p), out)
    for backward, name in ((False, "tsfuser_dropout"), (True, "tsfuser_dropout_backward")):
        (found,) = regions(jitted, backward)
        assert name in [symbol.sym.name for symbol in found.subsymbols]


def test_dropout_is_not_computed_again(device):
    """Its result goes from one region to another, with a product in between, and into the backward."""

    def function(x, weight):
        h = F.dropout(x.sigmoid() * 2, 0.5)
        return torch.tanh(h @ weight) * h

    x, weight = (torch.randn(32, 32, device=device, requires_grad=True) for _ in range(2))
    jitted = jit(function)
    out = jitted(x, weight)
    out.sum().backward()
    mask, gradients = out.detach() != 0, (x.grad, weight.grad)
    leaves = [v.detach().double().requires_grad_() for v in (x, weight)]
    h = leaves[0].sigmoid() * 2 * mask / 0.5
    wanted = torch.tanh(h @ leaves[1]) * h
    wanted.sum().backward()
    assert_matches(out.detach(), wanted.detach().float(), wanted.detach(), ops=TERMS)
    for ours, exact in zip(gradients, leaves):
        assert_matches(ours, exact.grad.float(), exact.grad, ops=TERMS)


def test_two_dropouts_of_one_tensor_are_two():
    jitted = jit(lambda x: F.dropout(x * 2, 0.5) + F.dropout(x * 2, 0.5))
    found = jitted(torch.ones(64, 64)).unique().tolist()
    assert found == [0.0, 4.0, 8.0] and len(regions(jitted)) == 1


@pytest.mark.parametrize("gradients", [False, True])
def test_dropout_without_a_mask_to_draw(gradients):
    """In evaluation, with probabilities of 0 and 1, and with one that varies: thunder's."""
    x = torch.ones(8, 8, requires_grad=gradients)
    for function in (
        lambda x: F.dropout(x * 2 + 1, 0.5, training=False),
        lambda x: F.dropout(x * 2 + 1, 0.0),
        lambda x: F.dropout(x * 2 + 1, 1.0),
    ):
        jitted = jit(function)
        assert torch.equal(jitted(x), function(x))
        assert "tsfuser_dropout" not in str(thunder.last_traces(jitted)[-1])
    jitted, x = jit(dropped, cache="symbolic values"), torch.ones(8, 8)
    for p in (0.5, 0.25):
        assert set(jitted(x, p).unique().tolist()) <= {0.0, *(dropped(x, 0.0) / (1 - p)).unique().tolist()}


def change_between(x):
    y = x * 2 + 1
    x.add_(1)
    return x * 3 + y


def change_first(x):
    x.mul_(2).add_(1)
    return x.sigmoid() * 2 + 1


@pytest.mark.parametrize("function", [change_between, change_first])
def test_writes_keep_their_place(function):
    """What reads an input before it is changed is not computed again behind the change."""
    x, y = torch.randn(4, 8), None
    y = x.clone()
    jitted = jit(function)
    assert_matches(jitted(x), function(y), ops=8)
    assert torch.equal(x, y) and regions(jitted)


def test_batch_norm_trains():
    model = nn.Sequential(nn.BatchNorm1d(8), nn.ReLU())
    eager = nn.Sequential(nn.BatchNorm1d(8), nn.ReLU())
    jitted, x = jit(model), torch.randn(16, 8)
    for ours, theirs in zip(step(model, jitted, x), step(eager, eager, x)):
        assert_matches(ours, theirs, ops=TERMS, strides=False)
    assert_matches(model[0].running_var, eager[0].running_var, ops=TERMS)


def test_thunders_examine_counts_regions():
    importlib.import_module("thunder.examine")
    jitted, x = jit(lambda x: x.sigmoid() * 2 + 1), torch.randn(4, 8)
    jitted(x)
    trace = thunder.last_traces(jitted)[-1]
    found = thunder.examine.get_fusion_symbols(trace, False)
    assert [symbol.sym.name for symbol in found] == ["tsfuser0"]
    [(name, call)] = thunder.examine.get_fusions(trace, False)
    assert name == "tsfuser0" and torch.equal(call(x)[0], jitted(x))


with_thunderfx = pytest.mark.skipif(
    Version(torch.__version__) >= Version("2.12"), reason="thunderfx of thunder 0.2.6 fails on this torch"
)


@pytest.fixture
def thunderfx():
    torch._dynamo.reset()
    yield importlib.import_module("thunder.dynamo").thunderfx
    torch._dynamo.reset()


@with_thunderfx
@pytest.mark.parametrize("name", MODELS)
def test_models_train_and_infer_with_thunderfx(name, device, thunderfx):
    model, shape = MODELS[name]()
    model.to(device)
    compiled = thunderfx(model, executors=["tsfuser", "sdpa"])
    assert_steps(model, compiled, torch.randn(shape, device=device))
    for traces in (compiled.last_traces, compiled.last_backward_traces):
        assert any(map(thunders.regions, traces))
    x, before = torch.randn(shape, device=device), tsfuser.stats()["launches"]
    with torch.no_grad():
        for _ in range(2):
            assert_matches(compiled(x), model(x), ops=TERMS, strides=False)
    # without gradients each op of the MLP stands alone between products
    assert (tsfuser.stats()["launches"] > before) is (name != "mlp")


@with_thunderfx
def test_thunderfx_makes_regions_and_none_of_views(thunderfx):
    def function(x):
        return torch.softmax(x.sigmoid() * 2 + 1, -1)

    x = torch.randn(4, 8, requires_grad=True)
    compiled = thunderfx(function, executors=["tsfuser"])
    out = compiled(x)
    assert_matches(out.detach(), function(x).detach(), function(x.double()).detach(), ops=32)
    out.square().sum().backward()
    ours, x.grad = x.grad, None
    function(x).square().sum().backward()
    assert_matches(ours, x.grad, ops=32)
    assert "tsfuser0(" in str(compiled.last_traces[-1]) and tsfuser.stats()["launches"] >= 2
    compiled = thunderfx(lone_view, executors=["tsfuser"])
    assert torch.equal(compiled(x), lone_view(x))
    assert "tsfuser0(" not in str(compiled.last_traces[-1])
