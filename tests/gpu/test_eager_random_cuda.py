"""With PYTORCH_NVFUSER_ENABLE=eager_random fused CUDA code draws eager's random numbers, bit for bit, and
leaves torch's generator as eager leaves it.

A function that was fused without the word has its groups in torch's and in our caches, so each test has fresh
ones.
"""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

import torch.nn.functional as F

import tsfuser
from kit.eager_random_report import INPUTS, OPS, SHAPES
from kit.support import (
    assert_matches,
    captured,
    copy_of,
    counted,
    fresh,
    fuse,
    groups,
    kinds,
    no_fallback,
    run_python,
    train,
)
from tsfuser import options
from tsfuser.ir.eager_random import Grid
from tsfuser.planning import eager_random

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
RANDOM = {"aten::dropout", "aten::native_dropout", "aten::rand_like", "aten::randn_like"}


@pytest.fixture(autouse=True)
def eager():
    tsfuser.reset()
    with options.override(enable={"eager_random": ""}), no_fallback():
        yield
    torch.cuda.synchronize()
    tsfuser.reset()


def generator():
    return torch.cuda.default_generators[torch.cuda.current_device()]


def seeded(function, *inputs, seed=29, offset=0):
    """The results of a call from a state of the generator, and the offset after it."""
    torch.cuda.manual_seed(seed)
    generator().set_offset(offset)
    out = function(*inputs)
    return (out if isinstance(out, tuple) else (out,)), generator().get_offset()


def same(found, wanted):
    assert found[1] == wanted[1], "the generator's offset"
    for k, (a, b) in enumerate(zip(found[0], wanted[0])):
        assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        assert torch.equal(a, b), f"result {k}: {int((a != b).sum())} of {a.numel()} differ"


def in_groups(scripted):
    return [kind for group in groups(scripted) for kind in kinds(group) if kind in RANDOM]


def check(function, *inputs, **state):
    """`function` is fused with its random ops, and gives what eager gives."""
    scripted = fuse(function, *inputs)
    assert in_groups(scripted)
    with counted() as rise:
        found = seeded(scripted, *inputs, **state)
    assert rise["launches"] > 0 and rise["fallbacks"] == {}
    same(found, seeded(function, *inputs, **state))
    return scripted


def test_the_comparison_finds_no_difference():
    grid = eager_random.grid_of("cuda:0")
    assert isinstance(grid, Grid)
    for name, tensors in eager_random.samples(grid, "cuda:0").items():
        assert all(eager_random.compare(grid, tensors).values()), name


def test_the_comparison_finds_a_wrong_grid():
    """And puts the generator back."""
    grid = eager_random.grid_of("cuda:0")
    wrong = Grid(grid.blocks - 1)
    before = torch.cuda.get_rng_state()
    differing = [
        name
        for name, tensors in eager_random.samples(grid, "cuda:0").items()
        if not all(eager_random.compare(wrong, tensors).values())
    ]
    assert differing == ["more elements than threads"]
    assert torch.equal(before, torch.cuda.get_rng_state())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_sizes(op, dtype):
    """From one element to several rounds of all threads, odd and even; a class of calls is planned once."""
    scripted = fuse(OPS[op], torch.ones(100, dtype=dtype, device="cuda"))
    for shape in SHAPES:
        x = torch.rand(shape, device="cuda").to(dtype)
        with tsfuser.fuser():
            scripted(x)
            scripted(x)
        same(seeded(scripted, x), seeded(OPS[op], x))
    assert in_groups(scripted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", INPUTS)
@pytest.mark.parametrize("op", OPS)
def test_layouts(op, layout, dtype):
    check(OPS[op], INPUTS[layout](dtype))


def rates(x):
    return (
        F.dropout(x, 0.1, True) * 1.0,
        F.dropout(x, 0.25, True) * 1.0,
        F.dropout(x, 0.9, True) * 1.0,
        F.dropout(x, 1e-6, True) * 1.0,
        F.dropout(x, 1.0 / 3.0, True) * 1.0,
        F.dropout(x, 0.0, True) * 1.0,
        F.dropout(x, 1.0, True) * 1.0,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_probabilities(dtype):
    check(rates, (torch.randn(513, 257, device="cuda") * 3).to(dtype))


def several(x, y):
    a = F.dropout(x + y, 0.1, True) * 2.0
    b = torch.rand_like(y) - a
    c = F.dropout(x.half() * 2, 0.5, True).float() + torch.randn_like(x)
    d = torch.randn_like(x.double()) * 2.0
    return a, b, c * 1.0, d, F.dropout(a * y, 0.2, True) * 4.0


@pytest.mark.parametrize("offset", [0, 4, 1 << 20, (1 << 34) - 8])
def test_several_ops_in_a_group(offset):
    """The offset of the later ones depends on the sizes of those before; the low counter word may overflow
    between them."""
    x, y = torch.rand(333, 1000, device="cuda"), torch.rand(1000, device="cuda")
    scripted = check(several, x, y, offset=offset)
    assert len(in_groups(scripted)) == 6


def test_without_the_word_the_numbers_are_others():
    x, y = torch.rand(333, 1000, device="cuda"), torch.rand(1000, device="cuda")
    with options.override(enable={}):
        tsfuser.reset()
        scripted = fuse(several, x, y)
        found, offset = seeded(scripted, x, y)
        tsfuser.reset()
    wanted, after = seeded(several, x, y)
    assert offset != after or not any(map(torch.equal, found, wanted))


def groups_and_others(x, w):
    y = F.dropout(x * 2.0, 0.3, True) + 1.0
    z = torch.mm(y, w)
    u = torch.rand(17, 5, device=x.device)
    z = F.dropout(torch.relu(z), 0.4, True) * torch.rand_like(z)
    b = torch.bernoulli(torch.sigmoid(z))
    return y, z, u, b, torch.randn_like(b) * 1.0 - torch.rand_like(b)


def test_groups_and_torchs_own_ops_take_turns():
    x, w = torch.rand(129, 64, device="cuda"), torch.eye(64, device="cuda")
    check(groups_and_others, x, w)


def block(x, bias, residual):
    return F.dropout(x + bias, 0.1, True) + residual


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [65, 1024])
def test_a_step_of_training(columns, dtype):
    """Which elements are dropped, forward and backward; what is kept is scaled in one rounding, not two of
    16 bits."""
    inputs = [
        (torch.rand(s, device="cuda") + 1).to(dtype).requires_grad_()
        for s in ((37, columns), (columns,), (37, columns))
    ]
    scripted = fresh(block)
    with tsfuser.fuser():
        train(scripted, inputs)
    assert in_groups(scripted)
    torch.cuda.manual_seed(3)
    out, (gx, gbias, gresidual) = train(scripted, inputs, calls=1)
    offset = generator().get_offset()
    torch.cuda.manual_seed(3)
    wanted, (ex, ebias, eresidual) = train(block, inputs, calls=1)
    assert offset == generator().get_offset()
    assert torch.equal(gx != 0, ex != 0) and torch.equal(gx, ex) and torch.equal(gresidual, eresidual)
    assert torch.equal(out == inputs[2], wanted == inputs[2])
    assert_matches(out, wanted, ops=4)
    assert_matches(gbias, ebias, ops=37)  # a sum of 37 rows


TRAINING = """
import sys, torch, tsfuser

class Net(torch.nn.Module):
    def __init__(self, inplace: bool):
        super().__init__()
        self.first, self.second = torch.nn.Linear(64, 128), torch.nn.Linear(128, 10)
        self.drop, self.last = torch.nn.Dropout(0.2, inplace=inplace), torch.nn.Dropout(0.4)

    def forward(self, x):
        x = self.drop(torch.relu(self.first(x)) * 1.5)
        return self.last(self.second(x) + 1.0) * 0.5

torch.manual_seed(0)
nets = [Net(len(sys.argv) > 1).cuda() for _ in range(2)]
nets[1].load_state_dict(nets[0].state_dict())
nets[1] = torch.jit.script(nets[1])
x = torch.randn(50, 64, device="cuda")
states = []
for net in nets:
    torch.cuda.manual_seed(7)
    optimizer = torch.optim.SGD(net.parameters(), 0.05)
    with tsfuser.fuser():
        for _ in range(20):
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()
    offset = torch.cuda.default_generators[0].get_offset()
    states.append((offset, [p.detach().clone() for p in net.parameters()]))
assert tsfuser.stats()["launches"] > 0 and states[0][0] == states[1][0], (tsfuser.stats(), states)
for a, b in zip(states[0][1], states[1][1]):
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
"""


@pytest.mark.parametrize("inplace", ["", "inplace"])
def test_a_run_of_training_follows_eager(inplace, tmp_path):
    """Twenty steps: the same elements are dropped in each, so weights stay together."""
    source = TRAINING.replace("len(sys.argv) > 1", str(bool(inplace)))
    status, _, err = run_python(tmp_path, source, PYTORCH_NVFUSER_ENABLE="eager_random")
    assert status == 0, err


def test_a_cuda_graph_replays_eagers_numbers():
    x, y = torch.rand(333, 1000, device="cuda"), torch.rand(1000, device="cuda")
    scripted = check(several, x, y)
    graph, outs = captured(lambda: scripted(x, y))
    torch.cuda.manual_seed(5)
    found = []
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        found.append([out.clone() for out in outs])
    offset = generator().get_offset()
    torch.cuda.manual_seed(5)
    for outs in found:
        same((outs, None), (several(x, y), None))
    assert offset == generator().get_offset()


def test_results_do_not_depend_on_neighbours_in_the_group():
    """A dropout that is added to something is rounded before, as in eager."""

    def added(x, y):
        z = F.dropout(x, 0.3, True)
        return z + y, z - y

    check(added, torch.rand(1000, 77, device="cuda"), torch.rand(1000, 77, device="cuda"))


@pytest.mark.parametrize("reduce", [False, True])
def test_rows(reduce):
    """A row that several passes read, or a reduction in between: the numbers stay."""

    def rows(x, scale: float):
        y = F.dropout(x, 0.5, True)
        return (y * scale).sum(1), y.sum(0), y

    x = torch.randint(0, 8, (64, 5000 if reduce else 96), device="cuda").float()
    check(rows, x, 2.0)


def test_check_compares_groups_with_random_numbers():
    x, y = torch.rand(333, 1000, device="cuda"), torch.rand(1000, device="cuda")
    report = tsfuser.check(fresh(several), x, y)
    assert report and report.random == ()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_another_device():
    x = copy_of(torch.rand(100, 77), "cuda:1")
    scripted = fuse(OPS["dropout"], x)
    results = []
    for function in (scripted, OPS["dropout"]):
        torch.cuda.default_generators[1].manual_seed(3)
        results.append((function(x), torch.cuda.default_generators[1].get_offset()))
    same(*results)
